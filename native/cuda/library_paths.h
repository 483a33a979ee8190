// Where NVIDIA's libraries are looked for at run time.
#pragma once

#include <glob.h>

#include <cstdlib>
#include <string>
#include <vector>

namespace duokv::cuda {

inline std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

inline void add_matches(const std::string& pattern, std::vector<std::string>& paths) {
  glob_t found;
  if (glob(pattern.c_str(), 0, nullptr, &found) == 0) {
    for (size_t i = 0; i < found.gl_pathc; ++i) paths.emplace_back(found.gl_pathv[i]);
  }
  globfree(&found);
}

// In order: what the environment variable names, and nothing else then; for each of `libraries` the dynamic
// loader's own search, the toolkit if it may be there, and these folders of pip's nvidia packages in the
// active Python environment, the user's and the system's.
inline std::vector<std::string> library_paths(const char* variable, const std::vector<std::string>& libraries,
                                              bool in_toolkit,
                                              const std::vector<std::string>& wheel_folders) {
  if (const std::string chosen = environment(variable); !chosen.empty()) return {chosen};
  std::vector<std::string> paths;
  for (const std::string& library : libraries) {
    paths.push_back(library);
    for (const std::string& root :
         {environment("CUDA_HOME"), environment("CUDA_PATH"), std::string("/usr/local/cuda")}) {
      if (in_toolkit && !root.empty()) add_matches(root + "/lib64/" + library, paths);
    }
    const std::string home = environment("HOME");
    for (const std::string& root :
         {environment("VIRTUAL_ENV"), environment("CONDA_PREFIX"), home.empty() ? home : home + "/.local",
          std::string("/usr/local"), std::string("/usr")}) {
      if (root.empty()) continue;
      for (const std::string& folder : wheel_folders)
        add_matches(root + "/lib/python3*/*-packages/nvidia/" + folder + "/lib/" + library, paths);
    }
  }
  return paths;
}

}  // namespace duokv::cuda
