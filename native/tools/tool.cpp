#include "tools/tool.h"

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <sstream>
#include <stdexcept>

#include "ops/load.h"
#ifdef DUOKV_HAS_CPU
#include "cpu/cpu.h"
#endif

namespace duokv::tools {

Arguments::Arguments(int argc, char** argv, const std::vector<Option>& options) {
  for (int i = 0; i < argc; ++i) command_ += (i > 0 ? " " : "") + std::string(argv[i]);
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument.rfind("--", 0) != 0) {
      words_.push_back(argument);
      continue;
    }
    const auto option = std::find_if(options.begin(), options.end(),
                                     [&](const Option& o) { return argument.substr(2) == o.name; });
    if (option == options.end()) throw std::invalid_argument(argument + " is not an option");
    if (option->value != nullptr && ++i == argc)
      throw std::invalid_argument(argument + " needs a value: " + option->value);
    given_.emplace_back(option->name, option->value != nullptr ? argv[i] : "");
  }
}

bool Arguments::has(const std::string& name) const {
  return std::any_of(given_.begin(), given_.end(), [&](const auto& g) { return g.first == name; });
}

std::string Arguments::get(const std::string& name, const std::string& fallback) const {
  const std::vector<std::string> values = all(name);
  return values.empty() ? fallback : values.back();
}

int64_t Arguments::integer(const std::string& name, int64_t fallback) const {
  const std::string text = get(name, std::to_string(fallback));
  size_t read = 0;
  int64_t value = 0;
  try {
    value = std::stoll(text, &read);
  } catch (const std::exception&) {
  }
  if (read != text.size() || value < 1)
    throw std::invalid_argument("--" + name + " is '" + text + "'; it must be a positive integer");
  return value;
}

std::vector<std::string> Arguments::all(const std::string& name) const {
  std::vector<std::string> values;
  for (const auto& [given, value] : given_)
    if (given == name) values.push_back(value);
  return values;
}

std::string usage(const std::vector<Arguments::Option>& options) {
  std::string text;
  for (const Arguments::Option& o : options) {
    std::string line = std::string("  --") + o.name + (o.value != nullptr ? std::string(" ") + o.value : "");
    line.resize(std::max<size_t>(line.size() + 1, 24), ' ');
    text += line + o.help + "\n";
  }
  return text;
}

std::shared_ptr<Device> open_device(const std::string& backend, int32_t threads) {
  if (backend != "cpu") return Device::open(ops::load_backend(backend), threads);
#ifdef DUOKV_HAS_CPU
  return Device::open(cpu::op_table(), threads);
#else
  throw Error("ERR_DEVICE_UNAVAILABLE",
              "the CPU backend is not part of this build; give a backend's library");
#endif
}

Json describe(const Arguments& arguments, const Device& device) {
  const ops::DeviceInfo info = device.info();
  const std::time_t now = std::time(nullptr);
  char date[32];
  std::strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
  Json record;
  record["command"] = arguments.command();
  record["date"] = date;
  record["device"] = {
      {"backend", device.table().backend}, {"name", info.name},           {"isa", info.isa},
      {"libraries", info.libraries},       {"attention", info.attention}, {"memoryTotal", info.memory_total}};
  record["facts"] = Json::object();
  for (const std::string& fact : arguments.all("fact")) {
    const size_t equals = fact.find('=');
    if (equals == std::string::npos) throw std::invalid_argument("--fact '" + fact + "' is not KEY=VALUE");
    record["facts"][fact.substr(0, equals)] = fact.substr(equals + 1);
  }
  return record;
}

void write_json(const std::string& path, const Json& json) {
  const std::string partial = path + ".partial";
  std::ofstream file(partial);
  file << json.dump(1) << "\n";
  file.close();
  if (!file || std::rename(partial.c_str(), path.c_str()) != 0)
    throw std::runtime_error("cannot write " + path);
}

double median(std::vector<double> values) {
  if (values.empty()) throw std::invalid_argument("median of no values");
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

std::vector<std::string> split(const std::string& list) {
  std::vector<std::string> words;
  std::istringstream stream(list);
  for (std::string word; std::getline(stream, word, ',');)
    if (!word.empty()) words.push_back(word);
  return words;
}

}  // namespace duokv::tools
