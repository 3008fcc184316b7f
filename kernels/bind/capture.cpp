// C functions for `kdtree_nb.native.capture`: record the kernel calls of this thread, repeat them, forget them.
#include "capture.h"

#include "../op_args.h"

using kdtree::bind::Capture;
using kdtree::bind::recording;

extern "C" {

// Starts a capture; null where this thread has one in progress.
void* kdtree_capture_begin() { return recording ? nullptr : recording = new Capture; }

void kdtree_capture_end() { recording = nullptr; }

// Repeats the calls in order up to the first that fails, whose Status it returns.
int kdtree_capture_replay(const void* capture) {
  for (const auto& call : static_cast<const Capture*>(capture)->calls)
    if (const int status = call()) return status;
  return kdtree::kOk;
}

int64_t kdtree_capture_num_calls(const void* capture) {
  return int64_t(static_cast<const Capture*>(capture)->calls.size());
}

void kdtree_capture_free(void* capture) { delete static_cast<Capture*>(capture); }

}  // extern "C"
