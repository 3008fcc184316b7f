// moe_route: scores of all experts, the top_k of score + bias (equal: lower id), their weights in ascending id. One block a row,
// a thread an expert. Scores are FP64, so that rounding hides no difference between two logits; weights are rounded once, at
// the end.
//
// To choose, each warp ranks its 32 experts and leaves the best of them in order; of those, an expert's rank is its place in its
// own list plus how many of every other list are better. No step waits for the choice of another expert.
#include "cuda_rows.cuh"
#include "expert_groups.h"

namespace kdtree {
namespace {

constexpr int kMaxWarps = 32;
constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr uint64_t kNone = 0, kAside = 1;  // below every key: no expert; an expert in a group that does not take part

// Rises with x; NaN lies above every number, so that it is chosen first and reaches the output instead of hiding.
__device__ __forceinline__ uint64_t make_key(double x) {
  if (x != x) return ~uint64_t{0};
  const uint64_t bits = uint64_t(__double_as_longlong(x + 0.0));  // + 0.0: +0 and -0 are equal
  return (bits >> 63) ? ~bits : bits | uint64_t{1} << 63;
}

// --- shared memory of a row ------------------------------------------------------------------------------------------

// A list: of 32 neighbouring experts the best, at most top_k, best first.
struct Sizes {
  int64_t num_lists, list_length, num_groups;

  __host__ __device__ explicit Sizes(const MoeRouteArgs& a)
      : num_lists((a.num_experts + kWarp - 1) / kWarp), list_length(a.top_k < kWarp ? a.top_k : kWarp),
        num_groups(a.num_groups > 1 ? a.num_groups : 0) {}
  __host__ __device__ int64_t num_listed() const { return num_lists * list_length; }
  __host__ __device__ int64_t num_bytes(const MoeRouteArgs& a) const {
    return 8 * (2 * a.num_experts + num_groups + num_listed() + a.top_k) + 4 * (num_listed() + a.top_k + num_groups);
  }
};

struct Shared {
  double *score, *choice;            // [E] without and with bias
  double *group_sum, *chosen_score;  // [groups], [top_k]
  uint64_t* listed_key;                      // [lists, list_length]
  int *listed_id, *chosen_id, *takes_part;   // as listed_key, [top_k], [groups]

  __device__ Shared(const MoeRouteArgs& a, const Sizes& sizes, double* begin) {
    score = begin, choice = score + a.num_experts, group_sum = choice + a.num_experts;
    chosen_score = group_sum + sizes.num_groups;
    listed_key = reinterpret_cast<uint64_t*>(chosen_score + a.top_k);
    listed_id = reinterpret_cast<int*>(listed_key + sizes.num_listed());
    chosen_id = listed_id + sizes.num_listed(), takes_part = chosen_id + a.top_k;
  }
};

// --- scores ----------------------------------------------------------------------------------------------------------

// The warps' values, in order, combined by f; the same in every thread.
template <class T, class F>
__device__ T over_warps(T mine, F f) {
  __shared__ T of_warp[kMaxWarps];
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = mine;
  __syncthreads();
  T all = of_warp[0];
  for (int w = 1; w < int(blockDim.x / kWarp); ++w) all = f(all, of_warp[w]);
  return all;
}

__device__ __forceinline__ double lane_sum(double x) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(kAllLanes, x, offset);
  return x;
}

// A thread reads a bias together with the logit, not after the score.
__device__ void fill_scores(const MoeRouteArgs& a, const float* logits, const Shared& shared) {
  const int begin = threadIdx.x, step = blockDim.x, num_experts = int(a.num_experts);
  double* score = shared.score;
  if (a.scoring == kSigmoid) {
    for (int e = begin; e < num_experts; e += step) {
      const double bias = a.bias ? a.bias[e] : 0.0f;
      score[e] = 1.0 / (1.0 + exp(-double(logits[e])));
      shared.choice[e] = score[e] + bias;
    }
    return;
  }
  float largest = -INFINITY;
  for (int e = begin; e < num_experts; e += step) {
    largest = fmaxf(largest, logits[e]);
    shared.choice[e] = a.bias ? a.bias[e] : 0.0f;
  }
  largest = over_warps(warp_max(largest), [](float x, float y) { return fmaxf(x, y); });
  double sum = 0.0;
  for (int e = begin; e < num_experts; e += step) sum += score[e] = exp(double(logits[e]) - double(largest));
  sum = over_warps(lane_sum(sum), [](double x, double y) { return x + y; });
  for (int e = begin; e < num_experts; e += step) score[e] /= sum, shared.choice[e] = score[e] + shared.choice[e];
}

// Finds which groups take part: fewer than topk_groups groups have a larger sum of their two best scores, or an equal one and
// a lower number.
__device__ void find_groups(const MoeRouteArgs& a, const Shared& shared) {
  const int num_groups = int(a.num_groups), size = int(a.num_experts) / num_groups;
  for (int g = threadIdx.x; g < num_groups; g += blockDim.x) {
    double first = -INFINITY, second = -INFINITY;
    for (int e = g * size; e < (g + 1) * size; ++e) {
      const double choice = shared.choice[e], score = choice != choice ? INFINITY : choice;
      second = fmax(second, fmin(first, score));
      first = fmax(first, score);
    }
    shared.group_sum[g] = first + second;
  }
  __syncthreads();
  for (int g = threadIdx.x; g < num_groups; g += blockDim.x) {
    int num_better = 0;
    for (int other = 0; other < num_groups; ++other)
      num_better += shared.group_sum[other] > shared.group_sum[g] ||
                    (shared.group_sum[other] == shared.group_sum[g] && other < g);
    shared.takes_part[g] = num_better < a.topk_groups;
  }
  __syncthreads();
}

// --- choice ----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint64_t key_of(const MoeRouteArgs& a, const Shared& shared, int e) {
  if (a.num_groups > 1 && !shared.takes_part[e / int(a.num_experts / a.num_groups)]) return kAside;
  return make_key(shared.choice[e]);
}

