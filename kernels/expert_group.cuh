// Groups the pairs (row, k) of moe_experts on the device, where there are many: sorted by expert, then by pair; items of at most
// rows_per_item pairs. Only integers are counted with atomics.
#pragma once
#include "cuda_common.cuh"

namespace kdtree {

constexpr int kGroupThreads = 1024;

struct GroupArgs {
  const int32_t* expert_id;  // [num_rows, top_k]
  const int32_t* num_rows_device;
  int64_t num_rows, row_begin;
  int num_experts, top_k, rows_per_item;
  int32_t* num_items;
  int4* items;
  int32_t* pairs;
};

// Turns counts of pairs into the first pair of each expert; `first_item` likewise. One warp.
__device__ inline void scan_experts(const GroupArgs& a, int32_t* count, int32_t* first, int32_t* first_item) {
  const int lane = threadIdx.x;
  int pairs = 0, items = 0;
  for (int begin = 0; begin < a.num_experts; begin += kWarp) {
    const int e = begin + lane;
    const int num_pairs = e < a.num_experts ? count[e] : 0, num_items = (num_pairs + a.rows_per_item - 1) / a.rows_per_item;
    int pairs_before = num_pairs, items_before = num_items;
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const int p = __shfl_up_sync(0xffffffffu, pairs_before, offset), i = __shfl_up_sync(0xffffffffu, items_before, offset);
      if (lane >= offset) pairs_before += p, items_before += i;
    }
    if (e < a.num_experts) first[e] = pairs + pairs_before - num_pairs, first_item[e] = items + items_before - num_items;
    pairs += __shfl_sync(0xffffffffu, pairs_before, kWarp - 1);
    items += __shfl_sync(0xffffffffu, items_before, kWarp - 1);
  }
  if (lane == 0) *a.num_items = items;
}

// Writes the pairs of every expert in ascending order, 32 pairs at a time. One warp; `next` is consumed.
__device__ inline void scatter_pairs(const GroupArgs& a, int num_pairs, int32_t* next) {
  const int lane = threadIdx.x;
  for (int begin = 0; begin < num_pairs; begin += kWarp) {
    const int pair = begin + lane, id = pair < num_pairs ? a.expert_id[pair] : -1;
    const unsigned same = __match_any_sync(0xffffffffu, id);
    const bool valid = id >= 0 && id < a.num_experts;
    if (valid) a.pairs[next[id] + __popc(same & ((1u << lane) - 1))] = pair;
    __syncwarp();
    if (valid && __ffs(same) - 1 == lane) next[id] += __popc(same);
    __syncwarp();
  }
}

static __global__ void __launch_bounds__(kGroupThreads) group_kernel(GroupArgs a) {
  extern __shared__ int32_t counters[];
  int32_t *count = counters, *first = count + a.num_experts, *first_item = first + a.num_experts;
  wait_for_previous_kernel();
  allow_next_kernel();
  const int num_pairs = rows_in_use(a.num_rows_device, a.num_rows, a.row_begin) * a.top_k;
  for (int e = threadIdx.x; e < a.num_experts; e += kGroupThreads) count[e] = 0;
  __syncthreads();
  for (int pair = threadIdx.x; pair < num_pairs; pair += kGroupThreads) {
    const int id = a.expert_id[pair];
    if (id >= 0 && id < a.num_experts) atomicAdd(&count[id], 1);
  }
  __syncthreads();
  if (threadIdx.x < kWarp) scan_experts(a, count, first, first_item);
  __syncthreads();
  for (int e = threadIdx.x; e < a.num_experts; e += kGroupThreads)
    for (int i = 0; i * a.rows_per_item < count[e]; ++i) {
      const int begin = i * a.rows_per_item;
      a.items[first_item[e] + i] = {e, first[e] + begin, min(count[e] - begin, a.rows_per_item), 0};
    }
  __syncthreads();
  if (threadIdx.x < kWarp) scatter_pairs(a, num_pairs, first);
}

inline int group_pairs(const GroupArgs& a, void* stream) {
  LaunchShape shape;
  shape.grid = dim3(1), shape.block = dim3(kGroupThreads), shape.shared_bytes = 12 * a.num_experts, shape.start = Start::kEarly;
  return launch(group_kernel, shape, stream, a);
}

}  // namespace kdtree
