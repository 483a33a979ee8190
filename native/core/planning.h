// Programs are planned before they run. The same code runs first on the model's planning twin, where
// operations compute nothing and memory costs nothing, and what it takes there is known to fit before the
// program begins. So a plan cannot differ from its program, whatever the design, and predictions of memory
// (memory.h) are programs that only ran on such a device.
#pragma once

#include <string>

#include "core/model.h"
#include "core/workspace.h"

namespace duokv {

// Begins a program in `workspace`, with the memory that `program(Model&, Workspace&)` takes. Throws
// ERR_DEVICE_MEMORY naming `what`, before anything is allocated.
template <class Program>
void begin_planned(Model& model, Workspace& workspace, const std::string& what, Program&& program) {
  Model& twin = model.twin();
  Workspace dry(twin.device());
  program(twin, dry);
  model.require_memory(workspace.growth(dry.peak()), what);
  workspace.begin(dry.peak());
}

}  // namespace duokv
