// moe_experts on CUDA: two products for the experts that rows chose, around swiglu; the down projection leaves its 8 segment
// sums apart, and a last kernel adds them in the order of op_args.h. Blocks that share an expert's weights run side by side and
// read them from memory once. Where rows are few, the shared expert's work stands beside the others' in the same launches, and
// the first products do swiglu, if gates and ups are whole tiles.
#include "expert_combine.cuh"
#include "expert_group.cuh"
#include "expert_shares.h"
#include "expert_swiglu.cuh"
#include "expert_tiles.cuh"
#include "expert_workspace.cuh"
#include "linear.cuh"

namespace kdtree {
namespace {

template <class T>
struct Experts {
  const MoeExpertsArgs& a;
  const ExpertWorkspace& w;
  void* stream;
  Int4ExpertShapes shapes;       // of INT4 experts
  LinearDevice device;
  int64_t row = 0, num_rows = 0;  // the chunk

  template <class U>
  U* at(int64_t offset) const { return reinterpret_cast<U*>(static_cast<char*>(a.workspace) + offset); }
  bool has_routed() const { return num_rows * a.top_k > 0 && a.num_experts > 0 && a.width > 0; }
  bool has_shared() const { return num_rows > 0 && a.shared_gate_up != nullptr && a.shared_width > 0; }
  bool is_beside() const {
    return has_routed() && has_shared() && w.rows_per_item == kRowsOfPairs && num_rows <= kMaxRowsBeside;
  }
  // Whether the up products do swiglu: gates and ups are whole tiles, of INT4 whole columns.
  bool has_swiglu() const {
    if (sizeof(T) == 4 || !device.clusters || !is_beside() || a.shared_width % kOutTile != 0) return false;
    return a.int4 ? a.width % (kInt4ColumnTiles * kOutTile) == 0 && int4_shape(shapes.up).run_swiglu_beside != nullptr
                  : a.width % kOutTile == 0;
  }
  const int32_t* expert_id() const { return a.expert_id + row * a.top_k; }

  SegmentShare share(int64_t whole) const { return {whole, a.first_segment, a.num_segments}; }

  TileArgs product(const void* x, int64_t num_in, const void* packed, void* out, int64_t num_out, const SegmentShare& share) const {
    const auto aligned = [](const void* p, int64_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; };
    TileArgs t = {};
    t.x = x, t.packed = packed, t.out = out, t.x_row_stride = num_in, t.out_row_stride = num_out;
    t.num_rows = num_rows, t.row_begin = row, t.num_rows_device = a.num_rows_device;
    t.num_out = static_cast<int>(num_out), t.num_in = static_cast<int>(num_in);
    t.x_aligned = aligned(x, 16) && num_in * sizeof(T) % 16 == 0;
    t.out_aligned = num_out % 4 == 0;
    set_segments(&t, share);
    return t;
  }

  // A product whose rows are pairs, of experts; rows_per_source of them have one row of x.
  TileArgs of_experts(TileArgs t, int64_t rows_per_source) const {
    t.num_row_tiles = static_cast<int>(w.is_grouped ? w.max_items : num_rows * a.top_k);
    t.rows_per_source = static_cast<int>(rows_per_source);
    if (w.is_grouped) {
      t.items = at<int4>(w.items), t.num_items = at<int32_t>(w.num_items), t.row_list = at<int32_t>(w.pairs);
    } else {
      t.pair_expert = expert_id(), t.pairs_per_row = static_cast<int>(a.top_k), t.num_experts = static_cast<int>(a.num_experts);
    }
    return t;
  }

  // The products of the experts, and of the shared one, as far as there are any.
  template <bool kPartials>
  int run_products(const TileArgs& experts, const TileArgs& shared) const {
    const LinearShape* int4 = !a.int4 ? nullptr : kPartials ? &int4_partial_shape(shapes.down) : &int4_shape(shapes.up);
    if (is_beside()) {
      using Tiles = ExpertTiles<T, kPartials>;
      if (int4 == nullptr)
        return has_few_segments(experts) ? launch_beside<typename Tiles::Share8>(shared, experts, stream)
                                         : launch_beside<typename Tiles::Rows8>(shared, experts, stream);
      if (int4->run_beside != nullptr) return int4->run_beside(shared, experts, stream);
    }
    if (has_routed())
      if (int status = int4 ? int4->run(experts, 1, stream) : run_expert_tile<T, kPartials>(experts, w.rows_per_item, stream))
        return status;
    const int rows_per_tile = num_rows <= 8 ? 8 : num_rows <= 32 || a.dtype == kF32 ? 32 : 64;
    return has_shared() ? run_expert_tile<T, kPartials>(shared, rows_per_tile, stream) : static_cast<int>(kOk);
  }

  int group() const {
    if (!w.is_grouped) return kOk;
    const GroupArgs g = {expert_id(), a.num_rows_device, num_rows, row, static_cast<int>(a.num_experts), static_cast<int>(a.top_k),
                         w.rows_per_item, at<int32_t>(w.num_items), at<int4>(w.items), at<int32_t>(w.pairs)};
    return group_pairs(g, stream);
  }

