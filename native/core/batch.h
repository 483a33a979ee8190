// A batch on its way to the device: validated host arrays, laid out in documents.
#pragma once

#include <cstdint>
#include <vector>

#include "core/model.h"

namespace duokv {

// Documents of rows begin … begin+rows-1 of a batch, every row starting empty: [rows, length].
struct DocumentLayout {
  std::vector<int32_t> start, position;
};
DocumentLayout lay_out_documents(const Batch& batch, int64_t begin, int64_t rows);

// A target counts when its document id is its input's (spec/architecture.md section 2).
inline bool is_valid_target(const Batch& batch, int64_t index) {
  if (batch.target_document_ids == nullptr) return true;
  return batch.document_ids != nullptr ? batch.target_document_ids[index] == batch.document_ids[index]
                                       : batch.target_document_ids[index] == 0;
}

// Throws ERR_TOKEN_RANGE naming argument, row, position, limit and value.
void check_tokens(const int32_t* tokens, int64_t count, int64_t vocab, const char* argument, int64_t row);

}  // namespace duokv
