# Makes `node-gyp rebuild` mean "run cmake-js", for an installation without a matching prebuild.
{
  "targets": [
    {
      "target_name": "cmake",
      "type": "none",
      "actions": [
        {
          "action_name": "cmake_js",
          "inputs": ["CMakeLists.txt"],
          # Never created, so the action runs every time and CMake decides what is stale.
          "outputs": ["<(module_root_dir)/build/.always"],
          "action": [
            "node",
            "<!(node -p \"require.resolve('cmake-js/bin/cmake-js')\")",
            "compile",
            "-d", "<(module_root_dir)",
            "-O", "<(module_root_dir)/build/cmake",
            "--CDDUOKV_WERROR=OFF"
          ]
        }
      ]
    }
  ]
}
