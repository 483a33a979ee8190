#include "tools/golden_case.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <stdexcept>

namespace duokv::tools {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFiles[] = {"config.json", "weights.safetensors", "inputs.safetensors", "expected.json",
                                  "expected.safetensors"};

bool is_case(const fs::path& directory) {
  return std::all_of(std::begin(kFiles), std::end(kFiles),
                     [&](const char* file) { return fs::is_regular_file(directory / file); });
}

std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::string bytes((std::istreambuf_iterator<char>(file)), {});
  if (!file) throw std::runtime_error(path.string() + ": cannot be read");
  return bytes;
}

// Calls use(name, dtype, shape, data, bytes) for every tensor: 8 bytes of header length, a JSON header, data.
template <class Use>
void read_safetensors(const fs::path& path, Use&& use) {
  const std::string bytes = read_file(path);
  uint64_t header = 0;
  if (bytes.size() >= 8) std::memcpy(&header, bytes.data(), 8);
  if (bytes.size() < 8 || header > bytes.size() - 8)
    throw std::runtime_error(path.string() + ": the header is longer than the file");
  const Json index = Json::parse(bytes.substr(8, header));
  const size_t data = 8 + static_cast<size_t>(header);
  for (const auto& [name, info] : index.items()) {
    if (name == "__metadata__") continue;
    const size_t begin = info.at("data_offsets").at(0), end = info.at("data_offsets").at(1);
    if (begin > end || end > bytes.size() - data)
      throw std::runtime_error(path.string() + ": " + name + " lies beyond the end of the file");
    use(name, info.at("dtype").template get<std::string>(),
        info.at("shape").template get<std::vector<int64_t>>(), bytes.data() + data + begin, end - begin);
  }
}

template <class T>
std::vector<T> values(const char* data, size_t bytes) {
  std::vector<T> result(bytes / sizeof(T));
  std::memcpy(result.data(), data, result.size() * sizeof(T));
  return result;
}

std::map<std::string, std::vector<float>> read_floats(const fs::path& path) {
  std::map<std::string, std::vector<float>> tensors;
  read_safetensors(path, [&](const std::string& name, const std::string& dtype, const std::vector<int64_t>&,
                             const char* data, size_t bytes) {
    if (dtype != "F32") throw std::runtime_error(path.string() + ": " + name + " is " + dtype + ", not F32");
    tensors[name] = values<float>(data, bytes);
  });
  return tensors;
}

ModelConfig parse_config(const Json& json) {
  ModelConfig c;
  c.design = parse_design(json.at("design"));
  c.fusion = parse_fusion(json.value("fusion", "joint"));
  c.local_source = parse_local_source(json.value("localSource", "per-layer"));
  c.provider = parse_provider(json.value("provider", "boundary"));
  c.vocab = json.at("vocab"), c.hidden = json.at("hidden"), c.ffn = json.at("ffn");
  c.lower_layers = json.at("lowerLayers"), c.upper_layers = json.at("upperLayers");
  c.query_heads = json.at("queryHeads"), c.kv_heads = json.at("kvHeads"), c.head_dim = json.at("headDim");
  c.window = json.value("window", int64_t{1});
  c.history_window = json.value("historyWindow", int64_t{0});
  c.adapter_rank = json.value("adapterRank", int64_t{0});
  c.rope_theta = json.value("ropeTheta", 10000.0), c.rope_scale = json.value("ropeScale", 1.0);
  c.rms_norm_eps = json.value("rmsNormEps", 1e-5);
  return c;
}

template <class T>
const std::vector<T>& find(const std::map<std::string, std::vector<T>>& tensors, const std::string& name) {
  const auto found = tensors.find(name);
  if (found == tensors.end()) throw std::runtime_error("the case has no tensor " + name);
  return found->second;
}

}  // namespace

int64_t GoldenCase::rows() const {
  int64_t product = 1;
  for (size_t i = shape.size() > 2 ? shape.size() - 3 : 0; i + 1 < shape.size(); ++i) product *= shape[i];
  return product;
}

Batch GoldenCase::batch(int64_t update) const {
  const int64_t first = update * rows() * length();
  return {rows(),
          length(),
          find(tokens, "tokens").data() + first,
          find(ids, "document_ids").data() + first,
          find(tokens, "targets").data() + first,
          find(ids, "target_document_ids").data() + first};
}

const std::vector<float>& GoldenCase::expect(const std::string& tensor) const {
  return find(expected, tensor);
}

double GoldenCase::fact(const Json& where, const char* key) const {
  if (!where.contains(key) || !where[key].is_number())
    throw std::runtime_error("expected.json has no number " + std::string(key));
  return where[key];
}

std::vector<std::string> find_golden_cases(const std::string& directory) {
  std::vector<std::string> cases;
  if (is_case(directory))
    cases.push_back(directory);
  else if (fs::is_directory(directory))
    for (const fs::directory_entry& entry : fs::directory_iterator(directory))
      if (is_case(entry.path())) cases.push_back(entry.path().string());
  if (cases.empty()) throw std::runtime_error(directory + ": has no golden case");
  std::sort(cases.begin(), cases.end());
  return cases;
}

GoldenCase read_golden_case(const std::string& directory) {
  const fs::path path(directory);
  GoldenCase golden;
  golden.name = path.filename().string();
  golden.config = parse_config(Json::parse(read_file(path / "config.json")));
  golden.facts = Json::parse(read_file(path / "expected.json"));
  golden.weights = read_floats(path / "weights.safetensors");
  golden.expected = read_floats(path / "expected.safetensors");
  read_safetensors(path / "inputs.safetensors",
                   [&](const std::string& name, const std::string& dtype, const std::vector<int64_t>& shape,
                       const char* data, size_t bytes) {
                     if (dtype == "I32")
                       golden.tokens[name] = values<int32_t>(data, bytes);
                     else
                       golden.ids[name] = values<int64_t>(data, bytes);
                     if (name == "tokens") golden.shape = shape;
                   });
  if (golden.shape.size() < 2) throw std::runtime_error(directory + ": tokens are not [rows, length]");
  return golden;
}

}  // namespace duokv::tools
