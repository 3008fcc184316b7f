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
  if (num_rows == 1) {
    if (thread < top_k) {
      chosen.expert[thread] = chosen.expert_id[thread];
#pragma unroll
      for (int row = 0; row < kMaxDecodeRows; ++row) chosen.pair[thread][row] = static_cast<signed char>(row == 0 ? thread : -1);
    }
    if (thread == 0) chosen.num_experts = top_k;
    return;
  }
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

// Memory of the choice of a row.
struct ChoiceShared {
  uint64_t key[Dims::kExperts];  // of those that may be chosen
  double score[Dims::kExperts], chosen_score[Dims::kTopK];
  int id[Dims::kExperts], chosen_id[Dims::kTopK];
  uint32_t largest[kDecodeWarps];  // upper halves of keys
  int count;
};
static_assert(sizeof(ChoiceShared) <= kRouteBytes && kDecodeWarps == Dims::kTopK);

// What moe_route chooses for a row, of scores by sigmoid, and its weights (moe_route_row.cuh). Each of 8 warps has an expert at
// least as good as the worst of their best: so none below that is among the best 8, and few experts are left to be ranked.
class RowChoice {
 public:
  // All threads, which meet before the memory is used again.
  __device__ __forceinline__ RowChoice(const DecodeArgs& k, const float* bias, int row, ChoiceShared& shared) : shared_(shared) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int e = int(threadIdx.x) + i * kDecodeThreads;
      key_[i] = 0, score_[i] = 0.0;
      if (e >= Dims::kExperts) continue;
      const double add = bias ? bias[e] : 0.0f;
      score_[i] = 1.0 / (1.0 + exp(-double(router_sum(k.scratch.sums, e / kTileOut, e % kTileOut, row))));
      key_[i] = make_key(score_[i] + add);
    }
  }

  __device__ __forceinline__ void choose(const DecodeArgs& k, int row, Chosen& chosen) {
    collect();
    rank();
    if (threadIdx.x < Dims::kTopK) write(k, row, chosen);
  }

 private:
  static constexpr int kOwn = (Dims::kExperts + kDecodeThreads - 1) / kDecodeThreads;
  ChoiceShared& shared_;
  uint64_t key_[kOwn];
  double score_[kOwn];

  __device__ __forceinline__ void collect() {
    const int lane = threadIdx.x % kWarp;
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) largest = max(largest, uint32_t(key_[i] >> 32));
    largest = __reduce_max_sync(0xffffffffu, largest);
    if (lane == 0) shared_.largest[threadIdx.x / kWarp] = largest;
    if (threadIdx.x == 0) shared_.count = 0;
    __syncthreads();
    uint32_t least = shared_.largest[0];
#pragma unroll
    for (int w = 1; w < kDecodeWarps; ++w) least = min(least, shared_.largest[w]);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (key_[i] == 0 || uint32_t(key_[i] >> 32) < least) continue;
      const int at = atomicAdd(&shared_.count, 1);  // in any order: an expert's rank does not depend on its place
      shared_.key[at] = key_[i], shared_.score[at] = score_[i], shared_.id[at] = int(threadIdx.x) + i * kDecodeThreads;
    }
    __syncthreads();
  }

  __device__ __forceinline__ void rank() const {
    const int count = shared_.count;
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += kDecodeThreads) {
      const uint64_t key = shared_.key[i];
      const int id = shared_.id[i];
      int rank = 0;
#pragma unroll 4
      for (int j = 0; j < count; ++j) rank += is_before(shared_.key[j], key, shared_.id[j] < id);
      if (rank < Dims::kTopK) shared_.chosen_id[rank] = id, shared_.chosen_score[rank] = shared_.score[i];
    }
    __syncthreads();
  }

  __device__ __forceinline__ void write(const DecodeArgs& k, int row, Chosen& chosen) const {
    const int id = shared_.chosen_id[threadIdx.x];
    int slot = 0;
    double sum = 0.0;
#pragma unroll
    for (int j = 0; j < Dims::kTopK; ++j) slot += shared_.chosen_id[j] < id, sum += shared_.chosen_score[j];
    const double score = shared_.chosen_score[threadIdx.x];
    chosen.expert_id[row * Dims::kTopK + slot] = id;
    chosen.weight[row * Dims::kTopK + slot] =
        float((k.a.renormalize ? score / (sum + 1e-20) : score) * double(k.a.scaling_factor));
  }
};

// memory: the phase's. All threads; they have met when it returns.
__device__ __forceinline__ void choose_experts(const DecodeArgs& k, const float* bias, int num_rows, unsigned char* memory,
                                               Chosen& chosen) {
  ChoiceShared& shared = *reinterpret_cast<ChoiceShared*>(memory + kRouteAt);
#pragma unroll 1
  for (int row = 0; row < num_rows; ++row) {
    RowChoice(k, bias, row, shared).choose(k, row, chosen);
    __syncthreads();
  }
  list_experts(chosen, num_rows);
  __syncthreads();
}

}  // namespace kdtree
