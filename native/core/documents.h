// Documents: runs of equal int64 ids inside one row. Ids are any int64 in any order; one that recurs in its
// row after another document is an error.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_set>
#include <vector>

namespace duokv {

// A row's documents so far.
struct RowDocuments {
  bool any = false;                 // the row holds at least one token
  int64_t last_id = 0;              // of the document that goes on
  int32_t last_start = 0;           // absolute position of its first token
  std::unordered_set<int64_t> ids;  // all of the row's ids
};

// What a call adds to a row's documents, to be applied when the call commits.
struct DocumentUpdate {
  int64_t last_id = 0;
  int32_t last_start = 0;
  std::vector<int64_t> opened;
};

// Lays out `count` tokens appended at absolute position `first`: for each token the absolute position at
// which its document starts and its position within it. Null `ids`: the row's last document goes on, or one
// document of id 0 starts. Throws ERR_DOCUMENT_IDS naming `argument`, the row and the position of an id that
// recurs.
DocumentUpdate append_documents(const RowDocuments& row, const int64_t* ids, int64_t count, int64_t first,
                                const std::string& argument, int64_t row_index, int32_t* start,
                                int32_t* position);

void apply(const DocumentUpdate& update, RowDocuments& row);

}  // namespace duokv
