// moe_experts on CUDA. Rows are grouped by expert on the device, so that blocks that share an expert's weights run side by
// side and read them from memory once; two grouped products around swiglu; the down projection leaves its 8 segment sums
// apart, and a last kernel adds them in the order of op_args.h. Only integers are counted with atomics.
#include "expert_shares.h"
#include "linear.cuh"
#include "linear_tile.cuh"

namespace kdtree {
namespace {

using Bf16 = __nv_bfloat16;

constexpr int64_t kMaxPartialBytes = int64_t(1) << 30;  // more rows than fit are done in chunks
constexpr int kGroupThreads = 1024, kCombineThreads = 128;

// What the grouping kernel counts for the kernels after it.
struct Counts {
  int32_t num_items, num_pairs, num_rows;
};

// --- workspace -------------------------------------------------------------------------------------------------------

struct Workspace {
  int64_t num_rows, num_pairs;  // of a chunk
  int rows_per_item;
  int64_t max_items, num_bytes = 0;
  int64_t counts, items, pairs, gate_up, hidden, partials, shared_gate_up, shared_hidden, shared_partials;

  explicit Workspace(const MoeExpertsArgs& a) {
    const int64_t size = a.dtype == kF32 ? 4 : 2, shared = a.shared_gate_up ? 1 : 0;
    const int64_t partial_bytes = (a.top_k + shared) * kNumSegments * a.dim * 4;
    num_rows = std::min(a.num_rows, std::max<int64_t>(1, kMaxPartialBytes / std::max<int64_t>(1, partial_bytes)));
    num_pairs = num_rows * a.top_k;
    // An item has at most so many rows of one expert: few rows an expert, small tiles.
    rows_per_item = num_rows <= 8 || num_pairs <= 4 * a.num_experts ? 8
                    : a.dtype == kF32 || num_pairs <= 24 * a.num_experts ? 32 : 64;
    max_items = std::min(a.num_experts, num_pairs) + num_pairs / rows_per_item;
    counts = take(sizeof(Counts));
    items = take(max_items * sizeof(int4));
    pairs = take(num_pairs * 4);
    gate_up = take(num_pairs * 2 * a.width * size);
    hidden = take(num_pairs * a.width * size);
    partials = take(num_pairs * kNumSegments * a.dim * 4);
    shared_gate_up = take(shared * num_rows * 2 * a.shared_width * size);
    shared_hidden = take(shared * num_rows * a.shared_width * size);
    shared_partials = take(shared * num_rows * kNumSegments * a.dim * 4);
  }

