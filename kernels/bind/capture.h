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
int run(int (*kernel)(const Args&), const Args& args) {
  if (recording) recording->calls.emplace_back([kernel, args] { return kernel(args); });
  return kernel(args);
}

// In this namespace the kernels' names mean their recorded calls, so that no binding can forget to record.
#define KDTREE_RECORDED(kernel, Args) \
  inline int kernel(const Args& args) { return run(kdtree::kernel, args); }
KDTREE_RECORDED(embed_cpu, EmbedArgs)
KDTREE_RECORDED(rms_norm_cpu, RmsNormArgs)
KDTREE_RECORDED(pack_linear_cpu, PackLinearArgs)
KDTREE_RECORDED(dequantize_int4_cpu, DequantizeInt4Args)
KDTREE_RECORDED(pack_int4_cpu, PackInt4Args)
KDTREE_RECORDED(linear_cpu, LinearArgs)
KDTREE_RECORDED(rope_cpu, RopeArgs)
KDTREE_RECORDED(swiglu_cpu, SwigluArgs)
KDTREE_RECORDED(residual_add_cpu, ResidualAddArgs)
KDTREE_RECORDED(add_partials_cpu, AddPartialsArgs)
KDTREE_RECORDED(argmax_cpu, ArgmaxArgs)
KDTREE_RECORDED(sample_cpu, SampleArgs)
KDTREE_RECORDED(sample_among_cpu, SampleAmongArgs)
KDTREE_RECORDED(moe_route_cpu, MoeRouteArgs)
KDTREE_RECORDED(moe_experts_cpu, MoeExpertsArgs)
KDTREE_RECORDED(cache_append_cpu, CacheAppendArgs)
KDTREE_RECORDED(cache_compact_cpu, CacheCompactArgs)
KDTREE_RECORDED(verify_attn_cpu, VerifyAttnArgs)
KDTREE_RECORDED(draft_topk_cpu, DraftTopkArgs)
KDTREE_RECORDED(draft_topk_merge_cpu, DraftTopkMergeArgs)
KDTREE_RECORDED(tree_rows_cpu, TreeRowsArgs)
KDTREE_RECORDED(tree_accept_cpu, TreeAcceptArgs)
KDTREE_RECORDED(step_commit_cpu, StepCommitArgs)
#undef KDTREE_RECORDED

}  // namespace kdtree::bind
