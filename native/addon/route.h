// A prefill schedule as it crosses the boundary: its name, and R where it is approximate.
#pragma once

#include "addon/arguments.h"
#include "core/plan.h"

namespace duokv::addon {

inline Route to_route(Napi::Value kind, Napi::Value suffix) {
  const std::string name = to_text(kind, "schedule");
  if (name == "exact") return {Route::Kind::Exact, 0};
  if (name == "full") return {Route::Kind::Full, 0};
  if (name == "uniform") return {Route::Kind::Uniform, 0};
  if (name == "approximate") return {Route::Kind::Approximate, to_integer(suffix, "schedule.approximate")};
  throw Error("ERR_CONFIG",
              "schedule is '" + name + "'; it must be one of exact, full, uniform, { approximate: R }");
}

}  // namespace duokv::addon
