// sample: a cluster of 8 blocks shares one row. One pass finds the largest logit, and the argmax with it; if all tokens are
// kept, a second one scores them. Of few kept tokens a bound is known from the maxima of the threads' logits: the second
// pass lists what reaches it, and the first block selects and scores among the list.
//
// Every sum is one of integers and every other choice a comparison, so nothing depends on the order.
#include "cuda_rows.cuh"
#include "row_best.cuh"
#include "sampling.h"
#include "topk.cuh"

namespace kdtree {
namespace {

using Cluster = cooperative_groups::cluster_group;
using Mass = unsigned long long;

constexpr int kThreads = 512, kWords = 4;  // a thread's neighbouring logits: a block of the generator, 16 bytes
constexpr int kCapacity = 4096;            // tokens of the list
constexpr int kFreeBits = 8;               // of the FP32 that bounds the last kept logit: 15 bits of mantissa count

struct Shared {
  uint64_t keys[kCapacity];  // the block's part of the list; in the first block then all of it
  uint64_t best[2];          // of the block: the largest logit, the largest score
  uint32_t maxima[kThreads];
  int num_listed, counts[2], counters[3];
  Mass total;
  union {
    DigitBins<int> by_count;
    DigitBins<Mass> by_mass;
    Mass masses[kThreads];  // of the keys, where there are that few
  };
};

// One row of logits, and how it is sampled.
struct Row {
  RowSampling sampling;
  const float* logits;
  int vocab_size;
  float largest;
  int id_bits;
};

// visit(v, i, count): logits i … i + 3 of this thread, `count` of them inside the row.
template <class Visit>
__device__ __forceinline__ void for_each_word_block(const Row& row, Visit&& visit) {
  constexpr int kStride = kRowCluster * kThreads * kWords;
  const int first = (blockIdx.x * kThreads + threadIdx.x) * kWords;
  float v[kWords];
  if (is_aligned16(row.logits) && row.vocab_size % kWords == 0) {
#pragma unroll 4
    for (int i = first; i < row.vocab_size; i += kStride) {
      const float4 loaded = *reinterpret_cast<const float4*>(row.logits + i);
      v[0] = loaded.x, v[1] = loaded.y, v[2] = loaded.z, v[3] = loaded.w;
      visit(v, i, kWords);
    }
  } else {
    for (int i = first; i < row.vocab_size; i += kStride) {
#pragma unroll
      for (int k = 0; k < kWords; ++k) v[k] = i + k < row.vocab_size ? row.logits[i + k] : -INFINITY;
      visit(v, i, min(kWords, row.vocab_size - i));
    }
  }
}

template <class Visit>
__device__ __forceinline__ void for_each_key(const Row& row, Visit&& visit) {
  for_each_word_block(row, [&](const float (&v)[kWords], int i, int count) {
#pragma unroll
    for (int k = 0; k < kWords; ++k)
      if (k < count) visit(v[k] != v[k] ? kNanKey : make_key(v[k], i + k, row.id_bits));
  });
}

__device__ __forceinline__ uint32_t id_of(const Row& row, uint64_t key) {
  return ((1u << row.id_bits) - 1) & ~uint32_t(key);
}

__device__ __forceinline__ float scaled_of(const Row& row, uint64_t key) {
  return scaled_logit(row.sampling, from_rising_bits(uint32_t(key >> row.id_bits)), row.largest);
}

__device__ __forceinline__ float score_of(const Row& row, uint64_t key) {
  return __fadd_rn(scaled_of(row, key), gumbel_of_token(row.sampling, id_of(row, key)));
}

__device__ __forceinline__ uint64_t scored(const Row& row, uint64_t key) {
  return make_key(score_of(row, key), id_of(row, key), row.id_bits);
}

// The thread's best score of all tokens, and of the most likely one; `most` is the key of its logit. Beside a token that
// likely few others have a chance, so most words of the generator are not made, and hardly any becomes noise.
__device__ uint64_t best_of_all(const Row& row, uint64_t most) {
  uint64_t best = scored(row, most);
  for_each_word_block(row, [&](const float (&v)[kWords], int i, int count) {
    const float to_beat = from_rising_bits(uint32_t(best >> row.id_bits));
    float scaled[kWords];
    bool any = false;
#pragma unroll
    for (int k = 0; k < kWords; ++k) {
      scaled[k] = scaled_logit(row.sampling, v[k], row.largest);
      any |= __fadd_rn(scaled[k], kMaxGumbel) >= to_beat;
    }
    if (!any) return;
    uint32_t word[kWords];
    philox(row.sampling, uint32_t(i / kWords), word);
    any = false;
#pragma unroll
    for (int k = 0; k < kWords; ++k) any |= __fadd_rn(scaled[k], gumbel_bound(word[k])) >= to_beat;
    if (!any) return;
#pragma unroll
    for (int k = 0; k < kWords; ++k)
      if (k < count) best = larger(best, make_key(__fadd_rn(scaled[k], gumbel(word[k])), i + k, row.id_bits));
  });
  return best;
}

// Sums over the cluster; two counters take turns.
__device__ int cluster_count(const Cluster& cluster, Shared& s, int count, int& turn) {
  if (threadIdx.x == 0) s.counts[turn] = count;
  cluster.sync();
  int total = 0;
  for (int b = 0; b < kRowCluster; ++b) total += *cluster.map_shared_rank(&s.counts[turn], b);
  turn ^= 1;
  return total;
}

// A bound from below for the last of the row's `wanted` largest keys, which few more than `wanted` reach.
__device__ uint64_t find_bound(const Cluster& cluster, Shared& s, const Row& row, int wanted, BlockCounter& counter) {
  uint32_t maxima[kRowCluster];
#pragma unroll
  for (int b = 0; b < kRowCluster; ++b) maxima[b] = *cluster.map_shared_rank(&s.maxima[threadIdx.x], b);
  const uint32_t bound = find_threshold<uint32_t>(wanted, 32, kFreeBits, [&](uint32_t higher) {
    int count = 0;
#pragma unroll
    for (int b = 0; b < kRowCluster; ++b) count += maxima[b] >= higher;
    return counter.count(count);
  });
  return uint64_t(bound) << row.id_bits;
}

// Lists this block's keys that reach the bound; the number of the cluster's.
__device__ int list_keys(const Cluster& cluster, Shared& s, const Row& row, uint64_t bound, int& turn) {
  if (threadIdx.x == 0) s.num_listed = 0;
  __syncthreads();
  for_each_key(row, [&](uint64_t key) {
    if (key < bound) return;
    const int at = atomicAdd(&s.num_listed, 1);
    if (at < kCapacity) s.keys[at] = key;
  });
  __syncthreads();
  return cluster_count(cluster, s, s.num_listed, turn);
}

// Appends the other blocks' lists to that of the first block.
__device__ void gather_lists(const Cluster& cluster, Shared& s) {
  constexpr int kThreadsPerBlock = kThreads / kRowCluster;
  const int source = threadIdx.x / kThreadsPerBlock;
  int begin = 0;
  for (int b = 0; b < source; ++b) begin += *cluster.map_shared_rank(&s.num_listed, b);
  if (source == 0) return;
  const int count = *cluster.map_shared_rank(&s.num_listed, source);
  const uint64_t* keys = cluster.map_shared_rank(s.keys, source);
  for (int k = threadIdx.x % kThreadsPerBlock; k < count; k += kThreadsPerBlock) s.keys[begin + k] = keys[k];
}

// Adds a mass of every thread to the block's total; the total.
__device__ Mass add_to_total(Shared& s, Mass mine) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) mine += __shfl_xor_sync(0xffffffffu, mine, offset);
  if (threadIdx.x % kWarp == 0) atomicAdd(&s.total, mine);
  __syncthreads();
  return s.total;
}

