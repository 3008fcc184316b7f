// Which experts the rows of a layer choose in decode_layers: every block finds the same for itself.
#pragma once
#include "decode_work.cuh"
#include "moe_route_row.cuh"

namespace kdtree {

// The sum of all segments that the router phase left for an output of a tile, and a row.
__device__ __forceinline__ float router_sum(const float* sums, int tile, int out, int row) {
  const int place = (out % 8 * 4 + row / 2) * 4 + out / 8 * 2 + row % 2;  // of a lane of mma, and its element
  const float* from = sums + tile * kNumSegments * kWarp * 4 + place;
  float v[kNumSegments];
#pragma unroll
  for (int s = 0; s < kNumSegments; ++s) v[s] = __ldcg(from + s * kWarp * 4);
  return __fadd_rn(__fadd_rn(__fadd_rn(v[0], v[1]), __fadd_rn(v[2], v[3])),
                   __fadd_rn(__fadd_rn(v[4], v[5]), __fadd_rn(v[6], v[7])));
}

// All experts of some rows, ascending, each once. One row's are that already.
__device__ __forceinline__ void list_experts(Chosen& chosen, int num_rows) {
  constexpr int kWords = Dims::kExperts / 32, top_k = Dims::kTopK;
  const int thread = threadIdx.x, num_pairs = num_rows * top_k;
  if (thread < kWords) chosen.bits[thread] = 0;
  if (thread < kMaxDecodePairs)
    for (int row = 0; row < kMaxDecodeRows; ++row) chosen.pair[thread][row] = -1;
  __syncthreads();
  const int id = thread < num_pairs ? chosen.expert_id[thread] : 0;
  if (thread < num_pairs) atomicOr(&chosen.bits[id / 32], 1u << id % 32);
  __syncthreads();
  if (thread < num_pairs) {
    int before = __popc(chosen.bits[id / 32] & ((1u << id % 32) - 1));
    for (int word = 0; word < kWords; ++word) before += word < id / 32 ? __popc(chosen.bits[word]) : 0;
    chosen.expert[before] = id;
    chosen.pair[before][thread / top_k] = static_cast<signed char>(thread % top_k);
  }
  if (thread < kWarp) {
    const int count = __reduce_add_sync(0xffffffffu, thread < kWords ? __popc(chosen.bits[thread]) : 0);
    if (thread == 0) chosen.num_experts = count;
  }
}

// memory: the phase's. All threads; they have met when it returns.
__device__ __forceinline__ void choose_experts(const DecodeArgs& k, const float* bias, int num_rows, unsigned char* memory,
                                               Chosen& chosen) {
  const DecodeLayersArgs& a = k.a;
  constexpr int num_experts = Dims::kExperts;
  float* logits = reinterpret_cast<float*>(memory + kSumsAt);
  MoeRouteArgs route{};
  route.bias = bias, route.expert_id = chosen.expert_id, route.weight = chosen.weight;
  route.num_rows = num_rows, route.num_experts = num_experts, route.top_k = Dims::kTopK, route.scoring = kSigmoid;
  route.renormalize = a.renormalize, route.scaling_factor = a.scaling_factor;
  const RouteSizes sizes(route);
  const RouteShared shared(route, sizes, reinterpret_cast<double*>(memory + kRouteAt));
#pragma unroll 1
  for (int row = 0; row < num_rows; ++row) {
    for (int e = threadIdx.x; e < num_experts; e += kDecodeThreads)
      logits[e] = router_sum(k.scratch.sums, e / kTileOut, e % kTileOut, row);
    __syncthreads();
    route_row(route, sizes, shared, row, logits);
    __syncthreads();
  }
  list_experts(chosen, num_rows);
  __syncthreads();
}

}  // namespace kdtree
