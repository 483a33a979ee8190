// Reading JavaScript arguments into plain C++ values, and making arrays to hand back. The TypeScript layer
// gives the messages that users see; these checks are what memory safety rests on. They throw
// Error{ERR_ARGUMENT}.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "addon/engine.h"
#include "core/model.h"

namespace duokv::addon {

int64_t to_integer(Napi::Value value, const std::string& name);
bool to_boolean(Napi::Value value, const std::string& name);
double to_number(Napi::Value value, const std::string& name);
std::string to_text(Napi::Value value, const std::string& name);
Napi::Object to_object(Napi::Value value, const std::string& name);

inline bool is_absent(Napi::Value value) { return value.IsUndefined() || value.IsNull(); }

// Copies, so that the caller may reuse, transfer or resize its array at once. Shared memory is refused.
std::vector<int32_t> copy_int32(Napi::Value value, const std::string& name);
std::vector<int64_t> copy_int64(Napi::Value value, const std::string& name);     // BigInt64Array
std::vector<int64_t> copy_integers(Napi::Value value, const std::string& name);  // array of numbers
std::vector<double> copy_numbers(Napi::Value value, const std::string& name);    // likewise, finite

// A Float32Array used in place by a queued call. The caller must keep it alive and must not detach it
// meanwhile: lib/ only passes arrays that nobody else has seen.
struct FloatSpan {
  Napi::Object object;
  float* data;
  int64_t length;
};
FloatSpan borrow_floats(Napi::Value value, const std::string& name);

// A new array, zeroed. Made through its JavaScript constructor, which throws where Node-API would end the
// process.
FloatSpan make_floats(Napi::Env env, int64_t length, const std::string& what);

// The two ends of a call whose work leaves no value behind on the engine thread: it fills an array, or
// changes state.
struct Done {};
struct Undefined {
  Napi::Value operator()(Napi::Env env, Done&) const { return env.Undefined(); }
};
class FilledArray {
 public:
  explicit FilledArray(const FloatSpan& span) : array_(Napi::Persistent(span.object)) {}
  Napi::Value operator()(Napi::Env, Done&) const { return array_.Value(); }

 private:
  Napi::ObjectReference array_;
};

Napi::Value to_bigint64_array(Napi::Env env, const std::vector<int64_t>& values);

// The flag of a Cancellation object, or a new one where the argument is absent.
std::shared_ptr<CancelFlag> to_flag(Napi::Value value);

// A batch's arrays, copied: { rows, tokens, documentIds?, targets?, targetDocumentIds? }.
class HostBatch {
 public:
  explicit HostBatch(Napi::Value value);
  void require_targets() const;  // ERR_SHAPE
  Batch view() const;

 private:
  int64_t rows_;
  std::vector<int32_t> tokens_, targets_;
  std::vector<int64_t> document_ids_, target_document_ids_;
};

}  // namespace duokv::addon
