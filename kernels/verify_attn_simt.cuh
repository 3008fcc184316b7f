// verify_attn without tensor cores: FP32, and BF16 at dimensions that have no MmaShape. Four warps share the leaf of four
// queries, whose tiles of 32 keys they take in turn; the other four warps have four more queries.
//
// Order of additions: a score is summed by fma over the elements of the key, in order. A warp takes tiles t, t + 4, … of
// the leaf, with a maximum that only grows: sum = sum * alpha + warp_sum(p), and the accumulators go in key order by
// fma. The four warps' results are added by fma in order of t. All of it is a function of the query alone.
#pragma once
#include <type_traits>

#include "verify_attn_begin.cuh"

namespace kdtree {

constexpr int kSimtThreads = 256, kSimtQueries = 4, kSimtSlots = 4, kSimtWarps = kSimtThreads / kWarp;
constexpr int kSimtGroups = kSimtWarps / kSimtSlots, kSimtLog2Queries = 5;
constexpr AttnCosts kSimtCosts{{0.05f, 0.05f, 0.05f}, {2, 2, 2}, {3, 3, 3}, kSimtLog2Queries, kSimtLog2Queries};
constexpr int kSimtRound = kSimtGroups * kSimtQueries;  // queries at a time

// E elements of a key a lane.
template <int E>
struct SimtShared {
  alignas(16) float query[kSimtGroups][kSimtQueries][E * kWarp];
  float partial[kSimtWarps][E * kWarp];
  float2 stats[kSimtWarps][kSimtQueries];  // maximum, sum
};

template <class Float, int E>
struct SimtWorker {
  using Vector = std::conditional_t<sizeof(Float) == 4, float4, uint2>;  // 4 elements
  const AttnLaunch& launch;
  const AttnItem& item;
  const uint16_t* path;
  SimtShared<E>& shared;
  const int latent = int(launch.a.latent_dim), width = latent + int(launch.a.rope_dim);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int group = warp / kSimtSlots, slot = warp % kSimtSlots;
  const bool vectors = width % 4 == 0 && reinterpret_cast<uintptr_t>(item.keys) % 16 == 0;
  int first = 0;  // query of the item
  float acc[kSimtQueries][E], maximum[kSimtQueries], sum[kSimtQueries];

  __device__ SimtWorker(const AttnLaunch& launch, const AttnItem& item, const uint16_t* path, SimtShared<E>& shared)
      : launch(launch), item(item), path(path), shared(shared) {}

  // All threads of the block.
  __device__ void run() {
    if (item.begin == item.end) return;
    for (int round = 0; round < item.num_queries; round += kSimtRound) {
      first = round + group * kSimtQueries;
      load_queries();
      __syncthreads();
      for (int begin = item.begin, end; begin < item.end; begin = end) {
        end = min(item.end, begin + (1 << (kLog2FirstLeaf + leaf_region(begin))));
        clear();
        for (int tile = begin + slot * kWarp; tile < end && first < item.num_queries; tile += kSimtSlots * kWarp)
          add_tile(tile, min(kWarp, end - tile));
        combine(leaf_of(begin), min(kSimtSlots, (end - begin + kWarp - 1) / kWarp));
      }
    }
  }

  __device__ void load_queries() {
    const VerifyAttnArgs& a = launch.a;
    const int64_t begin = launch.query_begin + item.first_query + first;
    for (int i = slot * kWarp + lane; i < kSimtQueries * width; i += kSimtSlots * kWarp) {
      const int j = i / width, column = i % width;
      const Float* from = column < latent
                              ? static_cast<const Float*>(a.q_latent) + (begin + j) * latent + column
                              : static_cast<const Float*>(a.q_rope) + (begin + j) * a.rope_dim + column - latent;
      shared.query[group][j][column] = first + j < item.num_queries ? to_float(*from) : 0.0f;
    }
  }

  __device__ void clear() {
#pragma unroll
    for (int j = 0; j < kSimtQueries; ++j) {
      maximum[j] = -INFINITY;
      sum[j] = 0.0f;
#pragma unroll
      for (int e = 0; e < E; ++e) acc[j][e] = 0.0f;
    }
  }

  __device__ const Float* key_at(int position) const {
    const int64_t slot = position < item.prefix ? position : item.prefix + path[position - item.prefix];
    return reinterpret_cast<const Float*>(item.keys) + slot * width;
  }

  // dot[j] = query j . key
  __device__ void multiply(const Float* key, float (&dot)[kSimtQueries]) const {
    const auto& query = shared.query[group];
#pragma unroll
    for (int j = 0; j < kSimtQueries; ++j) dot[j] = 0.0f;
    int c = 0;
#pragma unroll 4
    for (; vectors && c < width; c += 4) {
      alignas(16) Float k[4];
      *reinterpret_cast<Vector*>(k) = *reinterpret_cast<const Vector*>(key + c);
#pragma unroll
      for (int j = 0; j < kSimtQueries; ++j) {
        const float4 q = *reinterpret_cast<const float4*>(&query[j][c]);
        dot[j] = __fmaf_rn(q.x, to_float(k[0]), dot[j]);
        dot[j] = __fmaf_rn(q.y, to_float(k[1]), dot[j]);
        dot[j] = __fmaf_rn(q.z, to_float(k[2]), dot[j]);
        dot[j] = __fmaf_rn(q.w, to_float(k[3]), dot[j]);
      }
    }
    for (; c < width; ++c)
#pragma unroll
      for (int j = 0; j < kSimtQueries; ++j) dot[j] = __fmaf_rn(query[j][c], to_float(key[c]), dot[j]);
  }

