#include "addon/arguments.h"

#include <cmath>
#include <cstring>

#include "addon/cancellation.h"
#include "addon/environment.h"

namespace duokv::addon {
namespace {

[[noreturn]] void reject(const std::string& name, const std::string& expected) {
  throw Error("ERR_ARGUMENT", name + " must be " + expected);
}

template <class Array, class T>
std::vector<T> copy_array(Napi::Value value, const std::string& name, napi_typedarray_type type,
                          const char* expected) {
  if (!value.IsTypedArray() || value.As<Napi::TypedArray>().TypedArrayType() != type) reject(name, expected);
  const auto array = value.As<Array>();
  // Another thread could write to shared memory while it is being copied.
  if (!array.ArrayBuffer().IsArrayBuffer()) reject(name, std::string(expected) + " that is not shared");
  std::vector<T> copy(array.ElementLength());
  if (!copy.empty()) std::memcpy(copy.data(), array.Data(), copy.size() * sizeof(T));
  return copy;
}

template <class T>
std::vector<T> copy_list(Napi::Value value, const std::string& name, const char* expected,
                         T (*convert)(Napi::Value, const std::string&)) {
  if (!value.IsArray()) reject(name, expected);
  const auto array = value.As<Napi::Array>();
  std::vector<T> copy(array.Length());
  for (uint32_t i = 0; i < copy.size(); ++i)
    copy[i] = convert(array.Get(i), name + "[" + std::to_string(i) + "]");
  return copy;
}

constexpr double kLargestSafeInteger = 9007199254740991.0;

}  // namespace

int64_t to_integer(Napi::Value value, const std::string& name) {
  const double number = to_number(value, name);
  if (number != std::floor(number) || std::abs(number) > kLargestSafeInteger) reject(name, "an integer");
  return static_cast<int64_t>(number);
}

bool to_boolean(Napi::Value value, const std::string& name) {
  if (!value.IsBoolean()) reject(name, "true or false");
  return value.As<Napi::Boolean>().Value();
}

double to_number(Napi::Value value, const std::string& name) {
  if (!value.IsNumber()) reject(name, "a number");
  const double number = value.As<Napi::Number>().DoubleValue();
  if (!std::isfinite(number)) reject(name, "a finite number");
  return number;
}

std::string to_text(Napi::Value value, const std::string& name) {
  if (!value.IsString()) reject(name, "a string");
  return value.As<Napi::String>().Utf8Value();
}

Napi::Object to_object(Napi::Value value, const std::string& name) {
  if (!value.IsObject() || value.IsArray() || value.IsFunction()) reject(name, "an object");
  return value.As<Napi::Object>();
}

std::vector<int32_t> copy_int32(Napi::Value value, const std::string& name) {
  return copy_array<Napi::Int32Array, int32_t>(value, name, napi_int32_array, "an Int32Array");
}

std::vector<int64_t> copy_int64(Napi::Value value, const std::string& name) {
  return copy_array<Napi::BigInt64Array, int64_t>(value, name, napi_bigint64_array, "a BigInt64Array");
}

std::vector<int64_t> copy_integers(Napi::Value value, const std::string& name) {
  return copy_list<int64_t>(value, name, "an array of integers", to_integer);
}

std::vector<double> copy_numbers(Napi::Value value, const std::string& name) {
  return copy_list<double>(value, name, "an array of numbers", to_number);
}

FloatSpan borrow_floats(Napi::Value value, const std::string& name) {
  if (!value.IsTypedArray() || value.As<Napi::TypedArray>().TypedArrayType() != napi_float32_array)
    reject(name, "a Float32Array");
  auto array = value.As<Napi::Float32Array>();
  if (!array.ArrayBuffer().IsArrayBuffer()) reject(name, "a Float32Array that is not shared");
  return {array, array.Data(), static_cast<int64_t>(array.ElementLength())};
}

FloatSpan make_floats(Napi::Env env, int64_t length, const std::string& what) {
  try {
    const Napi::Object object =
        Environment::of(env).float32_array.New({Napi::Number::New(env, static_cast<double>(length))});
    return borrow_floats(object, what);
  } catch (const Napi::Error&) {
    throw Error("ERR_DEVICE_MEMORY", what + " needs a Float32Array of " + std::to_string(length) +
                                         " elements, which the host cannot hold");
  }
}

Napi::Value to_bigint64_array(Napi::Env env, const std::vector<int64_t>& values) {
  auto array = Environment::of(env)
                   .bigint64_array.New({Napi::Number::New(env, static_cast<double>(values.size()))})
                   .As<Napi::BigInt64Array>();
  if (!values.empty()) std::memcpy(array.Data(), values.data(), values.size() * sizeof(int64_t));
  return array;
}

std::shared_ptr<CancelFlag> to_flag(Napi::Value value) {
  if (is_absent(value)) return std::make_shared<CancelFlag>();
  return CancellationObject::flag_of(value);
}

HostBatch::HostBatch(Napi::Value value) {
  const Napi::Object batch = to_object(value, "batch");
  rows_ = to_integer(batch.Get("rows"), "batch.rows");
  tokens_ = copy_int32(batch.Get("tokens"), "batch.tokens");
  const int64_t positions = static_cast<int64_t>(tokens_.size());
  if (rows_ < 1 || positions == 0 || positions % rows_ != 0)
    throw Error("ERR_SHAPE", "batch.tokens has " + std::to_string(positions) +
                                 " elements, which do not make " + std::to_string(rows_) +
                                 " rows of equal, positive length");
  const auto check = [&](size_t length, const char* name) {
    if (length != tokens_.size())
      throw Error("ERR_SHAPE", std::string(name) + " has " + std::to_string(length) +
                                   " elements, batch.tokens has " + std::to_string(positions));
  };
  if (const Napi::Value ids = batch.Get("documentIds"); !is_absent(ids)) {
    document_ids_ = copy_int64(ids, "batch.documentIds");
    check(document_ids_.size(), "batch.documentIds");
  }
  if (const Napi::Value targets = batch.Get("targets"); !is_absent(targets)) {
    targets_ = copy_int32(targets, "batch.targets");
    check(targets_.size(), "batch.targets");
  }
  if (const Napi::Value ids = batch.Get("targetDocumentIds"); !is_absent(ids)) {
    target_document_ids_ = copy_int64(ids, "batch.targetDocumentIds");
    check(target_document_ids_.size(), "batch.targetDocumentIds");
  }
}

void HostBatch::require_targets() const {
  if (targets_.empty()) throw Error("ERR_SHAPE", "batch.targets is missing");
}

Batch HostBatch::view() const {
  const auto data = [](const auto& values) { return values.empty() ? nullptr : values.data(); };
  Batch batch;
  batch.rows = rows_;
  batch.length = static_cast<int64_t>(tokens_.size()) / rows_;
  batch.tokens = tokens_.data();
  batch.document_ids = data(document_ids_);
  batch.targets = data(targets_);
  batch.target_document_ids = data(target_document_ids_);
  return batch;
}

}  // namespace duokv::addon