__device__ __forceinline__ Mass mass_of(const Row& row, uint64_t key) {
  return probability_mass(scaled_of(row, key));
}

// At most one listed key a thread: the thread's score, if top_k and top_p keep its key.
__device__ uint64_t best_of_one_each(Shared& s, const Row& row, int num_listed) {
  const uint64_t key = threadIdx.x < num_listed ? s.keys[threadIdx.x] : 0;
  const Mass mass = key && row.sampling.top_p < 1.0f ? mass_of(row, key) : 0;
  s.masses[threadIdx.x] = mass;
  __syncthreads();
  int num_above = 0;
  Mass mass_above = 0;
#pragma unroll 4
  for (int k = 0; k < num_listed; ++k)
    if (s.keys[k] > key) ++num_above, mass_above += s.masses[k];
  const bool within = key && num_above < row.sampling.top_k;
  const Mass total = add_to_total(s, within ? mass : 0);
  if (!within || (mass_above > 0 && mass_above >= wanted_mass(row.sampling, total))) return 0;
  return scored(row, key);
}

// The least key that top_k and top_p keep, of num_listed keys from `least` up to `most`.
__device__ uint64_t find_least_kept(Shared& s, const Row& row, int num_listed, uint64_t least, uint64_t most) {
  if (num_listed > row.sampling.top_k)
    least = select_threshold<kThreads>(s.by_count, row.sampling.top_k, 63 - __clzll(most ^ least), most, [&](auto&& f) {
      for (int k = threadIdx.x; k < num_listed; k += kThreads) f(s.keys[k], 1);
    });
  if (row.sampling.top_p == 1.0f) return least;
  const auto for_each_mass = [&](auto&& f) {
    for (int k = threadIdx.x; k < num_listed; k += kThreads)
      if (s.keys[k] >= least) f(s.keys[k], mass_of(row, s.keys[k]));
  };
  Mass mine = 0;
  for_each_mass([&](uint64_t, Mass mass) { mine += mass; });
  const Mass wanted = wanted_mass(row.sampling, add_to_total(s, mine));
  return select_threshold<kThreads>(s.by_mass, wanted, 63 - __clzll(most ^ least), most, for_each_mass);
}

