// The message of the last failed call of a thread. Made by snprintf: see bind/checks.h for what is wrong with streams.
#pragma once
#include "kdtree.h"

namespace kdtree::capi {

// Remembers the message and returns the status.
__attribute__((format(printf, 2, 3))) kdtree_status fail(kdtree_status status, const char* format, ...);

const char* last_error();

}  // namespace kdtree::capi
