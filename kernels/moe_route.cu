// moe_route: scores of all experts, the top_k of score + bias (equal: lower id), their weights in ascending id. One
// warp a row. Scores are FP64, so that rounding hides no difference between two logits; weights are rounded once, at
// the end.
#include "cuda_rows.cuh"
#include "expert_groups.h"

namespace kdtree {
namespace {

constexpr int kMaxRowsPerBlock = 4;
constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr uint64_t kTaken = 0, kAside = 1;  // below every key: chosen already; in a group that does not take part

// Rises with x; NaN lies above every number, so that it is chosen first and reaches the output instead of hiding.
__device__ __forceinline__ uint64_t make_key(double x) {
  if (x != x) return ~uint64_t{0};
  const uint64_t bits = uint64_t(__double_as_longlong(x + 0.0));  // + 0.0: +0 and -0 are equal
  return (bits >> 63) ? ~bits : bits | uint64_t{1} << 63;
}

// Shared memory of a row: scores, keys and, with groups, a sum per group.
__host__ __device__ __forceinline__ int64_t doubles_per_row(const MoeRouteArgs& a) {
  return 2 * a.num_experts + (a.num_groups > 1 ? a.num_groups : 0);
}

__device__ __forceinline__ double lane_sum(double x) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(kAllLanes, x, offset);
  return x;
}

__device__ void fill_scores(const MoeRouteArgs& a, const float* logits, double* scores, int lane) {
  if (a.scoring == kSigmoid) {
#pragma unroll 4
    for (int e = lane; e < a.num_experts; e += kWarp) scores[e] = 1.0 / (1.0 + exp(-double(logits[e])));
    return;
  }
  float largest = -INFINITY;
  for (int e = lane; e < a.num_experts; e += kWarp) largest = fmaxf(largest, logits[e]);
  largest = warp_max(largest);
  double sum = 0.0;
#pragma unroll 4
  for (int e = lane; e < a.num_experts; e += kWarp) sum += scores[e] = exp(double(logits[e]) - double(largest));
  sum = lane_sum(sum);
  for (int e = lane; e < a.num_experts; e += kWarp) scores[e] /= sum;
}

// The lane's best key and its lowest id.
struct Best {
  uint64_t key = kTaken;
  int id = 0x7fffffff;

