// What the programs share: their arguments, the backend, and the record they write.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "core/device.h"

namespace duokv::tools {

using Json = nlohmann::ordered_json;

// Arguments of the form --name value, --name and words. Throws std::invalid_argument on an option that is not
// in the usage, or lacks its value.
class Arguments {
 public:
  struct Option {
    const char* name;   // without --
    const char* value;  // what it takes, null: nothing
    const char* help;
  };
  Arguments(int argc, char** argv, const std::vector<Option>& options);

  bool has(const std::string& name) const;
  // The last value given, else `fallback`.
  std::string get(const std::string& name, const std::string& fallback) const;
  int64_t integer(const std::string& name, int64_t fallback) const;
  std::vector<std::string> all(const std::string& name) const;  // every value given
  const std::vector<std::string>& words() const { return words_; }
  std::string command() const { return command_; }

 private:
  std::vector<std::pair<std::string, std::string>> given_;
  std::vector<std::string> words_;
  std::string command_;
};

// Lines "  --name VALUE  help".
std::string usage(const std::vector<Arguments::Option>& options);

// "cpu", or the path of a backend's library. Throws ERR_DEVICE_UNAVAILABLE.
std::shared_ptr<Device> open_device(const std::string& backend, int32_t threads = 0);

// A record of what ran where: the command, the UTC date, the device, and every --fact KEY=VALUE.
Json describe(const Arguments& arguments, const Device& device);

// Replaces the file in one step, so that a program that is stopped leaves its last complete record.
void write_json(const std::string& path, const Json& json);

double median(std::vector<double> values);

// Words separated by commas.
std::vector<std::string> split(const std::string& list);

}  // namespace duokv::tools
