// The last kernel of moe_experts: adds the segment sums of a row's experts, weighted, in the order of op_args.h.
#pragma once
#include "cuda_common.cuh"
#include "segments.h"

namespace kdtree {

constexpr int kCombineThreads = 128, kCombineFewThreads = 64;
constexpr int64_t kFewOutputs = 16 * 7168;  // too few for wide vectors to fill the device
constexpr int kExpertsAtOnce = 8;   // whose sums are read together

struct CombineArgs {
  const float* partials;         // [pairs, 8, D], or nullptr where no width is summed here
  const float* shared_partials;  // [rows, 8, D] or nullptr
  const int32_t* expert_id;
  const float* weight;
  const void* residual;
  void* out;
  const int32_t* num_rows_device;
  int64_t num_rows, row_begin;
  int dim, top_k, num_experts;
  int first_segment, end_segment;  // that are summed here; others count as -0, which changes no sum
  bool out_f32;
  // Bit by segment: those that are not empty, of partials and of shared_partials. The sum of an empty one is +0 and lies nowhere.
  unsigned in_use, shared_in_use;

  __device__ bool mine(int s) const { return s >= first_segment && s < end_segment; }
};

// The tree over the segments, one rounding, then the residual.
template <class T>
__device__ __forceinline__ void store_sum(const CombineArgs& a, const float (&sum)[kNumSegments], bool valid, int64_t at) {
  const float total = ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
  const float checked = valid ? total : __int_as_float(0x7fffffff);  // an expert that does not exist gives NaN
  if (a.out_f32) {
    static_cast<float*>(a.out)[at] = checked;
    return;
  }
  const T* residual = static_cast<const T*>(a.residual);
  T out = from_float<T>(checked);
  if (residual) out = from_float<T>(to_float(out) + to_float(residual[at]));
  static_cast<T*>(a.out)[at] = out;
}

// --- many rows -------------------------------------------------------------------------------------------------------

template <int kWidth>
__device__ __forceinline__ void add_segments(const CombineArgs& a, const float* partials, unsigned in_use, float weight,
                                             float (&sum)[kWidth][kNumSegments]) {
  struct alignas(kWidth * 4) Vector { float value[kWidth]; } v[kNumSegments];
  const int64_t dim = a.dim;
#pragma unroll
  for (int s = 0; s < kNumSegments; ++s)
    if (a.mine(s)) v[s] = in_use >> s & 1 ? *reinterpret_cast<const Vector*>(partials + s * dim) : Vector{};
#pragma unroll
  for (int s = 0; s < kNumSegments; ++s)
    if (a.mine(s))
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sum[i][s] = fmaf(weight, v[s].value[i], sum[i][s]);
}

// A thread has kWidth neighbouring outputs and reads one expert after the other.
template <class T, int kWidth>
__global__ void __launch_bounds__(kCombineThreads, 4) combine_kernel(CombineArgs a) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const int64_t row = blockIdx.x, d = (int64_t(blockIdx.y) * kCombineThreads + threadIdx.x) * kWidth, dim = a.dim;
  if (row >= rows_in_use(a.num_rows_device, a.num_rows, a.row_begin) || d >= dim) return;
  float sum[kWidth][kNumSegments];
#pragma unroll
  for (int i = 0; i < kWidth; ++i)
#pragma unroll
    for (int s = 0; s < kNumSegments; ++s) sum[i][s] = a.mine(s) ? 0.f : -0.f;
  bool valid = true;
#pragma unroll 1
  for (int k = 0; k < a.top_k; ++k) {
    const int64_t pair = row * a.top_k + k;
    const int id = a.expert_id[pair];
    if (id < 0 || id >= a.num_experts) valid = false;
    else if (a.partials) add_segments<kWidth>(a, a.partials + pair * kNumSegments * dim + d, a.in_use, a.weight[pair], sum);
  }
  if (a.shared_partials) add_segments<kWidth>(a, a.shared_partials + row * kNumSegments * dim + d, a.shared_in_use, 1.0f, sum);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) store_sum<T>(a, sum[i], valid, row * dim + d + i);
}

// --- few rows --------------------------------------------------------------------------------------------------------

// Of one output the segment sums of an expert.
__device__ __forceinline__ void load_segments(const CombineArgs& a, const float* partials, unsigned in_use,
                                              float (&v)[kNumSegments]) {
#pragma unroll
  for (int s = 0; s < kNumSegments; ++s) {
    v[s] = 0.f;
    if (a.mine(s) && (in_use >> s & 1)) v[s] = partials[int64_t(s) * a.dim];
  }
}

__device__ __forceinline__ void add_segments(const CombineArgs& a, const float (&v)[kNumSegments], float weight,
                                             float (&sum)[kNumSegments]) {
#pragma unroll
  for (int s = 0; s < kNumSegments; ++s)
    if (a.mine(s)) sum[s] = fmaf(weight, v[s], sum[s]);
}

// A thread has one output and reads the sums of all experts at once: all it waits for is one read of memory. The sums of an
// expert that does not exist are read as well, and are what they may: the result is NaN.
template <class T>
__global__ void __launch_bounds__(kCombineFewThreads, 8) combine_few_kernel(CombineArgs a) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const int64_t row = blockIdx.x, d = int64_t(blockIdx.y) * kCombineFewThreads + threadIdx.x, dim = a.dim;
  if (row >= rows_in_use(a.num_rows_device, a.num_rows, a.row_begin) || d >= dim) return;
  const int64_t expert_stride = kNumSegments * dim;
  float sum[kNumSegments], shared[kNumSegments];
#pragma unroll
  for (int s = 0; s < kNumSegments; ++s) sum[s] = a.mine(s) ? 0.f : -0.f;
  if (a.shared_partials) load_segments(a, a.shared_partials + row * expert_stride + d, a.shared_in_use, shared);
  bool valid = true;
#pragma unroll 1
  for (int begin = 0; begin < a.top_k; begin += kExpertsAtOnce) {
    float v[kExpertsAtOnce][kNumSegments], weight[kExpertsAtOnce];
    const int64_t first = row * a.top_k + begin;
    const int count = a.top_k - begin;
#pragma unroll
    for (int k = 0; k < kExpertsAtOnce; ++k) {
      if (k >= count) continue;
      const int id = a.expert_id[first + k];
      weight[k] = a.weight[first + k];
      if (a.partials) load_segments(a, a.partials + (first + k) * expert_stride + d, a.in_use, v[k]);
      valid = valid && id >= 0 && id < a.num_experts;
    }
#pragma unroll
    for (int k = 0; k < kExpertsAtOnce; ++k)
      if (k < count && a.partials) add_segments(a, v[k], weight[k], sum);
  }
  if (a.shared_partials) add_segments(a, shared, 1.0f, sum);
  store_sum<T>(a, sum, valid, row * dim + d);
}

// --- host ------------------------------------------------------------------------------------------------------------

template <class T>
int combine_experts(const CombineArgs& a, void* stream) {
  const bool few = a.num_rows * a.dim <= kFewOutputs;
  const int width = !few && a.dim % 4 == 0 ? 4 : 1, threads = few ? kCombineFewThreads : kCombineThreads;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(a.num_rows), static_cast<unsigned>(ceil_div(a.dim, threads * width)));
  shape.block = dim3(threads), shape.start = Start::kEarly;
  if (few) return launch(combine_few_kernel<T>, shape, stream, a);
  return launch(width == 4 ? combine_kernel<T, 4> : combine_kernel<T, 1>, shape, stream, a);
}

}  // namespace kdtree