  // The keys at `count` positions: a lane scores one of them, then every lane adds its columns of all.
  __device__ void add_tile(int position, int count) {
    float dot[kSimtQueries], weight[kSimtQueries];
    multiply(key_at(position + min(lane, count - 1)), dot);
#pragma unroll
    for (int j = 0; j < kSimtQueries; ++j) {
      const float score = lane < count ? __fmul_rn(dot[j], launch.scale_log2) : -INFINITY;
      const float larger = fmaxf(maximum[j], warp_max(score)), alpha = exp2f(__fsub_rn(maximum[j], larger));
      const float p = exp2f(__fsub_rn(score, larger));
      maximum[j] = larger;
      sum[j] = __fadd_rn(__fmul_rn(sum[j], alpha), warp_sum(p));
      weight[j] = to_float(from_float<Float>(p));  // BF16 mode rounds P before P V
#pragma unroll
      for (int e = 0; e < E; ++e) acc[j][e] = __fmul_rn(acc[j][e], alpha);
    }
#pragma unroll 4
    for (int i = 0; i < count; ++i) {
      const Float* key = key_at(position + i);
      float value[E];
#pragma unroll
      for (int e = 0; e < E; ++e) value[e] = e * kWarp + lane < latent ? to_float(key[e * kWarp + lane]) : 0.0f;
#pragma unroll
      for (int j = 0; j < kSimtQueries; ++j) {
        const float p = __shfl_sync(0xffffffffu, weight[j], i);
#pragma unroll
        for (int e = 0; e < E; ++e) acc[j][e] = __fmaf_rn(p, value[e], acc[j][e]);
      }
    }
  }

  // The leaf's partial results: what the first `num_slots` warps of each group have. All threads of the block.
  __device__ void combine(int64_t leaf, int num_slots) {
#pragma unroll
    for (int j = 0; j < kSimtQueries; ++j) {
      if (lane == 0) shared.stats[warp][j] = make_float2(maximum[j], sum[j]);
#pragma unroll
      for (int e = 0; e < E; ++e) shared.partial[warp][e * kWarp + lane] = acc[j][e];
      __syncthreads();
      if (first + j < item.num_queries) write_query(item.first_query + first + j, j, leaf, num_slots);
      __syncthreads();
    }
  }

  __device__ void write_query(int64_t q, int j, int64_t leaf, int num_slots) const {
    float largest = -INFINITY, total = 0.0f, factor[kSimtSlots];
#pragma unroll
    for (int k = 0; k < kSimtSlots; ++k)
      if (k < num_slots) largest = fmaxf(largest, shared.stats[group * kSimtSlots + k][j].x);
#pragma unroll
    for (int k = 0; k < kSimtSlots; ++k) {
      if (k >= num_slots) continue;
      const float2 stats = shared.stats[group * kSimtSlots + k][j];
      factor[k] = exp2f(__fsub_rn(stats.x, largest));
      total = __fmaf_rn(factor[k], stats.y, total);
    }
    if (slot == 0 && lane == 0) launch.stats[q * launch.max_leaves + leaf] = make_float2(largest, total);
    float* to = launch.partials + (leaf * launch.num_queries + q) * launch.pitch;
    for (int column = slot * kWarp + lane; column < latent; column += kSimtSlots * kWarp) {
      float x = 0.0f;
#pragma unroll
      for (int k = 0; k < kSimtSlots; ++k)
        if (k < num_slots) x = __fmaf_rn(factor[k], shared.partial[group * kSimtSlots + k][column], x);
      to[column] = x;
    }
  }
};

template <class Float, int E>
__global__ void __launch_bounds__(kSimtThreads, 1)
    attn_simt_kernel(const __grid_constant__ AttnLaunch launch, const __grid_constant__ AttnCosts costs) {
  __shared__ AttnPlan plan;
  __shared__ AttnWork work;
  __shared__ SimtShared<E> shared;
  __shared__ int scratch[kMaxPath];
  wait_and_plan(launch, costs, plan, work.item);
  bool is_found = true;
  for (uint32_t ticket = blockIdx.x; begin_item(launch, plan, work, ticket, is_found, scratch);
       ticket = work.next_ticket) {
    is_found = false;
    if (threadIdx.x == 0) work.next_ticket = draw_ticket(launch, plan);
    SimtWorker<Float, E>(launch, work.item, work.path, shared).run();
    __syncthreads();
  }
}

}  // namespace kdtree
