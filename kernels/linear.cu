// linear and pack_linear on CUDA. The arithmetic is in linear_tile.cuh; here: the packed layout, and which tile shape serves
// how many rows. Any shape gives the same bits, so the choice is free; tests run them all against each other.
#include "linear.cuh"
#include "packed_layout.cuh"

#include <algorithm>

#include "linear_direct.cuh"
#include "linear_wide.cuh"

namespace kdtree {
namespace {

using Bf16 = __nv_bfloat16;

// --- pack ------------------------------------------------------------------------------------------------------------

template <class T>
__global__ void pack_linear_kernel(const T* weight, T* packed, int64_t num_vectors, int num_out, int num_in) {
  using Layout = PackedLayout<T>;
  const int64_t num_tiles = (num_out + kOutTile - 1) / kOutTile, num_units = (num_in + kUnit - 1) / kUnit;
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < num_vectors; i += gridDim.x * int64_t(blockDim.x)) {
    const int v = i % Layout::kVectors;
    const int64_t block = i / Layout::kVectors, unit = block % num_units, tile = block / num_units % num_tiles;
    const T* w = weight + block / num_units / num_tiles * num_out * num_in;
    union { T value[Layout::kWidth]; uint4 bits; } result;
#pragma unroll
    for (int e = 0; e < Layout::kWidth; ++e) {
      const int64_t n = tile * kOutTile + Layout::out(v, e), k = unit * kUnit + Layout::in(v, e);
      result.value[e] = n < num_out && k < num_in ? w[n * num_in + k] : from_float<T>(0.f);
    }
    reinterpret_cast<uint4*>(packed)[i] = result.bits;
  }
}

// --- tile shapes -----------------------------------------------------------------------------------------------------

template <class T, int... Numbers>
constexpr LinearShape describe(const char* name) {
  using S = TileShape<T, Numbers...>;
  return {name, S::kBlockRows, S::kBlockOut, S::kCluster, false, false, launch_tile<S>};
}
template <int... Numbers>
constexpr LinearShape describe_wide(const char* name) {
  using S = WideShape<Numbers...>;
  return {name, S::kBlockRows, S::kBlockOut, S::kSplit, true, false, launch_wide<S>};
}
template <int... Numbers>
constexpr LinearShape describe_direct(const char* name) {
  using S = DirectShape<Numbers...>;
  return {name, S::kBlockRows, S::kBlockOut, 1, false, true, launch_direct<S>};
}
#define KDTREE_SHAPE(T, ...) describe<T, __VA_ARGS__>(#__VA_ARGS__)
#define KDTREE_WIDE(...) describe_wide<__VA_ARGS__>("wide, " #__VA_ARGS__)
#define KDTREE_DIRECT(...) describe_direct<__VA_ARGS__>("direct, " #__VA_ARGS__)

// Warps over segments, outputs, rows; 16-output and 8-row tiles of a warp; units of a stage; segments in sequence; cluster;
// blocks of a multiprocessor. The number in a name is the rows of a block. The fastest of 46 tried on an H200.
enum Bf16Shape : int {
  k8, k8Wide, k8Short, k16, k16Wide, k16Short, k32, k64, k128,
  k8Clusters, k16Pairs, k16Clusters, k16ClustersWide,
  k8Share, k8ShareWide, k16Share, kFirstWide, kFirstDirect = kFirstWide + 11,
  kDirectLong = kFirstDirect, kDirect8, kDirect16, kDirect24, kDirect32, kNumBf16Shapes
};
constexpr LinearShape kBf16Shapes[kNumBf16Shapes] = {
    KDTREE_SHAPE(Bf16, 8, 1, 1, 1, 1, 2, 1, 1, 2),  // k8: 16 outputs, a warp a segment
    KDTREE_SHAPE(Bf16, 8, 1, 1, 2, 1, 1, 1, 1, 2),  // k8Wide: 32 outputs, x is read half as often
    KDTREE_SHAPE(Bf16, 1, 9, 1, 1, 1, 2, 8, 1, 1),  // k8Short: K of a few units
    KDTREE_SHAPE(Bf16, 8, 1, 1, 1, 2, 1, 1, 1, 2),  // k16
    KDTREE_SHAPE(Bf16, 8, 1, 1, 2, 2, 1, 1, 1, 2),  // k16Wide
    KDTREE_SHAPE(Bf16, 8, 1, 1, 4, 2, 1, 1, 1, 2),  // k16Short
    KDTREE_SHAPE(Bf16, 8, 1, 1, 2, 4, 1, 1, 1, 2),  // k32
    KDTREE_SHAPE(Bf16, 1, 4, 2, 2, 4, 2, 8, 1, 2),  // k64: 128 outputs, all segments in sequence
    KDTREE_SHAPE(Bf16, 1, 2, 4, 4, 4, 2, 8, 1, 1),  // k128: prefill
    // Few outputs: blocks of a cluster share the segments of a tile. A segment of 28 units (K = 7168) is on its way at once.
    KDTREE_SHAPE(Bf16, 1, 4, 1, 1, 1, 4, 1, 8, 2), KDTREE_SHAPE(Bf16, 4, 1, 1, 1, 2, 2, 1, 2, 2),
    KDTREE_SHAPE(Bf16, 2, 1, 1, 1, 2, 4, 1, 4, 2), KDTREE_SHAPE(Bf16, 2, 2, 1, 1, 2, 2, 1, 4, 2),
    // A share of one or two segments: all warps on the same one, or most would have none.
    KDTREE_SHAPE(Bf16, 1, 2, 1, 1, 1, 4, 8, 1, 2), KDTREE_SHAPE(Bf16, 1, 4, 1, 1, 1, 4, 8, 1, 2),
    KDTREE_SHAPE(Bf16, 1, 2, 1, 1, 2, 4, 8, 1, 2),
    // Hopper's; of two that are expected to be as fast the first is taken. Rows of a block; warpgroups over outputs; their
    // outputs; blocks that share a tile; blocks of a multiprocessor; KB of shared memory.
    KDTREE_WIDE(32, 1, 64, 1, 1, 227), KDTREE_WIDE(32, 1, 80, 4, 1, 227),
    KDTREE_WIDE(64, 1, 64, 1, 1, 227), KDTREE_WIDE(64, 2, 128, 1, 1, 227), KDTREE_WIDE(64, 2, 72, 1, 1, 227),
    KDTREE_WIDE(64, 2, 56, 2, 1, 227), KDTREE_WIDE(64, 1, 80, 4, 1, 227), KDTREE_WIDE(64, 2, 64, 8, 1, 227),
    KDTREE_WIDE(128, 1, 128, 1, 1, 227), KDTREE_WIDE(128, 1, 128, 2, 1, 227), KDTREE_WIDE(128, 1, 80, 4, 1, 227),
    // Without stages: 16-output and 8-row tiles of a warp; blocks of a multiprocessor.
    KDTREE_DIRECT(1, 1, 2), KDTREE_DIRECT(2, 1, 2), KDTREE_DIRECT(2, 2, 2), KDTREE_DIRECT(1, 3, 2), KDTREE_DIRECT(1, 4, 2),
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

// About how long a tile shape of Hopper takes. On an H200 a multiprocessor takes in 69 KB of weights and rows a microsecond,
// 35 KB of weights that nobody has read before; all of them together 4.15 MB; to begin and to end takes 2.2 us, 3.5 us where
// blocks share a tile, and 8 us more for each further wave of those. So predicted, the shape with the least was the fastest of
// those tried, or within 2 % of it, for all of 6 weight shapes x (16, 32, 64, 512, 2048) rows; at 128 rows within 10 %.
double wide_us(const LinearShape& shape, const LinearArgs& a, const LinearDevice& device) {
  const int num_places = shape.cluster <= 2 ? device.num_multiprocessors : device.num_multiprocessors * 10 / 11;
  const double waves = static_cast<double>(ceil_div(num_blocks(a, shape), num_places));
  const double rows = static_cast<double>(std::min<int64_t>(shape.num_rows, ceil_div(a.num_rows, 8) * 8));
  const int64_t num_segments = a.num_segments > 0 ? a.num_segments : kNumSegments;
  const double bytes_per_output = 2.0 * a.num_in / static_cast<double>(std::min<int64_t>(shape.cluster, num_segments));
  const double weight_bytes = waves * shape.num_out * bytes_per_output;
  const double all_us = 2.0 * a.num_in * a.num_out * a.num_groups / 4.15e6;
  const double weight_us = a.num_rows <= shape.num_rows ? weight_bytes / 35e3 : 0;
  const double block_us = (weight_bytes + waves * rows * bytes_per_output) / 69e3;
  return (shape.cluster == 1 ? 2.2 * waves : 3.5 + 8 * (waves - 1)) + std::max({all_us, weight_us, block_us});
}

int choose_wide(const LinearArgs& a, const LinearDevice& device) {
  int best = kFirstWide;
  double best_us = wide_us(kBf16Shapes[best], a, device);
  for (int i = kFirstWide + 1; i < kFirstDirect; ++i) {
    const double us = wide_us(kBf16Shapes[i], a, device);
    if (us < best_us) best = i, best_us = us;
  }
  return best;
}

constexpr int64_t kMaxRowsDirect = 136;

// The shape without stages for a small product, or -1: one of 5 MB of weights at most (4 MB with more than 8 rows, 1 MB with more
// than 64), and of kMaxRowsDirect rows, more than 72 only where all blocks of 8 rows run at once. On an H200 it takes 1.5-2 us
// where stages take 3-4.6 us; of more weights as long or longer. 72 rows: 320 to 1408 2.7 us, where stages take 5.4; 320 to 4096
// 7.1, stages 5.6. 73 rows: 320 to 208 1.8 us, stages 4.7; more rows have not been measured. Two tiles of outputs for each x that is
// read were the fastest, except where that leaves a long K to few blocks; more rows of a block where 8 would need more blocks than
// run at once. 65 to 72 rows, a tree of 64 nodes and its root: blocks of 24 are as many as of 32 and are filled.
int choose_direct(const LinearArgs& a, const LinearDevice& device) {
  const int64_t m = a.num_rows, k = a.num_in, tiles = ceil_div(a.num_out, kOutTile) * a.num_groups;
  const int64_t most = m <= 8 ? 5 << 20 : m <= 64 ? 4 << 20 : 1 << 20;
  if (m > kMaxRowsDirect || 2 * k * a.num_out * a.num_groups > most) return -1;
  if (!serves(kBf16Shapes[kFirstDirect], a, device)) return -1;
  // A part of 256 inputs into 7168 outputs, 16 rows: 6.2 us, by a warp a segment 4.1-4.3.
  if (m > 8 && m <= 16 && a.num_segments > 0 && tiles > 3 * device.num_multiprocessors) return -1;
  if (m <= 8 && k >= 1024 && tiles <= device.num_multiprocessors) return kDirectLong;
  if (ceil_div(tiles, 2) * ceil_div(m, 8) <= 2 * device.num_multiprocessors) return kDirect8;
  if (m > 72) return -1;
  return m <= 16 ? kDirect16 : m <= 24 || m > 64 ? kDirect24 : kDirect32;
}

// One or two segments of a reduction: a warp a segment would leave most of eight warps idle.
bool is_part(const LinearArgs& a) { return a.num_segments > 0 && a.num_segments <= 2; }

// The shape for such a part, of 16 rows at most. On an H200 one segment of K = 8192 into 7168 outputs takes 8 rows in 7.3 us by
// blocks of 64 outputs, in 9-10 by blocks of 32.
int choose_part(const LinearArgs& a, const LinearDevice& device) {
  if (a.num_rows > 8) return k16Share;
  return 10 * num_blocks(a, kBf16Shapes[k8ShareWide]) >= 8 * device.num_multiprocessors ? k8ShareWide : k8Share;
}

// Clusters for 16 rows at most of few outputs, or -1. On an H200, K = 7168: N of 384 and 512 take 1 to 8 rows in 4.2-4.5 us by
// k8Clusters, in 5.6 by the widest split of Hopper's shapes; N = 2112 8.8-9.6 us by k16Pairs, 10.7-14.5 by a warp a segment. 16
// rows of 4-8 MB of weights 2.9 us (K = N = 1536) to 5.3 us (7168 to 512) by k16ClustersWide, 4.7-5.7 by Hopper's; the fewest
// outputs (384) 4.3-4.7 by k16Clusters.
int choose_clusters(const LinearArgs& a, const LinearDevice& device) {
  const int64_t m = a.num_rows, k = a.num_in, tiles = ceil_div(a.num_out, kOutTile) * a.num_groups;
  if (!device.clusters || m > 16 || a.num_segments > 0) return -1;
  const int num_multiprocessors = device.num_multiprocessors;
  if (m <= 8) {
    if (k < 4096) return -1;
    if (4 * tiles <= num_multiprocessors) return k8Clusters;
    return 20 * tiles >= 19 * num_multiprocessors && tiles <= num_multiprocessors ? k16Pairs : -1;
  }
  if (2 * k * a.num_out * a.num_groups > 8'000'000 || tiles > num_multiprocessors) return -1;
  return 16 * tiles <= 3 * num_multiprocessors ? k16Clusters : k16ClustersWide;
}

// Measured, not derived. With few rows a warp for each segment of 16 or 32 outputs begins and ends fastest, unless there are so
// many weights (200 MB) that this is a small part, or so few outputs that 16 rows of x are read too often. K of 256 at most with
// a matrix per head is a matter of few copies and many outputs. A part of K = 256 at most is too short to share its units.
int choose_bf16(const LinearArgs& a, const LinearDevice& device) {
  if (const int direct = choose_direct(a, device); direct >= 0) return direct;
  if (const int clusters = choose_clusters(a, device); clusters >= 0) return clusters;
  const int64_t m = a.num_rows, k = a.num_in, wide = ceil_div(a.num_out, 32) * a.num_groups;  // blocks of 32 outputs
  const bool fills = 10 * wide >= 8 * device.num_multiprocessors, is_short = k <= 256 && a.num_groups > 1;
  const bool is_long = k >= 4096 && 4 * wide <= device.num_multiprocessors;  // a warp a segment would be a long chain of few blocks
  const bool pays = m > 16 || (m > 8 && !fills) || is_long || 2 * k * a.num_out * a.num_groups > 200'000'000;
  if (m <= 16 && is_part(a) && (k > 256 || !fills)) return choose_part(a, device);
  if (pays && serves(kBf16Shapes[kFirstWide], a, device)) return choose_wide(a, device);
  if (m <= 8) return is_short ? k8Short : fills ? k8Wide : k8;
  if (m <= 16) return is_short ? k16Short : fills ? k16Wide : k16;
  const int64_t blocks = num_blocks(a, kBf16Shapes[k128]), waves = ceil_div(blocks, device.num_multiprocessors);
  if (m > 64 && 4 * blocks >= 3 * waves * device.num_multiprocessors) return k128;
  return m > 32 && (is_short || a.num_out >= 64 * device.num_multiprocessors) ? k64 : k32;
}

int choose_f32(const LinearArgs& a, const LinearDevice& device) {
  if (a.num_rows <= 8) return kF8;
  if (a.num_rows <= 16) return kF16;
  return a.num_rows > 64 ? kF64 : device.clusters ? kF32Pair : kF32Alone;
}

bool aligned(const void* p, int64_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

SegmentShare share_of(const LinearArgs& a) { return {a.whole_in, a.first_segment, a.num_segments}; }

}  // namespace

TileArgs linear_tile_args(const LinearArgs& a) {
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
  set_segments(&t, share_of(a));
  return t;
}

namespace {

// The sum of no products.
int clear_floats(void* out, int64_t count, void* stream) {
  const cudaError_t error = cudaMemsetAsync(out, 0, count * sizeof(float), static_cast<cudaStream_t>(stream));
  return error == cudaSuccess ? kOk : kCudaError;
}

bool valid(const LinearArgs& a) {
  if (!share_of(a).fits(a.num_in) || a.whole_in > INT32_MAX / 16) return false;
  if (a.num_segments > 0 && (a.residual != nullptr || a.out_dtype != kF32)) return false;
  return (a.dtype == kF32 || a.dtype == kBF16) && (a.out_dtype == a.dtype || a.out_dtype == kF32) &&
         (a.residual == nullptr || a.out_dtype == a.dtype) && aligned(a.packed, 16) && a.num_out <= INT32_MAX / 2 &&
         a.num_in <= INT32_MAX / 16 && (!a.int4 || (a.dtype == kBF16 && a.num_in % kInt4Unit == 0));
}

const LinearShape& shape_of(const LinearArgs& a, int index) {
  return a.int4 ? int4_shape(index) : linear_shape(a.dtype, index);
}

}  // namespace

int num_linear_shapes(Dtype dtype) { return dtype == kF32 ? int(kNumF32Shapes) : int(kNumBf16Shapes); }

const LinearShape& linear_shape(Dtype dtype, int index) { return dtype == kF32 ? kF32Shapes[index] : kBf16Shapes[index]; }

int linear_cuda_with(const LinearArgs& a, int index, void* stream) {
  LinearDevice device;
  if (int status = linear_device(&device)) return status;
  if (!valid(a) || index < 0 || index >= (a.int4 ? num_int4_shapes() : num_linear_shapes(a.dtype))) return kUnsupported;
  if (!serves(shape_of(a, index), a, device)) return kUnsupported;
  if (a.num_rows == 0 || a.num_groups == 0 || a.num_out == 0) return kOk;
  if (a.num_segments > 0 && a.num_in == 0) return clear_floats(a.out, a.num_rows * a.num_groups * a.num_out, stream);
  TileArgs t = linear_tile_args(a);
  t.weights_settled = a.weights_settled;
  return shape_of(a, index).run(t, static_cast<int>(a.num_groups), stream);
}

bool serves(const LinearShape& shape, const LinearArgs& a, const LinearDevice& device) {
  const bool x_aligned = linear_tile_args(a).x_aligned;
  if (shape.direct) return x_aligned && a.num_in % 8 == 0;
  if (!device.clusters && shape.cluster > 1) return false;
  return !shape.wide || (device.wgmma && (a.int4 || x_aligned));
}

int choose_linear_shape(const LinearArgs& a, const LinearDevice& device) {
  return a.int4 ? choose_int4_shape(a, device) : a.dtype == kF32 ? choose_f32(a, device) : choose_bf16(a, device);
}

bool reads_weights_early(const LinearArgs& a, const LinearShape& shape, const LinearDevice& device) {
  const int64_t blocks = num_blocks(a, shape);
  const bool fills = 10 * blocks >= 9 * device.num_multiprocessors, one_wave = blocks <= device.num_multiprocessors;
  const bool few = !a.int4 && (shape.cluster > 1 || is_part(a));
  const bool pays = shape.direct || (shape.wide && !a.int4 ? one_wave : fills || few);
  return a.weights_settled && a.dtype == kBF16 && pays;
}

int linear_device(LinearDevice* out) {
  int device = 0, major = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return kCudaError;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess) return kCudaError;
  out->clusters = major < 12;  // clusters were never run on sm_120
  out->wgmma = major == 9;
  const cudaError_t error = cudaDeviceGetAttribute(&out->num_multiprocessors, cudaDevAttrMultiProcessorCount, device);
  return error == cudaSuccess ? kOk : kCudaError;
}

int linear_cuda(const LinearArgs& a, void* stream) {
  if (!valid(a)) return kUnsupported;
  LinearDevice device;
  if (int status = linear_device(&device)) return status;
  const int shape = choose_linear_shape(a, device);
  LinearArgs begun = a;
  begun.weights_settled = reads_weights_early(a, shape_of(a, shape), device);
  return linear_cuda_with(begun, shape, stream);
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
