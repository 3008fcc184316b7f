// verify_attn without tensor cores: FP32, and BF16 at dimensions that have no MmaShape. A warp takes 4 queries and
// walks the keys one by one, lanes spread over the C + R elements of a key.
//
// Order of additions: a score is summed by fma over the elements of a lane (lane, lane + 32, …), then warp_sum; the
// maximum moves with every larger score; sum and accumulators go in key order by fma. All of it is a function of the
// query alone.
#pragma once
#include "verify_attn_plan.cuh"

namespace kdtree {

constexpr int kSimtThreads = 256, kSimtWarpQueries = 4, kSimtLog2Queries = 5;
static_assert(kSimtThreads / kWarp * kSimtWarpQueries == 1 << kSimtLog2Queries);

// One warp's queries of an item; E elements of a key a lane.
template <class Float, int E>
struct SimtWorker {
  const AttnLaunch& launch;
  const AttnPlan& plan;
  const int latent = int(launch.a.latent_dim), width = latent + int(launch.a.rope_dim);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int first = warp * kSimtWarpQueries;  // of the item's queries
  float query[kSimtWarpQueries][E], acc[kSimtWarpQueries][E], maximum[kSimtWarpQueries], sum[kSimtWarpQueries];

  __device__ SimtWorker(const AttnLaunch& launch, const AttnPlan& plan) : launch(launch), plan(plan) {}

  __device__ void run() {
    if (first >= plan.item.num_queries || plan.item.begin == plan.item.end) return;
    load_queries();
    clear();
    float key[E], next[E];
    load_key(plan.item.begin, next);
    for (int position = plan.item.begin; position < plan.item.end; ++position) {
#pragma unroll
      for (int e = 0; e < E; ++e) key[e] = next[e];
      if (position + 1 < plan.item.end) load_key(position + 1, next);
      add_key(key);
      if (position + 1 == plan.item.end || leaf_begin(position + 1) == position + 1) flush(leaf_of(position));
    }
  }

  __device__ void load_queries() {
    const VerifyAttnArgs& a = launch.a;
#pragma unroll
    for (int j = 0; j < kSimtWarpQueries; ++j) {
      const int64_t q = launch.row_begin * a.num_heads + plan.item.first_query + first + j;
      const bool used = first + j < plan.item.num_queries;
#pragma unroll
      for (int e = 0; e < E; ++e) {
        const int column = e * kWarp + lane;
        const Float* from = column < latent ? static_cast<const Float*>(a.q_latent) + q * latent + column
                                            : static_cast<const Float*>(a.q_rope) + q * a.rope_dim + column - latent;
        query[j][e] = used && column < width ? to_float(*from) : 0.0f;
      }
    }
  }

  __device__ void clear() {
#pragma unroll
    for (int j = 0; j < kSimtWarpQueries; ++j) {
      maximum[j] = -INFINITY;
      sum[j] = 0.0f;
#pragma unroll
      for (int e = 0; e < E; ++e) acc[j][e] = 0.0f;
    }
  }

  __device__ void load_key(int position, float (&key)[E]) const {
    const AttnItem& item = plan.item;
    const int64_t slot = position < item.prefix ? position : item.prefix + plan.path[position - item.prefix];
    const Float* from = reinterpret_cast<const Float*>(item.keys) + slot * width;
#pragma unroll
    for (int e = 0; e < E; ++e) key[e] = e * kWarp + lane < width ? to_float(from[e * kWarp + lane]) : 0.0f;
  }

  __device__ void add_key(const float (&key)[E]) {
    float score[kSimtWarpQueries];
#pragma unroll
    for (int j = 0; j < kSimtWarpQueries; ++j) {
      float dot = 0.0f;
#pragma unroll
      for (int e = 0; e < E; ++e) dot = __fmaf_rn(query[j][e], key[e], dot);
      score[j] = __fmul_rn(warp_sum(dot), launch.scale_log2);
    }
#pragma unroll
    for (int j = 0; j < kSimtWarpQueries; ++j) {
      if (score[j] > maximum[j]) {  // the same in all lanes
        const float alpha = exp2f(__fsub_rn(maximum[j], score[j]));
        maximum[j] = score[j];
        sum[j] = __fmul_rn(sum[j], alpha);
#pragma unroll
        for (int e = 0; e < E; ++e) acc[j][e] = __fmul_rn(acc[j][e], alpha);
      }
      const float p = exp2f(__fsub_rn(score[j], maximum[j]));
      sum[j] = __fadd_rn(sum[j], p);
      const float weight = to_float(from_float<Float>(p));  // BF16 mode rounds P before P V
#pragma unroll
      for (int e = 0; e < E; ++e) acc[j][e] = __fmaf_rn(weight, key[e], acc[j][e]);
    }
  }

  __device__ void flush(int64_t leaf) {
    const int64_t num_queries = launch.num_rows * launch.a.num_heads;
#pragma unroll
    for (int j = 0; j < kSimtWarpQueries; ++j) {
      if (first + j >= plan.item.num_queries) continue;
      const int64_t q = plan.item.first_query + first + j;
      if (lane == 0) launch.stats[q * launch.max_leaves + leaf] = make_float2(maximum[j], sum[j]);
      float* to = launch.partials + (leaf * num_queries + q) * launch.pitch;
#pragma unroll
      for (int e = 0; e < E; ++e)
        if (e * kWarp + lane < latent) to[e * kWarp + lane] = acc[j][e];
    }
    clear();
  }
};

template <class Float, int E>
__global__ void __launch_bounds__(kSimtThreads)
    attn_simt_kernel(const __grid_constant__ AttnLaunch launch, const __grid_constant__ AttnCosts costs) {
  __shared__ AttnPlan plan;
  __shared__ int scratch[kMaxPath];
  wait_for_previous_kernel();
  allow_next_kernel();
  make_plan(launch, costs, plan);
  for (uint32_t ticket = blockIdx.x; begin_item(launch, plan, ticket, scratch); ticket = plan.ticket) {
    if (threadIdx.x == 0) draw_ticket(launch, plan);
    SimtWorker<Float, E>(launch, plan).run();
    __syncthreads();
  }
}

}  // namespace kdtree