  int64_t take(int64_t count) {
    const int64_t at = num_bytes;
    num_bytes += ceil_div(count, 256) * 256;
    return at;
  }
};

// --- group: pairs (row, k) sorted by expert, then by pair; items of at most rows_per_item pairs -----------------------

struct GroupArgs {
  const int32_t* expert_id;  // [num_rows, top_k]
  const int32_t* num_rows_device;
  int64_t num_rows, row_begin;
  int num_experts, top_k, rows_per_item;
  Counts* counts;
  int4* items;
  int32_t* pairs;
};

// Turns counts of pairs into the first pair of each expert; `first_item` likewise. One warp.
__device__ void scan_experts(const GroupArgs& a, int32_t* count, int32_t* first, int32_t* first_item) {
  const int lane = threadIdx.x;
  int pairs = 0, items = 0;
  for (int begin = 0; begin < a.num_experts; begin += kWarp) {
    const int e = begin + lane;
    const int num_pairs = e < a.num_experts ? count[e] : 0, num_items = (num_pairs + a.rows_per_item - 1) / a.rows_per_item;
    int pairs_before = num_pairs, items_before = num_items;
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const int p = __shfl_up_sync(0xffffffffu, pairs_before, offset), i = __shfl_up_sync(0xffffffffu, items_before, offset);
      if (lane >= offset) pairs_before += p, items_before += i;
    }
    if (e < a.num_experts) first[e] = pairs + pairs_before - num_pairs, first_item[e] = items + items_before - num_items;
    pairs += __shfl_sync(0xffffffffu, pairs_before, kWarp - 1);
    items += __shfl_sync(0xffffffffu, items_before, kWarp - 1);
  }
  if (lane == 0) a.counts->num_items = items;
}

// Writes the pairs of every expert in ascending order, 32 pairs at a time. One warp; `next` is consumed.
__device__ void scatter_pairs(const GroupArgs& a, int num_pairs, int32_t* next) {
  const int lane = threadIdx.x;
  for (int begin = 0; begin < num_pairs; begin += kWarp) {
    const int pair = begin + lane, id = pair < num_pairs ? a.expert_id[pair] : -1;
    const unsigned same = __match_any_sync(0xffffffffu, id);
    const bool valid = id >= 0 && id < a.num_experts;
    if (valid) a.pairs[next[id] + __popc(same & ((1u << lane) - 1))] = pair;
    __syncwarp();
    if (valid && __ffs(same) - 1 == lane) next[id] += __popc(same);
    __syncwarp();
  }
}

__global__ void __launch_bounds__(kGroupThreads) group_kernel(GroupArgs a) {
  extern __shared__ int32_t shared[];
  int32_t *count = shared, *first = count + a.num_experts, *first_item = first + a.num_experts;
  wait_for_previous_kernel();
  allow_next_kernel();
  const int num_rows = rows_in_use(a.num_rows_device, a.num_rows, a.row_begin), num_pairs = num_rows * a.top_k;
  for (int e = threadIdx.x; e < a.num_experts; e += kGroupThreads) count[e] = 0;
  __syncthreads();
  for (int pair = threadIdx.x; pair < num_pairs; pair += kGroupThreads) {
    const int id = a.expert_id[pair];
    if (id >= 0 && id < a.num_experts) atomicAdd(&count[id], 1);
  }
  __syncthreads();
  if (threadIdx.x < kWarp) scan_experts(a, count, first, first_item);
  __syncthreads();
  for (int e = threadIdx.x; e < a.num_experts; e += kGroupThreads)
    for (int i = 0; i * a.rows_per_item < count[e]; ++i) {
      const int begin = i * a.rows_per_item;
      a.items[first_item[e] + i] = {e, first[e] + begin, min(count[e] - begin, a.rows_per_item), 0};
    }
  __syncthreads();
  if (threadIdx.x < kWarp) scatter_pairs(a, num_pairs, first);
  if (threadIdx.x == kWarp) a.counts->num_pairs = num_pairs, a.counts->num_rows = num_rows;
}

// --- combine ---------------------------------------------------------------------------------------------------------

struct CombineArgs {
  const float* partials;         // [pairs, 8, D], or nullptr where no width is summed here
  const float* shared_partials;  // [rows, 8, D] or nullptr
  const int32_t* expert_id;
  const float* weight;
  const void* residual;
  void* out;
  const Counts* counts;
  int dim, top_k, num_experts;
  int first_segment, end_segment;  // that are summed here; others count as -0, which changes no sum
  bool out_f32;
};

template <int kWidth>
__device__ __forceinline__ void add_segments(const CombineArgs& a, const float* partials, float weight, float (&sum)[8][kWidth]) {
  struct alignas(kWidth * 4) Vector { float value[kWidth]; } v[kNumSegments];
  const int64_t dim = a.dim;
#pragma unroll
  for (int s = 0; s < kNumSegments; ++s)
    if (s >= a.first_segment && s < a.end_segment) v[s] = *reinterpret_cast<const Vector*>(partials + s * dim);
#pragma unroll
  for (int s = 0; s < kNumSegments; ++s)
    if (s >= a.first_segment && s < a.end_segment)
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sum[s][i] = fmaf(weight, v[s].value[i], sum[s][i]);
}

template <class T, int kWidth>
__global__ void __launch_bounds__(kCombineThreads, 4) combine_kernel(CombineArgs a) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const int64_t row = blockIdx.x, d = (int64_t(blockIdx.y) * kCombineThreads + threadIdx.x) * kWidth, dim = a.dim;
  if (row >= a.counts->num_rows || d >= dim) return;
  float sum[kNumSegments][kWidth];
#pragma unroll
  for (int s = 0; s < kNumSegments; ++s)
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sum[s][i] = s >= a.first_segment && s < a.end_segment ? 0.f : -0.f;
  bool valid = true;
#pragma unroll 1
  for (int k = 0; k < a.top_k; ++k) {
    const int64_t pair = row * a.top_k + k;
    const int id = a.expert_id[pair];
    if (id < 0 || id >= a.num_experts) valid = false;
    else if (a.partials) add_segments<kWidth>(a, a.partials + pair * kNumSegments * dim + d, a.weight[pair], sum);
  }
  if (a.shared_partials) add_segments<kWidth>(a, a.shared_partials + row * kNumSegments * dim + d, 1.0f, sum);
  const T* residual = static_cast<const T*>(a.residual);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const float total = ((sum[0][i] + sum[1][i]) + (sum[2][i] + sum[3][i])) + ((sum[4][i] + sum[5][i]) + (sum[6][i] + sum[7][i]));
    const float checked = valid ? total : __int_as_float(0x7fffffff);  // an expert that does not exist gives NaN
    if (a.out_f32) {
      static_cast<float*>(a.out)[row * dim + d + i] = checked;
      continue;
    }
    T out = from_float<T>(checked);
    if (residual) out = from_float<T>(to_float(out) + to_float(residual[row * dim + d + i]));
    static_cast<T*>(a.out)[row * dim + d + i] = out;
  }
}

