// The only includer of napi.h. The build sets the rules under which it is read (CMakeLists.txt); every source
// must see the same ones.
#pragma once

#if !defined(NODE_ADDON_API_CPP_EXCEPTIONS_ALL) || !defined(NODE_ADDON_API_DISABLE_DEPRECATED) || \
    !defined(NODE_ADDON_API_REQUIRE_BASIC_FINALIZERS) || !defined(NODE_API_NO_EXTERNAL_BUFFERS_ALLOWED)
#error "the addon is built through CMakeLists.txt, which sets the rules for napi.h"
#endif

// In a worker that is being terminated no exception can be thrown into JavaScript: not a reason to end the
// process.
#define NODE_API_SWALLOW_UNTHROWABLE_EXCEPTIONS

#include <napi.h>
