// moe_route: scores of all experts, the top_k of score + bias (equal: lower id), their weights in ascending id. One warp a
// row. Scores are FP64, so that rounding hides no difference between two logits; weights are rounded once, at the end.
#include "cuda_rows.cuh"

namespace kdtree {
namespace {

constexpr int kMaxRowsPerBlock = 4;

struct Choice {
  double key;
  int id;
};

// The larger key, then the lower id; a NaN key marks an expert already taken.
__device__ __forceinline__ bool is_better(const Choice& a, const Choice& b) {
  return a.key > b.key || (a.key == b.key && a.id < b.id);
}

__device__ __forceinline__ double lane_sum(double x) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

__device__ void fill_scores(const MoeRouteArgs& a, const float* logits, double* scores, int lane) {
  if (a.scoring == kSigmoid) {
    for (int e = lane; e < a.num_experts; e += kWarp) scores[e] = 1.0 / (1.0 + exp(-double(logits[e])));
    return;
  }
  float largest = -INFINITY;
  for (int e = lane; e < a.num_experts; e += kWarp) largest = fmaxf(largest, logits[e]);
  largest = warp_max(largest);
  double sum = 0.0;
  for (int e = lane; e < a.num_experts; e += kWarp) sum += scores[e] = exp(double(logits[e]) - double(largest));
  sum = lane_sum(sum);
  for (int e = lane; e < a.num_experts; e += kWarp) scores[e] /= sum;
}

// Marks the top_k experts by making their key NaN.
__device__ void choose(const MoeRouteArgs& a, double* keys, int lane) {
  for (int chosen = 0; chosen < a.top_k; ++chosen) {
    Choice best{-INFINITY, 0x7fffffff};
    for (int e = lane; e < a.num_experts; e += kWarp)
      if (is_better({keys[e], e}, best)) best = {keys[e], e};
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      const Choice other{__shfl_xor_sync(0xffffffffu, best.key, offset), __shfl_xor_sync(0xffffffffu, best.id, offset)};
      if (is_better(other, best)) best = other;
    }
    if (best.id < a.num_experts && best.id % kWarp == lane) keys[best.id] = NAN;
  }
}

__global__ void moe_route_kernel(MoeRouteArgs a) {
  extern __shared__ double shared[];
  wait_for_previous_kernel();
  allow_next_kernel();
  const int lane = threadIdx.x % kWarp;
  const int64_t row = int64_t(blockIdx.x) * (blockDim.x / kWarp) + threadIdx.x / kWarp;
  if (row >= rows_in_use(a.num_rows_device, a.num_rows)) return;
  double* scores = shared + threadIdx.x / kWarp * 2 * a.num_experts;
  double* keys = scores + a.num_experts;
  fill_scores(a, a.logits + row * a.num_experts, scores, lane);
  for (int e = lane; e < a.num_experts; e += kWarp) {
    const double key = a.bias ? scores[e] + double(a.bias[e]) : scores[e];
    keys[e] = key != key ? double(INFINITY) : key;  // NaN is chosen first, so that it reaches the output instead of hiding
  }
  choose(a, keys, lane);
  __syncwarp();
  int32_t* expert_id = a.expert_id + row * a.top_k;
  float* weight = a.weight + row * a.top_k;
  double sum = 1e-20;
  for (int e = 0; e < a.num_experts && a.renormalize; ++e)
    if (keys[e] != keys[e]) sum += scores[e];
  for (int first = 0, slot = 0; first < a.num_experts; first += kWarp) {
    const int e = first + lane;
    const bool taken = e < a.num_experts && keys[e] != keys[e];
    const uint32_t mask = __ballot_sync(0xffffffffu, taken);
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
  const int64_t row_bytes = 2 * a.num_experts * int64_t(sizeof(double));
  int64_t rows_per_block = kMaxRowsPerBlock;
  while (rows_per_block > 1 && rows_per_block * row_bytes > 48 * 1024) rows_per_block /= 2;
  if (rows_per_block * row_bytes > kMaxSharedBytes) return kUnsupported;
  if (a.num_rows == 0) return kOk;
  const LaunchShape shape{dim3(ceil_div(a.num_rows, rows_per_block)), dim3(rows_per_block * kWarp),
                          size_t(rows_per_block * row_bytes), 1, true};
  return launch(moe_route_kernel, shape, stream, a);
}

}  // namespace kdtree