// --- host ------------------------------------------------------------------------------------------------------------

// The tile of a grouped product by rows of an item; kPartials: segment sums.
template <class T, bool kPartials>
int run_tile(const TileArgs& t, int rows_per_item, void* stream) {
  if constexpr (sizeof(T) == 4) {
    if (rows_per_item == 8) return launch_tile<TileShape<T, 8, 1, 1, 1, 1, 1, 1, 1, 2, kPartials>>(t, 1, stream);
    return launch_tile<TileShape<T, 4, 2, 1, 1, 4, 1, kPartials ? 1 : 2, kPartials ? 2 : 1, 2, kPartials>>(t, 1, stream);
  } else {
    if (rows_per_item == 8) return launch_tile<TileShape<T, 8, 1, 1, 1, 1, 2, 1, 1, 2, kPartials>>(t, 1, stream);
    if (rows_per_item == 32) return launch_tile<TileShape<T, 8, 1, 1, 2, 4, 1, 1, 1, 2, kPartials>>(t, 1, stream);
    return launch_tile<TileShape<T, 1, 4, 2, 2, 4, 2, kPartials ? 1 : 8, kPartials ? 8 : 1, 2, kPartials>>(t, 1, stream);
  }
}

template <class T>
struct Experts {
  const MoeExpertsArgs& a;
  const Workspace& w;
  void* stream;
  Int4ExpertShapes shapes;  // of INT4 experts

  template <class U>
  U* at(int64_t offset) const { return reinterpret_cast<U*>(static_cast<char*>(a.workspace) + offset); }
  const Counts* counts() const { return at<Counts>(w.counts); }

  SegmentShare share(int64_t whole) const { return {whole, a.first_segment, a.num_segments}; }

  TileArgs product(const void* x, int64_t num_in, const void* packed, void* out, int64_t num_out, int64_t num_rows,
                   const SegmentShare& share = {}) const {
    const auto aligned = [](const void* p, int64_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; };
    TileArgs t = {};
    t.x = x, t.packed = packed, t.out = out, t.x_row_stride = num_in, t.out_row_stride = num_out;
    t.num_rows = num_rows, t.num_rows_device = &counts()->num_rows;
    t.num_out = static_cast<int>(num_out), t.num_in = static_cast<int>(num_in);
    t.x_aligned = aligned(x, 16) && num_in * sizeof(T) % 16 == 0;
    t.out_aligned = num_out % 4 == 0;
    set_segments(&t, share);
    return t;
  }

  TileArgs grouped(TileArgs t, int rows_per_source) const {
    t.items = at<int4>(w.items), t.num_items = &counts()->num_items, t.row_list = at<int32_t>(w.pairs);
    t.num_row_tiles = static_cast<int>(w.max_items), t.rows_per_source = rows_per_source;
    return t;
  }

  int swiglu(int64_t gate_up, int64_t hidden, int64_t num_rows, int64_t dim, const int32_t* num_rows_device) const {
    SwigluArgs s = {};
    s.gate_up = at<void>(gate_up), s.out = at<void>(hidden);
    s.num_rows = num_rows, s.dim = dim, s.dtype = a.dtype, s.num_rows_device = num_rows_device;
    return swiglu_cuda(s, stream);
  }

  int group(int64_t row, int64_t num_rows) const {
    LaunchShape shape;
    shape.grid = dim3(1), shape.block = dim3(kGroupThreads), shape.shared_bytes = 12 * a.num_experts, shape.start = Start::kEarly;
    const GroupArgs g = {a.expert_id + row * a.top_k, a.num_rows_device, num_rows, row, static_cast<int>(a.num_experts),
                         static_cast<int>(a.top_k), w.rows_per_item, at<Counts>(w.counts), at<int4>(w.items), at<int32_t>(w.pairs)};
    return launch(group_kernel, shape, stream, g);
  }

  // A grouped product by the tile for floats or INT4.
  template <bool kPartials>
  int run_grouped(const TileArgs& t) const {
    if (!a.int4) return run_tile<T, kPartials>(t, w.rows_per_item, stream);
    return (kPartials ? int4_partial_shape(shapes.down) : int4_shape(shapes.up)).run(t, 1, stream);
  }

