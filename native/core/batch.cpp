#include "core/batch.h"

#include <limits>

#include "core/documents.h"
#include "core/error.h"

namespace duokv {

DocumentLayout lay_out_documents(const Batch& batch, int64_t begin, int64_t rows) {
  const size_t size = static_cast<size_t>(rows * batch.length);
  DocumentLayout layout{std::vector<int32_t>(size), std::vector<int32_t>(size)};
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t* ids =
        batch.document_ids == nullptr ? nullptr : batch.document_ids + (begin + r) * batch.length;
    append_documents(RowDocuments{}, ids, batch.length, 0, "documentIds", begin + r,
                     layout.start.data() + r * batch.length, layout.position.data() + r * batch.length);
  }
  return layout;
}

void check_tokens(const int32_t* tokens, int64_t count, int64_t vocab, const char* argument, int64_t row) {
  for (int64_t t = 0; t < count; ++t)
    if (tokens[t] < 0 || tokens[t] >= vocab)
      throw Error("ERR_TOKEN_RANGE", std::string(argument) + ": token " + std::to_string(tokens[t]) +
                                         " of row " + std::to_string(row) + " at index " + std::to_string(t) +
                                         " is outside [0, " + std::to_string(vocab) + ")");
}

void validate_batch(const Plan& plan, const Batch& batch, bool needs_targets) {
  if (batch.rows < 1)
    throw Error("ERR_SHAPE", "rows is " + std::to_string(batch.rows) + "; a batch needs at least 1");
  if (batch.length < 1) throw Error("ERR_SHAPE", "tokens is empty; a row needs at least 1 position");
  if (batch.length >= std::numeric_limits<int32_t>::max())
    throw Error("ERR_SHAPE",
                "a row has " + std::to_string(batch.length) + " positions; the limit is 2^31 - 2");
  for (int64_t r = 0; r < batch.rows; ++r) {
    check_tokens(batch.tokens + r * batch.length, batch.length, plan.config.vocab, "tokens", r);
    if (needs_targets)
      check_tokens(batch.targets + r * batch.length, batch.length, plan.config.vocab, "targets", r);
  }
  lay_out_documents(batch, 0, batch.rows);
}

}  // namespace duokv
