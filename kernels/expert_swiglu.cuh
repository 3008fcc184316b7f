// swiglu of moe_experts: of the pairs and of the shared expert's rows in one launch.
#pragma once
#include "swiglu.cuh"

namespace kdtree {

constexpr int kExpertSwigluThreads = 128;

struct ExpertSwigluArgs {
  const void *gate_up, *shared_gate_up;  // Float [pairs, 2 width], [rows, 2 shared_width]
  void *hidden, *shared_hidden;          // Float [pairs, width], [rows, shared_width]
  const int32_t* num_rows_device;
  int64_t num_rows, row_begin, num_pairs, width, shared_width;
  int top_k;
};

// Blocks [0, num_pairs) have a pair each, those after them a row of the shared expert.
template <class Float>
__global__ void __launch_bounds__(kExpertSwigluThreads) expert_swiglu_kernel(ExpertSwigluArgs a) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const bool is_shared = blockIdx.x >= a.num_pairs;
  const int64_t row = is_shared ? blockIdx.x - a.num_pairs : blockIdx.x, dim = is_shared ? a.shared_width : a.width;
  const int64_t i = (int64_t(blockIdx.y) * kExpertSwigluThreads + threadIdx.x) * kChunk;
  const int64_t num_rows = rows_in_use(a.num_rows_device, a.num_rows, a.row_begin);
  if (row >= (is_shared ? num_rows : num_rows * a.top_k) || i >= dim) return;
  const Float* gate_up = static_cast<const Float*>(is_shared ? a.shared_gate_up : a.gate_up) + row * 2 * dim;
  swiglu_chunk(gate_up, static_cast<Float*>(is_shared ? a.shared_hidden : a.hidden) + row * dim, dim, i);
}

// has_routed, has_shared: which of the two there are.
template <class Float>
int expert_swiglu(ExpertSwigluArgs a, bool has_routed, bool has_shared, void* stream) {
  if (!has_routed) a.num_pairs = a.width = 0;
  if (!has_shared) a.shared_width = 0;
  const int64_t num_blocks = a.num_pairs + (has_shared ? a.num_rows : 0);
  const int64_t num_chunks = ceil_div(std::max(a.width, a.shared_width), kExpertSwigluThreads * kChunk);
  if (num_blocks == 0 || num_chunks == 0) return kOk;
  if (num_blocks > INT32_MAX || num_chunks > 65535) return kUnsupported;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(num_blocks), static_cast<unsigned>(num_chunks));
  shape.block = dim3(kExpertSwigluThreads), shape.start = Start::kEarly;
  return launch(expert_swiglu_kernel<Float>, shape, stream, a);
}

}  // namespace kdtree
