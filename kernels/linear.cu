// linear and pack_linear on CUDA. The arithmetic is in linear_tile.cuh; here: the packed layout, and which tile shape serves
// how many rows. Any shape gives the same bits, so the choice is free; tests run them all against each other.
#include "linear.cuh"

#include <iterator>

#include "linear_tile.cuh"

namespace kdtree {
namespace {

using Bf16 = __nv_bfloat16;

// --- pack ------------------------------------------------------------------------------------------------------------

template <class T>
__global__ void pack_linear_kernel(const T* weight, T* packed, int64_t num_vectors, int num_out, int num_in) {
  constexpr int kWidth = 16 / sizeof(T), kVectors = kUnit * kOutTile / kWidth;  // of one 16 x 32 block
  const int64_t num_tiles = (num_out + kOutTile - 1) / kOutTile, num_units = (num_in + kUnit - 1) / kUnit;
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < num_vectors; i += gridDim.x * int64_t(blockDim.x)) {
    const int v = i % kVectors, lane = v % kWarp;
    const int64_t block = i / kVectors, unit = block % num_units, tile = block / num_units % num_tiles;
    const T* w = weight + block / num_units / num_tiles * num_out * num_in;
    union { T value[kWidth]; uint4 bits; } result;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      const int out = sizeof(T) == 4 ? v % 4 * 4 + e : lane / 4 + e / 2 % 2 * 8;
      const int in = sizeof(T) == 4 ? v / 4 : lane % 4 * 8 + v / kWarp * 4 + e / 4 * 2 + e % 2;
      const int64_t n = tile * kOutTile + out, k = unit * kUnit + in;
      result.value[e] = n < num_out && k < num_in ? w[n * num_in + k] : from_float<T>(0.f);
    }
    reinterpret_cast<uint4*>(packed)[i] = result.bits;
  }
}

// --- tile shapes -----------------------------------------------------------------------------------------------------

template <class T, int... Numbers>
constexpr LinearShape describe(const char* name) {
  using S = TileShape<T, Numbers...>;
  return {name, S::kBlockRows, S::kBlockOut, S::kCluster, launch_tile<S>};
}
#define KDTREE_SHAPE(T, ...) describe<T, __VA_ARGS__>(#__VA_ARGS__)

// Warps over segments, outputs, rows; 16-output and 8-row tiles of a warp; units of a stage; segments in sequence; cluster;
// blocks of a multiprocessor.
constexpr LinearShape kBf16Shapes[] = {
#include "linear_shapes.inc"
};
constexpr LinearShape kF32Shapes[] = {
    KDTREE_SHAPE(float, 8, 1, 1, 1, 1, 1, 1, 1, 2),
    KDTREE_SHAPE(float, 8, 1, 1, 1, 2, 1, 1, 1, 2),
    KDTREE_SHAPE(float, 4, 2, 1, 1, 4, 1, 1, 2, 2),
    KDTREE_SHAPE(float, 4, 2, 1, 1, 4, 1, 2, 1, 2),
    KDTREE_SHAPE(float, 2, 4, 1, 1, 8, 1, 4, 1, 1),
    KDTREE_SHAPE(float, 2, 4, 1, 2, 8, 1, 4, 1, 1),
};

bool aligned(const void* p, int64_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

TileArgs tile_args(const LinearArgs& a) {
  const int64_t size = a.dtype == kF32 ? 4 : 2, out_size = a.out_dtype == kF32 ? 4 : 2;
  TileArgs t = {};
  t.x = a.x, t.packed = a.packed, t.residual = a.residual, t.out = a.out;
  t.x_row_stride = a.x_row_stride, t.x_group_stride = a.x_group_stride;
  t.out_row_stride = a.num_groups * a.num_out, t.out_group_stride = a.num_out;
  t.num_rows = a.num_rows, t.num_rows_device = a.num_rows_device;
  t.num_out = static_cast<int>(a.num_out), t.num_in = static_cast<int>(a.num_in);
  t.x_aligned = aligned(a.x, 16) && a.x_row_stride * size % 16 == 0 && (a.num_groups == 1 || a.x_group_stride * size % 16 == 0);
  t.out_aligned = a.num_out % 4 == 0 && aligned(a.out, 4 * out_size) && aligned(a.residual, 4 * out_size);
  t.out_f32 = a.out_dtype == kF32;
  t.weights_settled = a.weights_settled;
  return t;
}

bool valid(const LinearArgs& a) {
  return (a.dtype == kF32 || a.dtype == kBF16) && (a.out_dtype == a.dtype || a.out_dtype == kF32) &&
         (a.residual == nullptr || a.out_dtype == a.dtype) && a.num_out <= INT32_MAX / 2 && a.num_in <= INT32_MAX / 16;
}

}  // namespace

int num_linear_shapes(Dtype dtype) { return dtype == kF32 ? std::size(kF32Shapes) : std::size(kBf16Shapes); }

const LinearShape& linear_shape(Dtype dtype, int index) { return dtype == kF32 ? kF32Shapes[index] : kBf16Shapes[index]; }

int linear_cuda_with(const LinearArgs& a, int index, void* stream) {
  if (!valid(a) || index < 0 || index >= num_linear_shapes(a.dtype)) return kUnsupported;
  if (a.num_rows == 0 || a.num_groups == 0 || a.num_out == 0) return kOk;
  return linear_shape(a.dtype, index).run(tile_args(a), static_cast<int>(a.num_groups), stream);
}

int choose_linear_shape(const LinearArgs& a, bool clusters) {
  const int64_t m = a.num_rows;
  if (a.dtype == kF32) return m <= 8 ? 0 : m <= 16 ? 1 : m <= 64 ? (clusters ? 2 : 3) : 4;
  if (m <= 8) return 0;
  if (m <= 16) return clusters ? 5 : 6;
  if (m <= 32) return clusters ? 11 : 19;
  if (m <= 64) return clusters ? 21 : 23;
  return 37;
}

int linear_cuda(const LinearArgs& a, void* stream) {
  int device = 0, major = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return kCudaError;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess) return kCudaError;
  return linear_cuda_with(a, choose_linear_shape(a, major < 12), stream);
}

int pack_linear_cuda(const PackLinearArgs& a, void* stream) {
  return with_dtype(a.dtype, [&](auto zero) {
    using T = decltype(zero);
    const int64_t num_vectors = a.num_groups * ceil_div(a.num_out, kOutTile) * ceil_div(a.num_in, kUnit) * kUnit * kOutTile *
                                static_cast<int64_t>(sizeof(T)) / 16;
    if (num_vectors == 0) return static_cast<int>(kOk);
    LaunchShape shape;
    shape.block = dim3(256);
    shape.grid = dim3(static_cast<unsigned>(std::min<int64_t>(ceil_div(num_vectors, 256), 1 << 20)));
    return launch(pack_linear_kernel<T>, shape, stream, static_cast<const T*>(a.weight), static_cast<T*>(a.packed), num_vectors,
                  static_cast<int>(a.num_out), static_cast<int>(a.num_in));
  });
}

}  // namespace kdtree
