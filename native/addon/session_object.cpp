#include "addon/session_object.h"

#include <algorithm>
#include <cstdint>

#include "addon/arguments.h"
#include "addon/environment.h"
#include "addon/route.h"
#include "addon/wrapping.h"

namespace duokv::addon {
namespace {

Napi::Object receiver(const Napi::CallbackInfo& info) { return info.This().As<Napi::Object>(); }

double number(int64_t value) { return static_cast<double>(value); }

// A cache tensor of one row or of all rows, [rows, entries, kv_heads, head_dim] or int64 ids.
struct CacheTensor {
  std::vector<float> values;
  std::vector<int64_t> ids;
  bool is_ids = false;
};

CacheTensor read_cache_tensor(const Session& session, const std::string& name, int64_t first, int64_t last) {
  const int64_t count = session.entries(name, first);
  for (int64_t row = first + 1; row < last; ++row)
    if (session.length(row) != session.length(first))
      throw Error("ERR_SHAPE", "rows 0 and " + std::to_string(row) + " hold " +
                                   std::to_string(session.length(first)) + " and " +
                                   std::to_string(session.length(row)) +
                                   " positions; name a row to read a cache of unequal lengths");
  CacheTensor tensor;
  tensor.is_ids = name == "documentIds";
  if (tensor.is_ids) {
    for (int64_t row = first; row < last; ++row) {
      const std::vector<int64_t> ids = session.document_ids(row);
      tensor.ids.insert(tensor.ids.end(), ids.begin(), ids.end());
    }
    return tensor;
  }
  const int64_t elements = count * session.model()->plan().config.kv_width();
  tensor.values.resize(static_cast<size_t>(elements * (last - first)));
  for (int64_t row = first; row < last && elements > 0; ++row)
    session.read(name, row, tensor.values.data() + (row - first) * elements);
  return tensor;
}

void require_length(const char* name, size_t length, size_t expected) {
  if (length != expected)
    throw Error("ERR_SHAPE", std::string(name) + " has " + std::to_string(length) + " elements, expected " +
                                 std::to_string(expected));
}

// The rows of a call that appends tokens, copied.
struct Prompts {
  std::vector<int64_t> rows, counts, ids;  // no ids: the rows' documents go on
  std::vector<int32_t> tokens;