  int routed(const T* x) const {
    if (w.num_pairs == 0 || a.num_experts == 0 || a.width == 0) return kOk;
    const TileArgs up = product(x, a.dim, a.gate_up, at<void>(w.gate_up), 2 * a.width, w.num_pairs);
    if (int status = run_grouped<false>(grouped(up, static_cast<int>(a.top_k)))) return status;
    if (int status = swiglu(w.gate_up, w.hidden, w.num_pairs, a.width, &counts()->num_pairs)) return status;
    const TileArgs down = product(at<void>(w.hidden), a.width, a.down, at<void>(w.partials), a.dim, w.num_pairs,
                                  share(a.whole_width));
    return run_grouped<true>(grouped(down, 1));
  }

  int shared(const T* x, int64_t num_rows) const {
    if (a.shared_gate_up == nullptr || a.shared_width == 0) return kOk;
    const int rows_per_tile = num_rows <= 8 ? 8 : num_rows <= 32 || a.dtype == kF32 ? 32 : 64;
    const TileArgs up = product(x, a.dim, a.shared_gate_up, at<void>(w.shared_gate_up), 2 * a.shared_width, num_rows);
    if (int status = run_tile<T, false>(up, rows_per_tile, stream)) return status;
    if (int status = swiglu(w.shared_gate_up, w.shared_hidden, num_rows, a.shared_width, &counts()->num_rows)) return status;
    const TileArgs down = product(at<void>(w.shared_hidden), a.shared_width, a.shared_down, at<void>(w.shared_partials), a.dim,
                                  num_rows, share(a.whole_shared_width));
    return run_tile<T, true>(down, rows_per_tile, stream);
  }

  int combine(int64_t row, int64_t num_rows) const {
    const int width = a.dim % 4 == 0 ? 4 : 1;
    LaunchShape shape;
    shape.grid = dim3(static_cast<unsigned>(num_rows), static_cast<unsigned>(ceil_div(a.dim, kCombineThreads * width)));
    shape.block = dim3(kCombineThreads), shape.start = Start::kEarly;
    const int first = a.num_segments ? a.first_segment : 0, end = a.num_segments ? first + a.num_segments : kNumSegments;
    const bool out_f32 = a.num_segments > 0;
    char* out = static_cast<char*>(a.out) + row * a.dim * (out_f32 ? 4 : sizeof(T));
    const CombineArgs c = {a.width ? at<float>(w.partials) : nullptr,
                           a.shared_gate_up && a.shared_width ? at<float>(w.shared_partials) : nullptr,
                           a.expert_id + row * a.top_k, a.weight + row * a.top_k,
                           a.residual ? static_cast<const T*>(a.residual) + row * a.dim : nullptr,
                           out, counts(), static_cast<int>(a.dim), static_cast<int>(a.top_k),
                           static_cast<int>(a.num_experts), first, end, out_f32};
    return launch(width == 4 ? combine_kernel<T, 4> : combine_kernel<T, 1>, shape, stream, c);
  }

  int run() const {
    for (int64_t row = 0; row < a.num_rows; row += w.num_rows) {
      const int64_t num_rows = std::min(w.num_rows, a.num_rows - row);
      const T* x = static_cast<const T*>(a.x) + row * a.dim;
      if (int status = group(row, num_rows)) return status;
      if (int status = routed(x)) return status;
      if (int status = shared(x, num_rows)) return status;
      if (int status = combine(row, num_rows)) return status;
    }
    return kOk;
  }
};

}  // namespace

int64_t moe_experts_cuda_workspace_bytes(const MoeExpertsArgs& a) { return Workspace(a).num_bytes; }

int moe_rows_per_item(const MoeExpertsArgs& a) { return Workspace(a).rows_per_item; }

int moe_experts_cuda(const MoeExpertsArgs& a, void* stream) {
  LinearDevice device = {};
  if (a.int4)
    if (int status = linear_device(&device)) return status;
  return moe_experts_cuda_with(a, a.int4 ? choose_int4_experts(a, device) : Int4ExpertShapes{}, stream);
}

int moe_experts_cuda_with(const MoeExpertsArgs& a, Int4ExpertShapes shapes, void* stream) {
  if (a.num_rows == 0 || a.dim == 0) return kOk;
  if (a.int4 && (a.dtype != kBF16 || a.dim % kInt4Unit || a.width % kInt4Unit)) return kUnsupported;
  if (!shares_fit(a) || a.num_experts > 4096 || a.num_rows > INT32_MAX / std::max<int64_t>(1, a.top_k)) return kUnsupported;
  const Workspace workspace(a);
  if (a.int4 && (int4_shape(shapes.up).num_rows != workspace.rows_per_item ||
                 int4_partial_shape(shapes.down).num_rows != workspace.rows_per_item))
    return kUnsupported;
  return with_dtype(a.dtype, [&](auto zero) { return Experts<decltype(zero)>{a, workspace, stream, shapes}.run(); });
}

}  // namespace kdtree
