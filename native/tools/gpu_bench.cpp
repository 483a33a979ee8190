// Measures a backend without Node: sessions and training steps as users run them, every operation by itself,
// and the device's own ceilings.
#include <cstdio>
#include <random>
#include <stdexcept>

#include "tools/bench.h"
#include "tools/kernel_timing.h"

namespace duokv::tools {

void Campaign::add(const char* section, Json row, const std::vector<double>& ms) {
  row["median"] = median(ms);
  std::printf("%s %s\n", section, row.dump().c_str());
  std::fflush(stdout);
  row["ms"] = ms;
  record[section].push_back(std::move(row));
  save();
}

ModelConfig preset(const std::string& shape, Design design) {
  ModelConfig c;
  c.design = design, c.window = design == Design::LocalHistory ? 128 : 1;
  c.vocab = 32768, c.hidden = 768, c.ffn = 2048, c.lower_layers = c.upper_layers = 8;
  c.query_heads = 12, c.kv_heads = 4, c.head_dim = 64;
  const bool narrow = design == Design::Gqa2, paired = design == Design::Gqa4Cla2;
  if (narrow || paired) c.ffn = 2144;
  if (shape == "305m") {
    if (design != Design::LocalHistory)
      throw std::invalid_argument("there is no 305m preset of " + std::string(name(design)));
    c.hidden = 1024, c.ffn = 2816, c.lower_layers = c.upper_layers = 12, c.query_heads = 16;
  } else if (shape == "tiny") {
    c.vocab = 512, c.hidden = 128, c.ffn = narrow ? 364 : paired ? 368 : 352;
    c.lower_layers = c.upper_layers = 2, c.query_heads = 4, c.kv_heads = 2, c.head_dim = 32;
    if (design == Design::LocalHistory) c.window = 32;
  } else if (shape != "126m") {
    throw std::invalid_argument("--shape is '" + shape + "'; it must be 126m, 305m or tiny");
  }
  if (narrow) c.kv_heads /= 2;
  return c;
}

std::shared_ptr<Model> fast_model(const std::shared_ptr<Device>& device, const ModelConfig& config) {
  const std::shared_ptr<Model> model = Model::create(device, config, "");
  uint64_t seed = 9;
  for (const Parameter& p : model->plan().parameters) {
    std::vector<float> values = random_values(p.elements, 0.02f, ++seed);
    if (p.init == Parameter::Init::Ones)
      for (float& value : values) value += 1;
    model->write(p.name, values.data(), p.elements);
  }
  return model;
}

std::vector<int32_t> random_tokens(int64_t count, int64_t vocab, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::uniform_int_distribution<int32_t> draw(0, static_cast<int32_t>(vocab - 1));
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  for (int32_t& token : tokens) token = draw(random);
  return tokens;
}

namespace {

struct Section {
  const char* name;
  void (*run)(Campaign&);
};
constexpr Section kSections[] = {{"ceilings", bench_ceilings},   {"prefill", bench_prefill},
                                 {"decode", bench_decode},       {"request", bench_request},
                                 {"train", bench_train},         {"linear", bench_linear},
                                 {"attention", bench_attention}, {"rows", bench_rows}};

const std::vector<Arguments::Option> kOptions = {
    {"backend", "PATH", "library of the backend, or cpu"},
    {"out", "FILE", "where the record goes (default gpu_bench.json)"},
    {"shape", "NAME", "126m (default), 305m, or tiny for a trial"},
    {"train-shapes", "LIST", "shapes to train, default 126m,305m (tiny where --shape is)"},
    {"precisions", "LIST", "default fp32,fp32-tf32x3,bf16-tf32x3,bf16"},
    {"graphs", "WHICH", "off, on or both (default)"},
    {"microbatch", "ROWS", "of a training step, default 16; halved where memory is short"},
    {"repeats", "COUNT", "timed calls, default 10"},
    {"quick", nullptr, "3 timed calls"},
    {"fact", "KEY=VALUE", "added to the record"},
    {"help", nullptr, "prints this"}};

void run(const Arguments& arguments) {
  Campaign campaign;
  campaign.device = open_device(arguments.get("backend", "cpu"));
  campaign.shape = arguments.get("shape", "126m");
  campaign.precisions = split(arguments.get("precisions", "fp32,fp32-tf32x3,bf16-tf32x3,bf16"));
  for (const std::string& name : campaign.precisions) parse_precision(name);
  const std::string graphs = arguments.get("graphs", "both");
  if (graphs != "on") campaign.graphs.push_back(false);
  if (graphs != "off") campaign.graphs.push_back(true);
  campaign.repeats = static_cast<int>(arguments.integer("repeats", arguments.has("quick") ? 3 : 10));
  campaign.warmups = 3;  // the second call of a shape records it
  campaign.microbatch = arguments.integer("microbatch", 16);
  campaign.train_shapes = split(arguments.get("train-shapes", campaign.tiny() ? "tiny" : "126m,305m"));
  campaign.record = describe(arguments, *campaign.device);
  campaign.record["settings"] = {
      {"shape", campaign.shape}, {"warmups", campaign.warmups}, {"repeats", campaign.repeats}};
  const std::string out = arguments.get("out", "gpu_bench.json");
  campaign.save = [&] { write_json(out, campaign.record); };
  std::vector<const Section*> chosen;
  for (const std::string& word : arguments.words()) {
    const Section* found = nullptr;
    for (const Section& section : kSections)
      if (word == section.name) found = &section;
    if (found == nullptr) throw std::invalid_argument("there is no section " + word);
    chosen.push_back(found);
  }
  if (chosen.empty())
    for (const Section& section : kSections) chosen.push_back(&section);
  for (const Section* section : chosen) {
    const double ms = milliseconds([&] { section->run(campaign); });
    campaign.record["sectionSeconds"][section->name] = ms / 1e3;
    campaign.save();
  }
  if (campaign.record.contains("failures"))
    throw std::runtime_error("some measurements failed; see the record");
}

}  // namespace
}  // namespace duokv::tools

int main(int argc, char** argv) {
  using namespace duokv::tools;
  const std::string help =
      "gpu_bench [options] [section ...]\n  sections: ceilings prefill decode request train "
      "linear attention rows; all where none is named\n" +
      usage(kOptions);
  try {
    const Arguments arguments(argc, argv, kOptions);
    if (arguments.has("help")) {
      std::printf("%s", help.c_str());
      return 0;
    }
    run(arguments);
  } catch (const std::invalid_argument& error) {
    std::fprintf(stderr, "gpu_bench: %s\n%s", error.what(), help.c_str());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gpu_bench: %s\n", error.what());
    return 1;
  }
}
