// dequantize_int4 on CUDA: one thread writes 16 bytes of the packed layout; groups (experts) that nobody wants are skipped.
#include "dequantize_int4.h"

#include "cuda_rows.cuh"
#include "packed_layout.cuh"

namespace kdtree {
namespace {

constexpr int kThreads = 256;

// Whether a group is among the ids in use. All threads of the block ask.
__device__ bool is_wanted(const DequantizeInt4Args& a, int group) {
  if (a.group_id == nullptr) return true;
  int64_t num_ids = a.num_ids;
  if (a.num_rows_device) num_ids = min(num_ids, int64_t(max(*a.num_rows_device, 0)) * a.ids_per_row);
  bool found = false;
  for (int64_t i = threadIdx.x; i < num_ids; i += kThreads) found |= a.group_id[i] == group;
  return __syncthreads_or(found);
}

template <class Float, class Scale>
__global__ void __launch_bounds__(kThreads) dequantize_int4_kernel(DequantizeInt4Args a, int64_t vectors_per_group) {
  wait_for_previous_kernel();
  allow_next_kernel();
  using Layout = PackedLayout<Float>;
  const int64_t group = blockIdx.y;
  if (!is_wanted(a, int(group))) return;
  const int64_t num_words = a.num_in / kInt4PerWord, num_scales = a.num_in / a.group_size;
  const int64_t num_units = (a.num_in + Layout::kUnit - 1) / Layout::kUnit;
  uint4* packed = static_cast<uint4*>(a.packed) + group * vectors_per_group;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < vectors_per_group;
       i += int64_t{kThreads} * gridDim.x) {
    const int64_t block = i / Layout::kVectors, unit = block % num_units, tile = block / num_units;
    alignas(16) Float value[Layout::kWidth];
#pragma unroll
    for (int e = 0; e < Layout::kWidth; ++e) {
      const int64_t n = tile * Layout::kOutTile + Layout::out(i % Layout::kVectors, e);
      const int64_t k = unit * Layout::kUnit + Layout::in(i % Layout::kVectors, e);
      float x = 0.0f;
      if (n < a.num_out && k < a.num_in) {
        const int64_t row = group * a.num_out + n;
        x = float(int4_at(a.weight + row * num_words, k)) *
            to_float(static_cast<const Scale*>(a.scale)[row * num_scales + k / a.group_size]);
      }
      value[e] = from_float<Float>(x);
    }
    packed[i] = *reinterpret_cast<const uint4*>(value);
  }
}

template <class Float, class Scale>
int launch_for(const DequantizeInt4Args& a, void* stream) {
  using Layout = PackedLayout<Float>;
  const int64_t vectors = ceil_div(a.num_out, Layout::kOutTile) * ceil_div(a.num_in, Layout::kUnit) * Layout::kVectors;
  if (vectors == 0 || a.num_groups == 0) return kOk;
  if (a.num_groups > 65535) return kUnsupported;  // the limit of grid.y
  const unsigned blocks = unsigned(std::min<int64_t>(ceil_div(vectors, kThreads), 1024));
  return launch(dequantize_int4_kernel<Float, Scale>, {dim3(blocks, unsigned(a.num_groups)), dim3(kThreads), 0, 1, Start::kEarly},
                stream, a, vectors);
}

}  // namespace

int dequantize_int4_cuda(const DequantizeInt4Args& a, void* stream) {
  if (a.group_size < 1 || a.group_size % kInt4PerWord || a.num_in % a.group_size) return kUnsupported;
  if (a.out_dtype == kF32)
    return a.dtype == kF32 ? launch_for<float, float>(a, stream) : launch_for<float, __nv_bfloat16>(a, stream);
  return a.dtype == kF32 ? launch_for<__nv_bfloat16, float>(a, stream)
                               : launch_for<__nv_bfloat16, __nv_bfloat16>(a, stream);
}

}  // namespace kdtree
