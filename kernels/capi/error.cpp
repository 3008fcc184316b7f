#include "error.h"

#include <cstdarg>
#include <cstdio>

namespace kdtree::capi {
namespace {

thread_local char message[2048] = "";

}  // namespace

kdtree_status fail(kdtree_status status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  return status;
}

const char* last_error() { return message; }

}  // namespace kdtree::capi
