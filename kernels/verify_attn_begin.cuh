// How a block of verify_attn begins: the plan and its first item. Where there is one stream, both are made before the
// previous kernel ends, from the numbers that lie there by then, and made again if they are others afterwards.
#pragma once
#include "cuda_async.cuh"
#include "verify_attn_items.cuh"

namespace kdtree {

// --- one stream ----------------------------------------------------------------------------------------------------

// What the plan follows from. A row of another stream is found not to be valid when its tail item is looked up.
struct OneStream {
  int num_rows, prefix;  // prefix is -1 if it is not valid
};

// Past the L1 cache: what an early look has left there may be old.
__device__ __forceinline__ int load_now(const int32_t* from) {
  int value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

__device__ __forceinline__ OneStream look_at_stream(const AttnLaunch& launch) {
  const VerifyAttnArgs& a = launch.a;
  const int prefix = load_now(a.prefix_len);
  int64_t used = launch.num_rows;
  if (a.num_rows_device != nullptr) used = int64_t(load_now(a.num_rows_device)) - launch.row_begin;
  used = used < 0 ? 0 : used < launch.num_rows ? used : launch.num_rows;
  return {int(used), prefix >= 0 && prefix <= a.num_slots ? prefix : -1};
}

// One warp: the first item of the block, if it needs nothing but the plan.
__device__ __forceinline__ void find_shared_first(const AttnLaunch& launch, const AttnPlan& plan, AttnItem& item, int lane) {
  __syncwarp();
  if (lane > 0) return;
  const int index = int(blockIdx.x) - plan.num_tail_items;
  if (index >= 0 && int(blockIdx.x) < plan.num_items) find_shared_item(launch, plan, index, item);
}

// One warp: the plan of a single stream, and such a first item.
__device__ __forceinline__ void plan_stream(const AttnLaunch& launch, const AttnCosts& costs, OneStream one, AttnPlan& plan,
                                            AttnItem& item, int lane) {
  if (lane == 0) {
    plan.num_rows = one.num_rows;
    plan.ordered = 1;
    plan.streams[0] = {0, one.num_rows, one.prefix, one.prefix >= 0 ? leaf_begin(one.prefix) : 0, 0};
  }
  __syncwarp();
  choose_tiles(launch, plan, costs, lane);
  find_shared_first(launch, plan, item, lane);
}

// One warp: asks the L2 cache for this block's share of the prefix's keys, where a piece for each lane is enough. No value
// comes of it, so it does not matter that the previous kernel may still write there.
__device__ __forceinline__ void prefetch_keys(const AttnLaunch& launch, int prefix, int lane) {
  constexpr int kPieceBytes = 4096;
  const VerifyAttnArgs& a = launch.a;
  const int64_t num_bytes = int64_t(prefix) * (a.latent_dim + a.rope_dim) * (a.dtype == kF32 ? 4 : 2) / 16 * 16;
  const int64_t begin = (int64_t(lane) * gridDim.x + blockIdx.x) * kPieceBytes;
  if (begin >= num_bytes || num_bytes > int64_t(kWarp) * gridDim.x * kPieceBytes) return;
  const char* from = static_cast<const char*>(a.cache) + begin;
  if (reinterpret_cast<uintptr_t>(from) % 16 == 0)
    prefetch_to_l2(from, int(num_bytes - begin < kPieceBytes ? num_bytes - begin : kPieceBytes));
}

// One warp: where a tail item of the block will be looked up comes to the L1 cache meanwhile.
__device__ __forceinline__ void touch_rows(const AttnLaunch& launch, int num_rows, int lane) {
  const VerifyAttnArgs& a = launch.a;
  const auto touch = [](const int32_t* p) {
    int unused;
    asm volatile("ld.global.s32 %0, [%1];" : "=r"(unused) : "l"(p) : "memory");
    asm volatile("" ::"r"(unused));  // not waited for
  };
  if (int(blockIdx.x) >= num_rows) return;
  if (lane == 0) touch(a.stream + launch.row_begin + blockIdx.x), touch(a.node + launch.row_begin + blockIdx.x);
  if (lane * 32 < a.num_tree_slots) touch(a.depth + lane * 32);
}

// --- the plan ------------------------------------------------------------------------------------------------------

// All threads of the block: waits for the previous kernel, lets the next one start, makes the plan and finds the block's
// first item; without keys, if there is none.
__device__ __forceinline__ void wait_and_plan(const AttnLaunch& launch, const AttnCosts& costs, AttnPlan& plan,
                                              AttnItem& item) {
  const int thread = int(threadIdx.x);
  const bool is_one = launch.a.num_streams == 1, is_first_warp = thread < kWarp;
  OneStream one{};
  if (is_one && is_first_warp) {
    one = look_at_stream(launch);
    prefetch_keys(launch, one.prefix, thread);
    plan_stream(launch, costs, one, plan, item, thread);
  }
  wait_for_previous_kernel();
  allow_next_kernel();
  if (blockIdx.x == 0 && thread == 0)  // a store that atomics of other blocks see whole; nothing is read
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(launch.tickets), "l"(kTicketMark) : "memory");
  if (!is_one) {
    plan_streams(launch, costs, plan);
    if (is_first_warp) find_shared_first(launch, plan, item, thread);
  } else if (is_first_warp) {
    const OneStream now = look_at_stream(launch);
    touch_rows(launch, one.num_rows, thread);
    if (now.num_rows != one.num_rows || now.prefix != one.prefix) plan_stream(launch, costs, now, plan, item, thread);
  }
  if (thread == 0 && int(blockIdx.x) < plan.num_tail_items) find_tail_item(launch, plan, int(blockIdx.x), item);
  if (thread == 0 && int(blockIdx.x) >= plan.num_items) item.begin = item.end = 0;
  __syncthreads();
  if (blockIdx.x + 1 < gridDim.x) return;  // the last block has the least to do
#pragma unroll 1
  for (int t = plan.num_rows + thread; t < int(launch.num_rows); t += int(blockDim.x)) launch.num_leaves[t] = kUnusedRow;
}

}  // namespace kdtree