  int up() const {
    const void* x = static_cast<const T*>(a.x) + row * a.dim;
    TileArgs experts = product(x, a.dim, a.gate_up, at<void>(w.gate_up), 2 * a.width, {});
    TileArgs shared = product(x, a.dim, a.shared_gate_up, at<void>(w.shared_gate_up), 2 * a.shared_width, {});
    if (!has_swiglu()) return run_products<false>(of_experts(experts, a.top_k), shared);
    experts.out = at<void>(w.hidden), experts.out_row_stride = a.width;
    shared.out = at<void>(w.shared_hidden), shared.out_row_stride = a.shared_width;
    const auto run = a.int4 ? int4_shape(shapes.up).run_swiglu_beside : launch_swiglu_beside<SwigluRows8>;
    return run(shared, of_experts(experts, a.top_k), stream);
  }

  int swiglu() const {
    if (has_swiglu()) return kOk;
    const ExpertSwigluArgs s = {at<void>(w.gate_up), at<void>(w.shared_gate_up), at<void>(w.hidden), at<void>(w.shared_hidden),
                                a.num_rows_device, num_rows, row, num_rows * a.top_k, a.width, a.shared_width,
                                static_cast<int>(a.top_k)};
    return expert_swiglu<T>(s, has_routed(), has_shared(), stream);
  }

  int down() const {
    TileArgs experts = product(at<void>(w.hidden), a.width, a.down, at<void>(w.partials), a.dim, share(a.whole_width));
    TileArgs shared = product(at<void>(w.shared_hidden), a.shared_width, a.shared_down, at<void>(w.shared_partials), a.dim,
                                    share(a.whole_shared_width));
    experts.first_segment = down_segments(a, false).first_in_use();  // the sums of empty ones are not written
    shared.first_segment = down_segments(a, true).first_in_use();
    return run_products<true>(of_experts(experts, 1), shared);
  }

  // Bit by segment of a down product: is it summed here and not empty?
  unsigned in_use(bool is_shared) const {
    const Segments segments = down_segments(a, is_shared);
    unsigned bits = 0;
    for (int s = segments.first; s < segments.end; ++s) bits |= unsigned(!segments.empty(s)) << s;
    return bits;
  }

  int combine() const {
    const int first = a.num_segments ? a.first_segment : 0, end = a.num_segments ? first + a.num_segments : kNumSegments;
    const bool out_f32 = a.num_segments > 0;
    const CombineArgs c = {a.width ? at<float>(w.partials) : nullptr, has_shared() ? at<float>(w.shared_partials) : nullptr,
                           expert_id(), a.weight + row * a.top_k,
                           a.residual ? static_cast<const T*>(a.residual) + row * a.dim : nullptr,
                           static_cast<char*>(a.out) + row * a.dim * (out_f32 ? 4 : sizeof(T)),
                           a.num_rows_device, num_rows, row, static_cast<int>(a.dim), static_cast<int>(a.top_k),
                           static_cast<int>(a.num_experts), first, end, out_f32, in_use(false), in_use(true)};
    return combine_experts<T>(c, stream);
  }

  int run() {
    for (row = 0; row < a.num_rows; row += num_rows) {
      num_rows = std::min(w.num_rows, a.num_rows - row);
      if (int status = group()) return status;
      if (int status = up()) return status;
      if (int status = swiglu()) return status;
      if (int status = down()) return status;
      if (int status = combine()) return status;
    }
    return kOk;
  }
};

}  // namespace

int64_t moe_experts_cuda_workspace_bytes(const MoeExpertsArgs& a) { return ExpertWorkspace(a).num_bytes; }

int moe_rows_per_item(const MoeExpertsArgs& a) { return ExpertWorkspace(a).rows_per_item; }

int moe_experts_cuda(const MoeExpertsArgs& a, void* stream) {
  LinearDevice device;
  if (int status = linear_device(&device)) return status;
  return moe_experts_cuda_with(a, a.int4 ? choose_int4_experts(a, device) : Int4ExpertShapes{}, stream);
}

int moe_experts_cuda_with(const MoeExpertsArgs& a, Int4ExpertShapes shapes, void* stream) {
  if (a.num_rows == 0 || a.dim == 0) return kOk;
  if (a.int4 && (a.dtype != kBF16 || a.dim % kInt4Unit || a.width % kInt4Unit)) return kUnsupported;
  if (!shares_fit(a) || a.num_experts > 4096 || a.num_rows > INT32_MAX / std::max<int64_t>(1, a.top_k)) return kUnsupported;
  LinearDevice device;
  if (int status = linear_device(&device)) return status;
  const ExpertWorkspace workspace(a);
  if (a.int4 && (int4_shape(shapes.up).num_rows != workspace.rows_per_item ||
                 int4_partial_shape(shapes.down).num_rows != workspace.rows_per_item))
    return kUnsupported;
  return with_dtype(a.dtype, [&](auto zero) { return Experts<decltype(zero)>{a, workspace, stream, shapes, device}.run(); });
}

}  // namespace kdtree
