#include "core/programs.h"

#include <algorithm>

namespace duokv {

Program& Programs::find(const ProgramKey& key) {
  const auto found = std::find_if(programs_.begin(), programs_.end(),
                                  [&](const Program& program) { return program.key == key; });
  if (found != programs_.end()) {
    programs_.splice(programs_.begin(), programs_, found);
    return programs_.front();
  }
  while (static_cast<int64_t>(programs_.size()) >= limit_) {
    programs_.pop_back();
    ++stats_.dropped;
  }
  return programs_.emplace_front(key, device_);
}

GraphStats Programs::stats() const {
  GraphStats stats = stats_;
  for (const Program& program : programs_) {
    stats.held += program.graph ? 1 : 0;
    stats.bytes += program.workspace.bytes();
    stats.driver_bytes += program.graph.bytes();
  }
  return stats;
}

}  // namespace duokv