// Whether `other`, of an expert of lower id or not, comes before `key`, which is an expert's.
__device__ __forceinline__ bool is_before(uint64_t other, uint64_t key, bool lower) { return other > key - lower; }

// Leaves the lists. The lanes past the last expert fill up the last list.
__device__ void list_best(const MoeRouteArgs& a, const Sizes& sizes, const Shared& shared) {
  const int lane = threadIdx.x % kWarp, length = int(sizes.list_length);
  for (int list = threadIdx.x / kWarp; list < sizes.num_lists; list += blockDim.x / kWarp) {
    const int e = list * kWarp + lane;
    const bool exists = e < a.num_experts;
    const uint64_t key = exists ? key_of(a, shared, e) : kNone;
    int rank = 0;
#pragma unroll 8
    for (int l = 0; l < kWarp; ++l) rank += is_before(__shfl_sync(kAllLanes, key, l), key, l < lane);
    if (!exists) rank = lane;
    if (rank < length) shared.listed_key[list * length + rank] = key, shared.listed_id[list * length + rank] = e;
  }
}

// Leaves the top_k of all lists and their scores, best first.
__device__ void choose(const MoeRouteArgs& a, const Sizes& sizes, const Shared& shared) {
  const int length = int(sizes.list_length), num_lists = int(sizes.num_lists);
  for (int i = threadIdx.x; i < num_lists * length; i += blockDim.x) {
    const uint64_t key = shared.listed_key[i];
    if (key == kNone) continue;
    const int list = i / length;
    int rank = i - list * length;
    for (int other = 0; other < num_lists; ++other) {
      if (other == list) continue;
#pragma unroll 8
      for (int j = 0; j < length; ++j) rank += is_before(shared.listed_key[other * length + j], key, other < list);
    }
    if (rank < a.top_k) {
      const int id = shared.listed_id[i];
      shared.chosen_id[rank] = id, shared.chosen_score[rank] = shared.score[id];
    }
  }
}

__global__ void __launch_bounds__(kMaxWarps * kWarp) moe_route_kernel(MoeRouteArgs a) {
  extern __shared__ double memory[];
  const Sizes sizes(a);
  const Shared shared(a, sizes, memory);
  const int64_t row = blockIdx.x;
  const int num_experts = int(a.num_experts), top_k = int(a.top_k);
  wait_for_previous_kernel();
  allow_next_kernel();
  if (row >= rows_in_use(a.num_rows_device, a.num_rows)) return;
  fill_scores(a, a.logits + row * num_experts, shared);
  __syncthreads();
  if (a.num_groups > 1) find_groups(a, shared);
  list_best(a, sizes, shared);
  __syncthreads();
  choose(a, sizes, shared);
  __syncthreads();
  for (int i = threadIdx.x; i < top_k; i += blockDim.x) {
    const int id = shared.chosen_id[i];
    int slot = 0;
    double sum = 0.0;
    for (int j = 0; j < top_k; ++j) slot += shared.chosen_id[j] < id, sum += shared.chosen_score[j];
    const double score = shared.chosen_score[i];
    a.expert_id[row * top_k + slot] = id;
    a.weight[row * top_k + slot] = float((a.renormalize ? score / (sum + 1e-20) : score) * double(a.scaling_factor));
  }
}

}  // namespace

int moe_route_cuda(const MoeRouteArgs& a, void* stream) {
  if (a.top_k < 1 || a.top_k > a.num_experts) return kUnsupported;
  if (a.scoring != kSoftmax && a.scoring != kSigmoid) return kUnsupported;
  if (!groups_are_valid(a)) return kUnsupported;
  const Sizes sizes(a);
  const int64_t num_bytes = sizes.num_bytes(a);
  if (num_bytes > kMaxSharedBytes - 1024 || a.num_rows > INT32_MAX) return kUnsupported;
  if (a.num_rows == 0) return kOk;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(a.num_rows));
  shape.block = dim3(static_cast<unsigned>(std::min<int64_t>(sizes.num_lists, kMaxWarps) * kWarp));
  shape.shared_bytes = size_t(num_bytes), shape.shared_limit = kMaxSharedBytes - 1024, shape.start = Start::kEarly;
  return launch(moe_route_kernel, shape, stream, a);
}

}  // namespace kdtree
