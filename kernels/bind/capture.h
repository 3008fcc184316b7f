// Recording of kernel calls, to repeat them without Python and dispatcher: on a CPU what a CUDA graph is on a GPU. A step
// of a small model spends more time on the way to its 60 kernels than in them.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "../op_args.h"

namespace kdtree::bind {

// The calls in order, with their arguments by value, and every tensor that was allocated in between: pointers stay valid.
// What the caller passed in (weights, cache, inputs) the caller keeps alive.
struct Capture {
  std::vector<std::function<int()>> calls;
  std::vector<at::Tensor> tensors;
};

// The capture that calls of this thread are added to, or null.
inline thread_local Capture* recording = nullptr;

// Calls `kernel`, and adds the call to the capture in progress. Returns a Status.
template <class Args>
int run_recorded(int (*kernel)(const Args&), const Args& args) {
  if (recording) recording->calls.emplace_back([kernel, args] { return kernel(args); });
  return kernel(args);
}

}  // namespace kdtree::bind
