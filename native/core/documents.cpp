#include "core/documents.h"

#include "core/error.h"

namespace duokv {

DocumentUpdate append_documents(const RowDocuments& row, const int64_t* ids, int64_t count, int64_t first,
                                const std::string& argument, int64_t row_index, int32_t* start,
                                int32_t* position) {
  DocumentUpdate update{row.last_id, row.last_start, {}};
  std::unordered_set<int64_t> opened;
  bool any = row.any;
  for (int64_t t = 0; t < count; ++t) {
    const int64_t id = ids != nullptr ? ids[t] : (any ? update.last_id : 0);
    if (!any || id != update.last_id) {
      if (row.ids.count(id) != 0 || !opened.insert(id).second)
        throw Error("ERR_DOCUMENT_IDS",
                    argument + ": id " + std::to_string(id) + " recurs in row " + std::to_string(row_index) +
                        " at position " + std::to_string(first + t) + "; a document is one run of equal ids");
      update.opened.push_back(id);
      update.last_id = id;
      update.last_start = static_cast<int32_t>(first + t);
      any = true;
    }
    start[t] = update.last_start;
    position[t] = static_cast<int32_t>(first + t) - update.last_start;
  }
  return update;
}

void apply(const DocumentUpdate& update, RowDocuments& row) {
  row.any = true;
  row.last_id = update.last_id;
  row.last_start = update.last_start;
  row.ids.insert(update.opened.begin(), update.opened.end());
}

}  // namespace duokv
