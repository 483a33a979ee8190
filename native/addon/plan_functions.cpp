#include "addon/plan_functions.h"

#include <string>

#include "addon/arguments.h"
#include "addon/config_object.h"
#include "addon/errors.h"
#include "addon/route.h"
#include "core/plan.h"

namespace duokv::addon {
namespace {

double number(int64_t value) { return static_cast<double>(value); }

template <class T>
Napi::Array to_array(Napi::Env env, const std::vector<T>& values, auto&& convert) {
  Napi::Array array = Napi::Array::New(env, values.size());
  for (size_t i = 0; i < values.size(); ++i) array.Set(static_cast<uint32_t>(i), convert(values[i], i));
  return array;
}

Napi::Array to_numbers(Napi::Env env, const std::vector<int64_t>& values) {
  return to_array(env, values, [&](int64_t v, size_t) { return Napi::Number::New(env, number(v)); });
}

const char* part_name(BankPlan::Part part) {
  switch (part) {
    case BankPlan::Part::Lower:
      return "lower";
    case BankPlan::Part::Global:
      return "global";
    case BankPlan::Part::Local:
      return "local";
  }
  return "";
}

Napi::Object read_row(Napi::Env env, const Plan& plan, const Read& read) {
  Napi::Object row = Napi::Object::New(env);
  row.Set("kBank", plan.banks[static_cast<size_t>(read.k_bank)].name);
  row.Set("vBank", plan.banks[static_cast<size_t>(read.v_bank)].name);
  row.Set("window", number(read.window));
  row.Set("multiplicityBias", read.multiplicity_bias);
  return row;
}

Napi::Object projection_row(Napi::Env env, const Plan& plan, size_t index) {
  const Projection& projection = plan.projections[index];
  Napi::Object row = Napi::Object::New(env);
  row.Set("bank", plan.banks[index].name);
  row.Set("representation", number(projection.representation));
  row.Set("norm", plan.parameter(projection.norm).name);
  row.Set("kProj", plan.parameter(projection.k_proj).name);
  row.Set("vProj", plan.parameter(projection.v_proj).name);
  return row;
}

Napi::Object layer_row(Napi::Env env, const Plan& plan, const LayerPlan& layer, size_t index) {
  Napi::Object row = Napi::Object::New(env);
  row.Set("layer", number(static_cast<int64_t>(index)));
  row.Set("upper", layer.upper);
  // A layer's own projections are those under its own norm, wherever their input comes from.
  Napi::Array projects = Napi::Array::New(env);
  for (size_t p = 0; p < plan.projections.size(); ++p)
    if (plan.projections[p].norm == layer.attention_norm)
      projects.Set(projects.Length(), projection_row(env, plan, p));
  row.Set("projects", projects);
  row.Set("reads",
          to_array(env, layer.reads, [&](const Read& read, size_t) { return read_row(env, plan, read); }));
  row.Set("separateFusion", layer.fusion_logit != kNone);
  row.Set("adapter", layer.adapter_up != kNone);
  return row;
}

Napi::Value design_plan(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  return guarded(env, [&]() -> Napi::Value {
    const Plan plan = make_plan(to_config(info[0]));
    Napi::Object result = Napi::Object::New(env);
    result.Set("config", from_config(env, plan.config));
    result.Set("layers", to_array(env, plan.layers, [&](const LayerPlan& layer, size_t i) {
                 return layer_row(env, plan, layer, i);
               }));
    std::vector<int64_t> all(plan.projections.size());
    result.Set("projections",
               to_array(env, all, [&](int64_t, size_t p) { return projection_row(env, plan, p); }));
    result.Set("banks", to_array(env, plan.banks, [&](const BankPlan& bank, size_t) {
                 Napi::Object row = Napi::Object::New(env);
                 row.Set("name", bank.name);
                 row.Set("part", part_name(bank.part));
                 row.Set("window", number(bank.window));
                 return row;
               }));
    result.Set("parameters", to_array(env, plan.parameters, [&](const Parameter& parameter, size_t) {
                 Napi::Object row = Napi::Object::New(env);
                 row.Set("name", parameter.name);
                 row.Set("shape", to_numbers(env, parameter.shape));
                 row.Set("elements", number(parameter.elements));
                 return row;
               }));
    result.Set("parameterCount", number(plan.parameter_count));
    result.Set("hasGlobalBank", plan.has_global_bank);
    // Without a global bank the route that the number belongs to does not exist.
    result.Set("uniformSuffix", plan.has_global_bank
                                    ? Napi::Value(Napi::Number::New(env, number(uniform_suffix(plan))))
                                    : env.Null());
    return result;
  });
}

Napi::Value suffixes(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  return guarded(env, [&]() -> Napi::Value {
    const Plan plan = make_plan(to_config(info[0]));
    const Suffixes suffixes =
        suffix_lengths(plan, to_integer(info[1], "positions"), to_route(info[2], info[3]));
    const PositionCounts counts = position_counts(plan, suffixes);
    Napi::Object result = Napi::Object::New(env);
    result.Set("kvInput", number(counts.kv_input));
    result.Set("queryOutput", number(counts.query_output));
    result.Set("exact", suffixes.exact);
    result.Set("layers", to_numbers(env, suffixes.query));
    result.Set("projections", to_numbers(env, suffixes.projection));
    return result;
  });
}

Napi::Value cache_bytes(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  return guarded(env, [&]() -> Napi::Value {
    const Plan plan = make_plan(to_config(info[0]));
    const CacheBytes bytes =
        planned_cache_bytes(plan, to_integer(info[1], "batch"), to_integer(info[2], "positions"),
                            parse_precision(to_text(info[3], "precision")).cache_element());
    Napi::Object result = Napi::Object::New(env);
    result.Set("lower", number(bytes.lower));
    result.Set("global", number(bytes.global));
    result.Set("local", number(bytes.local));
    result.Set("documentIds", number(bytes.document_ids));
    result.Set("total", number(bytes.total()));
    return result;
  });
}

Napi::Object flop_row(Napi::Env env, const FlopCount& flops) {
  Napi::Object result = Napi::Object::New(env);
  result.Set("projections", flops.projections);
  result.Set("ffn", flops.ffn);
  result.Set("head", flops.head);
  result.Set("attention", flops.attention);
  result.Set("forward", flops.forward());
  result.Set("training", flops.training());
  return result;
}

Napi::Value flops_of_documents(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  return guarded(env, [&]() -> Napi::Value {
    const Plan plan = make_plan(to_config(info[0]));
    return flop_row(env, count_flops(plan, copy_integers(info[1], "documentLengths")));
  });
}

Napi::Value flops_of_pairs(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  return guarded(env, [&]() -> Napi::Value {
    const Plan plan = make_plan(to_config(info[0]));
    return flop_row(env, count_flops(plan, to_number(info[1], "tokens"), to_number(info[2], "causalPairs"),
                                     to_number(info[3], "windowPairs")));
  });
}

}  // namespace

void define_plan_functions(Napi::Env env, Napi::Object exports) {
  exports.Set("designPlan", Napi::Function::New<design_plan>(env, "designPlan"));
  exports.Set("suffixes", Napi::Function::New<suffixes>(env, "suffixes"));
  exports.Set("cacheBytes", Napi::Function::New<cache_bytes>(env, "cacheBytes"));
  exports.Set("flopsOfDocuments", Napi::Function::New<flops_of_documents>(env, "flopsOfDocuments"));
  exports.Set("flopsOfPairs", Napi::Function::New<flops_of_pairs>(env, "flopsOfPairs"));
}

}  // namespace duokv::addon
