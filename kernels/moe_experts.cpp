// moe_experts: the rows of a step are gathered per expert, so that the weights of an expert are read once for all of
// them. Three phases: gate and up projections, swiglu, down projection. The down projection keeps its 8 segment sums
// apart per row and adds the experts inside each segment; see op_args.h for the order of additions.
#include <cmath>
#include <cstring>
#include <vector>

#include "dot_tile.h"
#include "expert_shares.h"
#include "int4_layout.h"
#include "op_args.h"
#include "parallel.h"
#include "rows_in_use.h"
#include "scratch.h"
#include "swiglu.h"
#include "unpack_int4.h"

namespace kdtree {
namespace {

constexpr int64_t kChunkRows = 256;  // rows whose segment sums of one panel stay in the second-level cache
constexpr int64_t kExpWork = 8;      // an exp and a division, in units of parallel.h

// An expert that has rows: pairs [first_pair, first_pair + num_pairs) of the step.
template <class Float>
struct Expert {
  const Float* gate_up;  // packed [2 * width, D]
  const Float* down;     // packed [D, width]
  int64_t width, first_pair, num_pairs;
  bool is_shared;
};

// The (row, expert) pairs of a step, sorted by expert, then by row; the shared expert's come last.
template <class Float>
struct Plan {
  std::vector<Expert<Float>> experts;
  std::vector<int32_t> row;         // per pair
  std::vector<float> weight;        // per pair
  std::vector<const float*> x;      // per pair: the row's D inputs in FP32
  std::vector<float*> hidden;       // per pair: 2 * width values, gates then ups; swiglu's product replaces the gates
  Floats hidden_values, widened;
  int down_segment[kNumSegments];   // place among the segments of the down projections, -1 if all experts' is empty
  int num_down_segments = 0;
  std::vector<float> empty_sum;     // per row: weighted sum of the zeros of an empty segment
};

inline const float* in_fp32(const float* x, int64_t, Floats&) { return x; }

inline const float* in_fp32(const Bf16* x, int64_t count, Floats& widened) {
  widened = new_floats(count);
  for (int64_t i = 0; i < count; ++i) widened[i] = widen(x[i]);
  return widened.get();
}

// Sorts the pairs by expert and lists the experts that have any.
template <class Float>
void sort_pairs(const MoeExpertsArgs& a, int64_t routed, int64_t shared, Plan<Float>& plan) {
  std::vector<int64_t> next(a.num_experts + 1, 0);  // per expert: its first pair, later the next free one
  for (int64_t i = 0; i < routed; ++i) ++next[a.expert_id[i] + 1];
  for (int64_t e = 0; e < a.num_experts; ++e) {
    const int64_t first = next[e], count = next[e + 1];
    next[e + 1] += first;
    if (count == 0) continue;
    const int64_t gate_up_size = num_blocks_of(2 * a.width) * kLanes * a.dim;
    const int64_t down_size = num_blocks_of(a.dim) * kLanes * a.width;
    plan.experts.push_back({static_cast<const Float*>(a.gate_up) + e * gate_up_size,
                            static_cast<const Float*>(a.down) + e * down_size, a.width, first, count, false});
  }
  if (shared)
    plan.experts.push_back({static_cast<const Float*>(a.shared_gate_up), static_cast<const Float*>(a.shared_down),
                            a.shared_width, routed, shared, true});
  plan.row.resize(routed + shared);
  plan.weight.resize(routed + shared, 1.0f);
  for (int64_t i = 0; i < routed; ++i) {
    const int64_t pair = next[a.expert_id[i]]++;
    plan.row[pair] = int32_t(i / a.top_k);
    plan.weight[pair] = a.weight[i];
  }
  for (int64_t t = 0; t < shared; ++t) plan.row[routed + t] = int32_t(t);
}

template <class Float>
void place_segments(const MoeExpertsArgs& a, Plan<Float>& plan) {
  const Segments routed = down_segments(a, false), shared = down_segments(a, a.shared_gate_up != nullptr);
  for (int s = 0; s < kNumSegments; ++s)
    plan.down_segment[s] = routed.empty(s) && shared.empty(s) ? -1 : plan.num_down_segments++;
  plan.empty_sum.resize(a.num_rows, 0.0f);
  for (size_t pair = 0; pair < plan.row.size(); ++pair) {
    float& sum = plan.empty_sum[plan.row[pair]];
    sum = std::fma(plan.weight[pair], 0.0f, sum);
  }
}

template <class Float>
Plan<Float> make_plan(const MoeExpertsArgs& a) {
  Plan<Float> plan;
  const int64_t routed = a.num_rows * a.top_k, shared = a.shared_gate_up ? a.num_rows : 0;
  sort_pairs(a, routed, shared, plan);
  place_segments(a, plan);
  const float* x = in_fp32(static_cast<const Float*>(a.x), a.num_rows * a.dim, plan.widened);
  plan.hidden_values = new_floats(2 * (routed * a.width + shared * a.shared_width));
  float* hidden = plan.hidden_values.get();
  plan.x.resize(routed + shared);
  plan.hidden.resize(routed + shared);
  for (int64_t pair = 0; pair < routed + shared; ++pair) {
    plan.x[pair] = x + plan.row[pair] * a.dim;
    plan.hidden[pair] = hidden;
    hidden += 2 * (pair < routed ? a.width : a.shared_width);
  }
  return plan;
}

// Outputs [16 * block, …) of the gate and up projections of one expert, rounded to the storage type.
template <class Float>
void gate_up_panel(const Plan<Float>& plan, const Expert<Float>& expert, int64_t dim, const Segments& segments,
                   int64_t block, int width) {
  const int64_t first_out = block * kLanes;
  with_panel_width(width, [&](auto blocks) {
    for_row_tiles(expert.num_pairs, [&](int64_t begin, auto height) {
      const int64_t pair = expert.first_pair + begin;
      const auto emit = [&](int r, int b, Vec16 total) {
        const int64_t n = first_out + b * kLanes;
        total = rounded(total, static_cast<const Float*>(nullptr));
        store_first(total, plan.hidden[pair + r] + n, 2 * expert.width - n);
      };
      tile_totals<height, blocks>(&plan.x[pair], expert.gate_up + first_out * dim, dim, segments, emit);
    });
  });
}

template <class Float>
void swiglu_pair(float* hidden, int64_t width) {
  for (int64_t i = 0; i < width; i += kLanes) {
    const int64_t count = width - i;
    const Vec16 product = swiglu16(load_first(hidden + i, count), load_first(hidden + width + i, count));
    store_first(rounded(product, static_cast<const Float*>(nullptr)), hidden + i, count);
  }
}

// Outputs [16 * block, …) of all rows: sums[row][segment][16 * kBlocks], expert after expert, then the segments' tree.
// A segment that is empty for all experts has no place in `sums`: its sum, row by row, is in the plan.
template <class Float, int kBlocks>
void down_panel(const MoeExpertsArgs& a, const Plan<Float>& plan, int64_t block, float* sums) {
  constexpr int64_t kSegmentSums = kBlocks * kLanes;
  const int64_t row_sums = plan.num_down_segments * kSegmentSums;
  std::memset(sums, 0, a.num_rows * row_sums * sizeof(float));
  const int64_t first_out = block * kLanes;
  for (const Expert<Float>& expert : plan.experts) {
    const Segments segments = down_segments(a, expert.is_shared);
    for_row_tiles(expert.num_pairs, [&](int64_t begin, auto height) {
      const int64_t pair = expert.first_pair + begin;
      const auto add = [&](int s, const auto& acc) {
        for (int r = 0; r < height; ++r) {
          float* own = sums + plan.row[pair + r] * row_sums + plan.down_segment[s] * kSegmentSums;
          const Vec16 weight = Vec16::all(plan.weight[pair + r]);
          for (int b = 0; b < kBlocks; ++b, own += kLanes) fma(weight, acc[r][b], Vec16::load(own)).store(own);
        }
      };
      const Vec16 zeros[height][kBlocks] = {};
      for (int s = segments.first; s < segments.end; ++s)
        if (segments.empty(s) && plan.down_segment[s] >= 0) add(s, zeros);
      tile_segments<height, kBlocks>(&plan.hidden[pair], expert.down + first_out * expert.width, expert.width, segments,
                                     add);
    });
  }
  const Float* residual = static_cast<const Float*>(a.residual);
  const Segments mine = down_segments(a, false);
  for (int64_t t = 0; t < a.num_rows; ++t)
    for (int b = 0; b < kBlocks; ++b) {
      const float* own = sums + t * row_sums + b * kLanes;
      const auto sum = [&](int s) {
        const int place = plan.down_segment[s];
        if (place >= 0) return Vec16::load(own + place * kSegmentSums);
        return Vec16::all(mine.mine(s) ? plan.empty_sum[t] : -0.0f);  // x + -0 = x
      };
      Vec16 total = ((sum(0) + sum(1)) + (sum(2) + sum(3))) + ((sum(4) + sum(5)) + (sum(6) + sum(7)));
      const int64_t n = first_out + b * kLanes, at = t * a.dim + n;
      if (residual) total = rounded(total, residual) + load_first(residual + at, a.dim - n);
      if (a.num_segments > 0) store_first(total, static_cast<float*>(a.out) + at, a.dim - n);
      else store_first(total, static_cast<Float*>(a.out) + at, a.dim - n);
    }
}

template <class Float>
void moe_experts(const MoeExpertsArgs& a) {
  const Plan<Float> plan = make_plan<Float>(a);
  const int64_t num_hidden = a.num_rows * (a.top_k * a.width + (a.shared_gate_up ? a.shared_width : 0));

  const int64_t down_work = num_hidden * a.dim / std::min<int64_t>(a.num_rows, 4);
  std::vector<std::pair<const Expert<Float>*, Panel>> gate_up_panels;
  for (size_t e = plan.experts.size(); e-- > 0;) {  // the shared expert's, which are the largest tasks, first
    const Expert<Float>& expert = plan.experts[e];
    const int64_t num_blocks = num_blocks_of(2 * expert.width);
    const int64_t num_panels = num_panels_of(num_blocks);
    for (int64_t i = 0; i < num_panels; ++i) gate_up_panels.push_back({&expert, panel_of(i, num_blocks)});
  }
  const Segments segments(a.dim);
  run_tasks(threads_for(2 * down_work, a.num_threads), gate_up_panels.size(), [&](int64_t i, int) {
    const auto& [expert, panel] = gate_up_panels[i];
    gate_up_panel(plan, *expert, a.dim, segments, panel.block, panel.width);
  });

  const int64_t num_routed = a.num_rows * a.top_k;
  const int swiglu_threads = threads_for(num_hidden * kExpWork, a.num_threads);
  run_shares(swiglu_threads, plan.row.size(), [&](int64_t begin, int64_t end, int) {
    for (int64_t pair = begin; pair < end; ++pair)
      swiglu_pair<Float>(plan.hidden[pair], pair < num_routed ? a.width : a.shared_width);
  });

  const int num_threads = threads_for(down_work, a.num_threads);
  const int64_t sums_size = a.num_rows * plan.num_down_segments * kTileBlocks * kLanes;
  const Floats sums = new_floats(num_threads * sums_size);
  const int64_t num_blocks = num_blocks_of(a.dim);
  run_tasks(num_threads, num_panels_of(num_blocks), [&](int64_t i, int thread) {
    const Panel panel = panel_of(i, num_blocks);
    with_panel_width(panel.width, [&](auto blocks) {
      down_panel<Float, blocks>(a, plan, panel.block, sums.get() + thread * sums_size);
    });
  });
}

}  // namespace

int moe_experts_cpu(const MoeExpertsArgs& args) {
  MoeExpertsArgs a = with_rows_in_use(args);
  if (!shares_fit(a)) return kUnsupported;
  if (a.int4 && (a.dtype != kBF16 || a.dim % kInt4Unit || a.width % kInt4Unit)) return kUnsupported;
  std::vector<bool> is_wanted(a.num_experts);
  for (int64_t i = 0; i < a.num_rows * a.top_k; ++i) {
    if (a.expert_id[i] < 0 || a.expert_id[i] >= a.num_experts) return kOutOfRange;
    is_wanted[a.expert_id[i]] = true;
  }
  UnpackedInt4 gate_up, down;
  if (a.int4) {
    gate_up = unpack_int4(a.gate_up, a.num_experts, 2 * a.width, a.dim, is_wanted, a.num_threads);
    down = unpack_int4(a.down, a.num_experts, a.dim, a.width, is_wanted, a.num_threads);
    a.gate_up = gate_up.get(), a.down = down.get(), a.int4 = false;
  }
  const int64_t element = a.dtype == kF32 ? 4 : 2, out_element = a.num_segments > 0 ? 4 : element;
  for (int64_t row = 0; row < a.num_rows; row += kChunkRows) {
    MoeExpertsArgs chunk = a;
    chunk.num_rows = std::min(kChunkRows, a.num_rows - row);
    chunk.x = static_cast<const char*>(a.x) + row * a.dim * element;
    chunk.out = static_cast<char*>(a.out) + row * a.dim * out_element;
    if (a.residual) chunk.residual = static_cast<const char*>(a.residual) + row * a.dim * element;
    chunk.expert_id = a.expert_id + row * a.top_k;
    chunk.weight = a.weight + row * a.top_k;
    a.dtype == kF32 ? moe_experts<float>(chunk) : moe_experts<Bf16>(chunk);
  }
  return kOk;
}

}  // namespace kdtree
