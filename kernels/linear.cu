// linear and pack_linear on CUDA. The arithmetic is in linear_tile.cuh; here: the packed layout, and which tile shape serves
// how many rows. Any shape gives the same bits, so the choice is free; tests run them all against each other.
#include "linear.cuh"

#include <algorithm>

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
// blocks of a multiprocessor. The number in a name is the rows of a block. The fastest of 46 tried on an H200, six weight
// shapes, 1 to 64 rows: within 5 % of the best of all in most cells.
enum Bf16Shape : int {
  k8, k8Wide, k8Short, k16, k16Wide, k16Pair, k16Short, k32, k32Quad, k64, k64Quad, k64Octo, k128, kNumBf16Shapes
};
constexpr LinearShape kBf16Shapes[kNumBf16Shapes] = {
    KDTREE_SHAPE(Bf16, 8, 1, 1, 1, 1, 2, 1, 1, 2),  // k8: 16 outputs, a warp a segment
    KDTREE_SHAPE(Bf16, 8, 1, 1, 2, 1, 1, 1, 1, 2),  // k8Wide: 32 outputs, x is read half as often
    KDTREE_SHAPE(Bf16, 1, 9, 1, 1, 1, 2, 8, 1, 1),  // k8Short: K of a few units
    KDTREE_SHAPE(Bf16, 8, 1, 1, 1, 2, 1, 1, 1, 2),  // k16
    KDTREE_SHAPE(Bf16, 8, 1, 1, 2, 2, 1, 1, 1, 2),  // k16Wide
    KDTREE_SHAPE(Bf16, 4, 2, 1, 1, 2, 2, 1, 2, 2),  // k16Pair: two blocks share 32 outputs
    KDTREE_SHAPE(Bf16, 8, 1, 1, 4, 2, 1, 1, 1, 2),  // k16Short
    KDTREE_SHAPE(Bf16, 8, 1, 1, 2, 4, 1, 1, 1, 2),  // k32
    KDTREE_SHAPE(Bf16, 2, 4, 1, 1, 4, 2, 1, 4, 2),  // k32Quad: four blocks share 64 outputs
    KDTREE_SHAPE(Bf16, 1, 4, 2, 2, 4, 2, 8, 1, 2),  // k64: 128 outputs, all segments in sequence
    KDTREE_SHAPE(Bf16, 1, 4, 2, 2, 4, 2, 2, 4, 2),  // k64Quad
    KDTREE_SHAPE(Bf16, 1, 2, 2, 4, 4, 2, 1, 8, 1),  // k64Octo: eight blocks, 64 x 32 a warp
    KDTREE_SHAPE(Bf16, 1, 2, 4, 4, 4, 2, 8, 1, 1),  // k128: prefill
};
enum F32Shape : int { kF8, kF16, kF32Alone, kF32Pair, kF64, kNumF32Shapes };
constexpr LinearShape kF32Shapes[kNumF32Shapes] = {
    KDTREE_SHAPE(float, 8, 1, 1, 1, 1, 1, 1, 1, 2), KDTREE_SHAPE(float, 8, 1, 1, 1, 2, 1, 1, 1, 2),
    KDTREE_SHAPE(float, 4, 2, 1, 1, 4, 1, 2, 1, 2), KDTREE_SHAPE(float, 4, 2, 1, 1, 4, 1, 1, 2, 2),
    KDTREE_SHAPE(float, 2, 4, 1, 2, 8, 1, 4, 1, 1),
};

int64_t num_blocks(const LinearArgs& a, const LinearShape& shape) {
  return ceil_div(a.num_out, shape.num_out) * shape.cluster * a.num_groups * ceil_div(a.num_rows, shape.num_rows);
}

// Measured, not derived: see the enumeration. Clusters pay where N is too small to fill the chip and K is long.
int choose_bf16(const LinearArgs& a, const LinearDevice& device) {
  const int64_t m = a.num_rows, k = a.num_in, wide = ceil_div(a.num_out, 32) * a.num_groups;  // blocks of 32 outputs
  const bool fills = 10 * wide >= 8 * device.num_multiprocessors, is_short = k <= 256 && a.num_groups > 1;
  if (m <= 8) return is_short ? k8Short : fills ? k8Wide : k8;
  if (m <= 16) return is_short ? k16Short : fills ? k16Wide : device.clusters ? k16Pair : k16;
  if (m <= 32) return is_short ? k16Short : (fills && k < 4096) || !device.clusters ? k32 : k32Quad;
  const int64_t blocks = num_blocks(a, kBf16Shapes[k128]), waves = ceil_div(blocks, device.num_multiprocessors);
  if (m > 64 && 4 * blocks >= 3 * waves * device.num_multiprocessors) return k128;
  if (is_short) return k64;
  if (!device.clusters) return a.num_out >= 64 * device.num_multiprocessors ? k64 : k32;
  if (k <= 1024) return k32;
  return fills && k <= 8192 && (k < 4096 || a.num_out < 12288 || m > 64) ? k64Quad : k64Octo;
}

int choose_f32(const LinearArgs& a, const LinearDevice& device) {
  if (a.num_rows <= 8) return kF8;
  if (a.num_rows <= 16) return kF16;
  return a.num_rows > 64 ? kF64 : device.clusters ? kF32Pair : kF32Alone;
}

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
         (a.residual == nullptr || a.out_dtype == a.dtype) && aligned(a.packed, 16) && a.num_out <= INT32_MAX / 2 && a.num_in <= INT32_MAX / 16;
}

}  // namespace

int num_linear_shapes(Dtype dtype) { return dtype == kF32 ? int(kNumF32Shapes) : int(kNumBf16Shapes); }

const LinearShape& linear_shape(Dtype dtype, int index) { return dtype == kF32 ? kF32Shapes[index] : kBf16Shapes[index]; }

int linear_cuda_with(const LinearArgs& a, int index, void* stream) {
  if (!valid(a) || index < 0 || index >= num_linear_shapes(a.dtype)) return kUnsupported;
  if (a.num_rows == 0 || a.num_groups == 0 || a.num_out == 0) return kOk;
  return linear_shape(a.dtype, index).run(tile_args(a), static_cast<int>(a.num_groups), stream);
}

int choose_linear_shape(const LinearArgs& a, const LinearDevice& device) {
  return a.dtype == kF32 ? choose_f32(a, device) : choose_bf16(a, device);
}

bool reads_weights_early(const LinearArgs& a, const LinearShape& shape, const LinearDevice& device) {
  return a.weights_settled && a.dtype == kBF16 && 10 * num_blocks(a, shape) >= 9 * device.num_multiprocessors;
}

int linear_device(LinearDevice* out) {
  int device = 0, major = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return kCudaError;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess) return kCudaError;
  out->clusters = major < 12;  // clusters were never run on sm_120
  const cudaError_t error = cudaDeviceGetAttribute(&out->num_multiprocessors, cudaDevAttrMultiProcessorCount, device);
  return error == cudaSuccess ? kOk : kCudaError;
}

int linear_cuda(const LinearArgs& a, void* stream) {
  if (!valid(a)) return kUnsupported;
  LinearDevice device;
  if (int status = linear_device(&device)) return status;
  const int shape = choose_linear_shape(a, device);
  LinearArgs chosen = a;
  chosen.weights_settled = reads_weights_early(a, linear_shape(a.dtype, shape), device);
  return linear_cuda_with(chosen, shape, stream);
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