// The thread's best score among the keys that top_k and top_p keep.
__device__ uint64_t best_of_many(Shared& s, const Row& row, int num_listed, uint64_t least, uint64_t most) {
  least = find_least_kept(s, row, num_listed, least, most);
  uint64_t best = 0;
  for (int k = threadIdx.x; k < num_listed; k += kThreads)
    if (s.keys[k] >= least) best = larger(best, scored(row, s.keys[k]));
  return best;
}

// The key of the token of largest score among the kept ones, in the first warp of the first block. All threads of a
// cluster call it; `most` is the key of the largest logit.
__device__ uint64_t best_of_few(const Cluster& cluster, Shared& s, const Row& row, uint64_t most) {
  BlockCounter counter{s.counters, 0};
  int turn = 0;
  const int top_k = row.sampling.top_k;
  uint64_t least = find_bound(cluster, s, row, top_k, counter);
  int num_listed = list_keys(cluster, s, row, least, turn);
  if (num_listed > kCapacity) {  // many equal logits: the exact threshold, bit by bit
    least = find_threshold<uint64_t>(top_k, 32 + row.id_bits, 0, [&](uint64_t higher) {
      int count = 0;
      for_each_key(row, [&](uint64_t key) { count += key >= higher; });
      return cluster_count(cluster, s, counter.count(count), turn);
    });
    num_listed = list_keys(cluster, s, row, least, turn);
  }
  if (cluster.block_rank() == 0) gather_lists(cluster, s);
  cluster.sync();
  if (cluster.block_rank() != 0) return 0;

  return block_largest<kThreads>(num_listed <= kThreads ? best_of_one_each(s, row, num_listed)
                                                        : best_of_many(s, row, num_listed, least, most));
}

__global__ void __launch_bounds__(kThreads, 2) sample_kernel(SampleArgs a, int id_bits) {
  __shared__ Shared s;
  wait_for_previous_kernel();
  allow_next_kernel();
  const Cluster cluster = cooperative_groups::this_cluster();
  const int64_t t = blockIdx.y;
  if (t >= rows_in_use(a.num_rows_device, a.num_rows)) return;  // all blocks of a cluster alike
  Row row{row_sampling(a, t), a.logits + t * a.vocab_size, int(a.vocab_size), 0.0f, id_bits};
  const bool writes = cluster.block_rank() == 0 && threadIdx.x == 0;
  if (!row.sampling.valid) {
    if (writes) a.token[t] = -1;
    return;
  }
  if (threadIdx.x < 3) s.counters[threadIdx.x] = 0;
  if (threadIdx.x == 0) s.total = 0;

  // the largest logit
  uint64_t best = 0;
  for_each_key(row, [&](uint64_t key) { best = larger(best, key); });
  s.maxima[threadIdx.x] = uint32_t(best >> id_bits);
  best = cluster_largest<kThreads>(cluster, best, s.best[0]);
  row.largest = from_rising_bits(uint32_t(best >> id_bits));

  // the token
  if (best == kNanKey) {
    if (writes) a.token[t] = -1;
  } else if (row.sampling.inverse_temperature == 0.0f || row.largest == -INFINITY) {
    if (writes) a.token[t] = id_of(row, best);
  } else {
    best = row.sampling.top_k > 0 ? best_of_few(cluster, s, row, best)
                                  : cluster_largest<kThreads>(cluster, best_of_all(row, best), s.best[1]);
    if (writes) a.token[t] = id_of(row, best);
    if (row.sampling.top_k > 0) return;  // nobody reads another block any more
  }
  cluster.sync();  // a block's shared memory must outlive its readers
}

}  // namespace

int sample_cuda(const SampleArgs& a, void* stream) {
  if (a.vocab_size < 1 || a.vocab_size > int64_t{1} << 30) return kUnsupported;
  if (a.num_rows > 65535) return kUnsupported;  // the limit of grid.y
  if (a.num_rows == 0) return kOk;
  int id_bits = 1;
  while (int64_t{1} << id_bits < a.vocab_size) ++id_bits;
  const LaunchShape shape{dim3(kRowCluster, a.num_rows), dim3(kThreads), 0, kRowCluster, Start::kEarly};
  return launch(sample_kernel, shape, stream, a, id_bits);
}

}  // namespace kdtree
