// C functions for `kdtree_nb.native.capture`: record the kernel calls of this thread, repeat them, forget them.
#include "capture.h"

#include "../op_args.h"

using kdtree::bind::Capture;
using kdtree::bind::recording;

extern "C" {

void* kdtree_capture_new() { return new Capture; }

// Starts to record this thread's calls. Returns 0, or 1 where it has a capture in progress.
int kdtree_capture_begin(void* capture) {
  if (recording) return 1;
  recording = static_cast<Capture*>(capture);
  return 0;
}

// Stops recording into `capture`, if that is what this thread does: a caller that was interrupted does not know.
void kdtree_capture_end(const void* capture) {
  if (recording == capture) recording = nullptr;
}

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