  std::vector<PrefillRow> view() const {
    std::vector<PrefillRow> prompts;
    int64_t offset = 0;
    for (size_t i = 0; i < rows.size(); ++i) {
      prompts.push_back(
          {rows[i], tokens.data() + offset, ids.empty() ? nullptr : ids.data() + offset, counts[i]});
      offset += counts[i];
    }
    return prompts;
  }
};

Prompts to_prompts(Napi::Value rows, Napi::Value counts, Napi::Value tokens, Napi::Value ids) {
  Prompts prompts{
      copy_integers(rows, "rows"), copy_integers(counts, "counts"), {}, copy_int32(tokens, "tokens")};
  if (!is_absent(ids)) prompts.ids = copy_int64(ids, "documentIds");
  require_length("counts", prompts.counts.size(), prompts.rows.size());
  size_t total = 0;
  for (const int64_t count : prompts.counts) {
    if (count < 1 || count > static_cast<int64_t>(prompts.tokens.size()))
      throw Error("ERR_SHAPE", "a row's count is " + std::to_string(count) + "; it must be between 1 and " +
                                   std::to_string(prompts.tokens.size()));
    total += static_cast<size_t>(count);
  }
  require_length("tokens", prompts.tokens.size(), total);
  if (!prompts.ids.empty()) require_length("documentIds", prompts.ids.size(), total);
  return prompts;
}

// temperature, top k, top p, draw of each row.
std::vector<ops::SampleRow> to_settings(Napi::Value value, size_t rows) {
  constexpr size_t kFields = 4;
  const std::vector<double> numbers = copy_numbers(value, "settings");
  require_length("settings", numbers.size(), kFields * rows);
  std::vector<ops::SampleRow> settings;
  for (size_t i = 0; i < numbers.size(); i += kFields) {
    const double temperature = numbers[i], top_k = numbers[i + 1], top_p = numbers[i + 2],
                 draw = numbers[i + 3];
    if (!(temperature >= 0 && top_k >= 1 && top_k <= INT32_MAX && top_p > 0 && top_p <= 1 && draw >= 0 &&
          draw < 1))
      throw Error("ERR_ARGUMENT", "settings: a value is out of range");
    settings.push_back({static_cast<float>(temperature), static_cast<int32_t>(top_k), top_p, draw});
  }
  return settings;
}

}  // namespace

void SessionSlot::refresh() {
  SessionSnapshot snapshot{session->bytes(), {}, {}, session->graphs()};
  for (int64_t row = 0; row < session->options().batch; ++row) {
    snapshot.lengths.push_back(session->length(row));
    snapshot.exact.push_back(session->exact(row));
  }
  std::lock_guard lock(mutex_);
  snapshot_ = std::move(snapshot);
}

void SessionObject::define(Napi::Env env) {
  Environment::of(env).session = Napi::Persistent(DefineClass(
      env, "NativeSession",
      {InstanceMethod<&SessionObject::prefill>("prefill"), InstanceMethod<&SessionObject::decode>("decode"),
       InstanceMethod<&SessionObject::draw>("draw"), InstanceMethod<&SessionObject::reset>("reset"),
       InstanceMethod<&SessionObject::read_cache>("readCache"),
       InstanceMethod<&SessionObject::state>("state"), InstanceMethod<&SessionObject::dispose>("dispose"),
       InstanceAccessor<&SessionObject::is_disposed>("disposed")}));
}

Napi::Value SessionObject::create(const Napi::CallbackInfo& info,
                                  const std::shared_ptr<ModelResource>& model) {
  const Napi::Env env = info.Env();
  model->require_live();
  const SessionOptions options{to_integer(info[0], "batch"), to_integer(info[1], "capacity"),
                               parse_precision(to_text(info[2], "precision")), to_boolean(info[3], "graphs")};
  auto resource = std::make_shared<SessionResource>(env, model, options.batch);
  model->adopt(resource);
  const Napi::Object session = wrap(env, Environment::of(env).session, resource);
  Napi::Object result = Napi::Object::New(env);
  result.Set("session", session);
  result.Set("ready", resource->call(
                          env, session, std::make_shared<CancelFlag>(),
                          [slot = resource->slot, model_slot = model->slot, options](Cancel) {
                            try {
                              slot->session = std::make_unique<Session>(model_slot->model, options);
                            } catch (...) {
                              slot->failure = current_failure();
                              throw;
                            }
                            slot->refresh();
                            return Done{};
                          },
                          Undefined()));
  return result;
}

SessionObject::SessionObject(const Napi::CallbackInfo& info)
    : ObjectWrap(info), resource_(unwrap<SessionResource>(info, "model.session")) {}

// Resolves to { logits, exact, positions: [row][kvInput, queryOutput] }.
Napi::Value SessionObject::prefill(const Napi::CallbackInfo& info) {
  return guarded(info.Env(), [&]() -> Napi::Value {
    resource_->require_live();
    const Napi::Env env = info.Env();
    Prompts prompts = to_prompts(info[0], info[1], info[2], info[3]);
    const Route route = to_route(info[4], info[5]);
    const FloatSpan out = make_floats(
        env, static_cast<int64_t>(prompts.rows.size()) * resource_->model->plan.config.vocab, "logits");
    return resource_->call(
        env, receiver(info), to_flag(info[6]),
        [slot = resource_->slot, model = resource_->model->slot, prompts = std::move(prompts), route,
         data = out.data](Cancel cancel) {
          PrefillResult result = slot->get().prefill(prompts.view(), route, {data}, cancel);
          slot->refresh();
          model->refresh();
          return result;
        },
        [logits = Napi::Persistent(out.object)](Napi::Env e, const PrefillResult& prefill) {
          Napi::Array positions = Napi::Array::New(e, prefill.positions.size());
          for (uint32_t i = 0; i < prefill.positions.size(); ++i) {
            Napi::Object row = Napi::Object::New(e);
            row.Set("kvInput", number(prefill.positions[i].kv_input));
            row.Set("queryOutput", number(prefill.positions[i].query_output));
            positions.Set(i, row);
          }
          Napi::Object result = Napi::Object::New(e);
          result.Set("logits", logits.Value());
          result.Set("exact", prefill.exact);
          result.Set("positions", positions);
          return result;
        });
  });
}

// Resolves to the logits, [rows.length, vocab].
Napi::Value SessionObject::decode(const Napi::CallbackInfo& info) {
  return guarded(info.Env(), [&]() -> Napi::Value {
    resource_->require_live();
    const std::vector<int64_t> rows = copy_integers(info[0], "rows");
    const std::vector<int32_t> tokens = copy_int32(info[1], "tokens");
    const bool has_ids = !is_absent(info[2]);
    const std::vector<int64_t> ids = has_ids ? copy_int64(info[2], "documentIds") : std::vector<int64_t>();
    require_length("tokens", tokens.size(), rows.size());
    if (has_ids) require_length("documentIds", ids.size(), rows.size());
    std::vector<DecodeRow> step;
    for (size_t i = 0; i < rows.size(); ++i)
      step.push_back({rows[i], tokens[i], has_ids, has_ids ? ids[i] : 0});
    const FloatSpan out = make_floats(
        info.Env(), static_cast<int64_t>(rows.size()) * resource_->model->plan.config.vocab, "logits");
    return resource_->call(
        info.Env(), receiver(info), to_flag(info[3]),
        [slot = resource_->slot, model = resource_->model->slot, step = std::move(step),
         data = out.data](Cancel cancel) {
          slot->get().decode(step, {data}, cancel);
          slot->refresh();
          model->refresh();
          return Done{};
        },
        FilledArray(out));
  });
}

// draw(rows, counts, tokens, settings, schedule, suffix, cancellation): appends tokens and draws one after
// each row. Resolves to { tokens, logprobs }, arrays of numbers.
Napi::Value SessionObject::draw(const Napi::CallbackInfo& info) {
  return guarded(info.Env(), [&]() -> Napi::Value {
    resource_->require_live();
    const Napi::Env env = info.Env();
    Prompts prompts = to_prompts(info[0], info[1], info[2], env.Undefined());
    std::vector<ops::SampleRow> settings = to_settings(info[3], prompts.rows.size());
    const Route route = to_route(info[4], info[5]);
    return resource_->call(
        env, receiver(info), to_flag(info[6]),
        [slot = resource_->slot, model = resource_->model->slot, prompts = std::move(prompts),
         settings = std::move(settings), route](Cancel cancel) {
          std::vector<Sampled> sampled(prompts.rows.size());
          slot->get().prefill(prompts.view(), route, {nullptr, settings.data(), sampled.data()}, cancel);
          slot->refresh();
          model->refresh();
          return sampled;
        },
        [](Napi::Env e, const std::vector<Sampled>& sampled) {
          Napi::Array tokens = Napi::Array::New(e, sampled.size());
          Napi::Array logprobs = Napi::Array::New(e, sampled.size());
          for (uint32_t i = 0; i < sampled.size(); ++i) {
            tokens.Set(i, Napi::Number::New(e, sampled[i].token));
            logprobs.Set(i, Napi::Number::New(e, static_cast<double>(sampled[i].logprob)));
          }
          Napi::Object result = Napi::Object::New(e);
          result.Set("tokens", tokens);
          result.Set("logprobs", logprobs);
          return result;
        });
  });
}

Napi::Value SessionObject::reset(const Napi::CallbackInfo& info) {
  return guarded(info.Env(), [&]() -> Napi::Value {
    resource_->require_live();
    return resource_->call(
        info.Env(), receiver(info), std::make_shared<CancelFlag>(),
        [slot = resource_->slot, rows = copy_integers(info[0], "rows")](Cancel) {
          slot->get().reset(rows);
          slot->refresh();
          return Done{};
        },
        Undefined());
  });
}

// readCache(name, row): row < 0 reads all rows. Resolves to a Float32Array, or a BigInt64Array for document
// ids.
Napi::Value SessionObject::read_cache(const Napi::CallbackInfo& info) {
  return guarded(info.Env(), [&]() -> Napi::Value {
    resource_->require_live();
    const std::string name = to_text(info[0], "name");
    const int64_t row = to_integer(info[1], "row");
    if (row >= resource_->batch)
      throw Error("ERR_SHAPE",
                  "row " + std::to_string(row) + " is outside [0, " + std::to_string(resource_->batch) + ")");
    const int64_t first = std::max<int64_t>(row, 0);
    const int64_t last = row < 0 ? resource_->batch : row + 1;
    return resource_->call(
        info.Env(), receiver(info), std::make_shared<CancelFlag>(),
        [slot = resource_->slot, name, first, last](Cancel) {
          return read_cache_tensor(slot->get(), name, first, last);
        },
        [name](Napi::Env e, const CacheTensor& tensor) -> Napi::Value {
          if (tensor.is_ids) return to_bigint64_array(e, tensor.ids);
          const FloatSpan out = make_floats(e, static_cast<int64_t>(tensor.values.size()), name);
          std::copy(tensor.values.begin(), tensor.values.end(), out.data);
          return out.object;
        });
  });
}

Napi::Value SessionObject::state(const Napi::CallbackInfo& info) {
  const Napi::Env env = info.Env();
  const SessionSnapshot snapshot = resource_->slot->snapshot();
  Napi::Array lengths = Napi::Array::New(env, snapshot.lengths.size());
  Napi::Array exact = Napi::Array::New(env, snapshot.lengths.size());
  for (uint32_t row = 0; row < snapshot.lengths.size(); ++row) {
    lengths.Set(row, number(snapshot.lengths[row]));
    exact.Set(row, Napi::Boolean::New(env, snapshot.exact[row]));
  }
  Napi::Object result = Napi::Object::New(env);
  result.Set("lower", number(snapshot.bytes.lower));
  result.Set("global", number(snapshot.bytes.global));
  result.Set("local", number(snapshot.bytes.local));
  result.Set("documentIds", number(snapshot.bytes.document_ids));
  result.Set("total", number(snapshot.bytes.total()));
  result.Set("reserved", number(snapshot.bytes.reserved));
  result.Set("device", number(snapshot.bytes.device));
  result.Set("host", number(snapshot.bytes.host));
  Napi::Object graphs = Napi::Object::New(env);
  graphs.Set("held", number(snapshot.graphs.held));
  graphs.Set("recorded", number(snapshot.graphs.recorded));
  graphs.Set("replayed", number(snapshot.graphs.replayed));
  graphs.Set("dropped", number(snapshot.graphs.dropped));
  graphs.Set("bytes", number(snapshot.graphs.bytes));
  graphs.Set("driverBytes", number(snapshot.graphs.driver_bytes));
  graphs.Set("seconds", snapshot.graphs.seconds);
  result.Set("graphs", graphs);
  result.Set("lengths", lengths);
  result.Set("exact", exact);
  return result;
}

void SessionObject::dispose(const Napi::CallbackInfo&) { resource_->dispose("it"); }

Napi::Value SessionObject::is_disposed(const Napi::CallbackInfo& info) {
  return Napi::Boolean::New(info.Env(), resource_->disposed());
}

}  // namespace duokv::addon