  __device__ __forceinline__ void scan(const uint64_t* keys, int num_experts, int lane) {
    key = kTaken;
    id = 0x7fffffff;
#pragma unroll 4
    for (int e = lane; e < num_experts; e += kWarp)
      if (keys[e] > key) key = keys[e], id = e;
  }
};

// Marks the top_k experts as taken: of the largest keys the lowest id, top_k times.
__device__ void choose(uint64_t* keys, int num_experts, int top_k, int lane) {
  Best best;
  best.scan(keys, num_experts, lane);
  for (int chosen = 0; chosen < top_k; ++chosen) {
    const uint32_t high = uint32_t(best.key >> 32), most = __reduce_max_sync(kAllLanes, high);
    const uint32_t low = high == most ? uint32_t(best.key) : 0, most_low = __reduce_max_sync(kAllLanes, low);
    const bool equal = high == most && low == most_low;
    const uint32_t id = __reduce_min_sync(kAllLanes, equal ? uint32_t(best.id) : kAllLanes);
    if (uint32_t(best.id) == id) {
      keys[id] = kTaken;
      best.scan(keys, num_experts, lane);
    }
  }
}

__device__ __forceinline__ double choice_score(const MoeRouteArgs& a, const double* scores, int e) {
  const double score = a.bias ? scores[e] + double(a.bias[e]) : scores[e];
  return score != score ? INFINITY : score;
}

// Marks the experts as taken whose group does not take part: at least topk_groups groups have a larger sum of their two
// best scores, or an equal one and a lower number.
__device__ void mask_groups(const MoeRouteArgs& a, const double* scores, double* sums, uint64_t* keys, int lane) {
  const int num_groups = int(a.num_groups), size = int(a.num_experts) / num_groups;
  for (int g = lane; g < num_groups; g += kWarp) {
    double first = -INFINITY, second = -INFINITY;
    for (int e = g * size; e < (g + 1) * size; ++e) {
      const double score = choice_score(a, scores, e);
      second = fmax(second, fmin(first, score));
      first = fmax(first, score);
    }
    sums[g] = first + second;
  }
  __syncwarp();
  for (int g = lane; g < num_groups; g += kWarp) {
    int num_better = 0;
    for (int other = 0; other < num_groups; ++other)
      num_better += sums[other] > sums[g] || (sums[other] == sums[g] && other < g);
    if (num_better >= a.topk_groups)
      for (int e = g * size; e < (g + 1) * size; ++e) keys[e] = kAside;
  }
  __syncwarp();
}

__global__ void moe_route_kernel(MoeRouteArgs a) {
  extern __shared__ double shared[];
  wait_for_previous_kernel();
  allow_next_kernel();
  const int lane = threadIdx.x % kWarp, num_experts = int(a.num_experts), top_k = int(a.top_k);
  const int64_t row = int64_t(blockIdx.x) * (blockDim.x / kWarp) + threadIdx.x / kWarp;
  if (row >= rows_in_use(a.num_rows_device, a.num_rows)) return;
  const bool has_groups = a.num_groups > 1;
  double* scores = shared + threadIdx.x / kWarp * doubles_per_row(a);
  uint64_t* keys = reinterpret_cast<uint64_t*>(scores + num_experts);
  fill_scores(a, a.logits + row * num_experts, scores, lane);
  for (int e = lane; e < num_experts; e += kWarp)
    keys[e] = make_key(a.bias ? scores[e] + double(a.bias[e]) : scores[e]);
  __syncwarp();
  if (has_groups) mask_groups(a, scores, scores + 2 * num_experts, keys, lane);
  choose(keys, num_experts, top_k, lane);
  __syncwarp();
  int32_t* expert_id = a.expert_id + row * top_k;
  float* weight = a.weight + row * top_k;
  double sum = 0.0;
  for (int e = lane; e < num_experts; e += kWarp)
    if (keys[e] == kTaken) sum += scores[e];
  sum = lane_sum(sum) + 1e-20;
  for (int first = 0, slot = 0; first < num_experts; first += kWarp) {
    const int e = first + lane;
    const bool taken = e < num_experts && keys[e] == kTaken;
    const uint32_t mask = __ballot_sync(kAllLanes, taken);
    if (taken) {
      const int at = slot + __popc(mask & ((1u << lane) - 1));
      expert_id[at] = e;
      weight[at] = float((a.renormalize ? scores[e] / sum : scores[e]) * double(a.scaling_factor));
    }
    slot += __popc(mask);
  }
}

}  // namespace

int moe_route_cuda(const MoeRouteArgs& a, void* stream) {
  if (a.top_k < 1 || a.top_k > a.num_experts) return kUnsupported;
  if (a.scoring != kSoftmax && a.scoring != kSigmoid) return kUnsupported;
  if (!groups_are_valid(a)) return kUnsupported;
  const int64_t row_bytes = doubles_per_row(a) * int64_t(sizeof(double));
  int64_t rows_per_block = kMaxRowsPerBlock;
  while (rows_per_block > 1 && rows_per_block * row_bytes > 48 * 1024) rows_per_block /= 2;
  if (rows_per_block * row_bytes > kMaxSharedBytes) return kUnsupported;
  if (a.num_rows == 0) return kOk;
  const LaunchShape shape{dim3(ceil_div(a.num_rows, rows_per_block)), dim3(rows_per_block * kWarp),
                          size_t(rows_per_block * row_bytes), 1, Start::kEarly};
  return launch(moe_route_kernel, shape, stream, a);
}

}  // namespace kdtree
