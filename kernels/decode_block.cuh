// A block of decode_layers. A phase has three parts: rows of x come to shared memory, or what else every block needs whole; then
// the products of its tiles; then all blocks meet. Parts that several phases have stand once, or the instructions of a layer would
// no longer fit their cache.
#pragma once
#include "decode_experts.cuh"
#include "decode_meet.cuh"
#include "decode_products.cuh"
#include "decode_rows.cuh"
#include "latent_row.cuh"
#include "swiglu.cuh"
#include "verify_attn_few.cuh"
#include "verify_attn_fold_head.cuh"

namespace kdtree {

constexpr int kFoldAt = 16384;  // in the phase's memory, behind the rows
static_assert(kFoldAt >= kMaxDecodeRows * row_pitch(kFoldHeadLatent) && kFoldAt + kFoldHeadBytes <= kSumsAt);
static_assert(sizeof(FewShared<1>) <= kPhaseBytes);

struct DecodeBlock {
  const DecodeArgs& k;
  const DecodeLayersArgs& a;
  unsigned char* const memory;        // of the phase, kPhaseBytes
  Chosen& chosen;
  FewPlan& plan;                      // of attention, the same for all layers
  const Dealt dealt;
  const int warp, lane, num_rows;
  const uint32_t rows;                // shared address of `memory`
  WeightRing ring;
  Meeting meeting;
  int layer = 0;

  __device__ __forceinline__ DecodeBlock(const DecodeArgs& k, unsigned char* shared)
      : k(k), a(k.a), memory(shared + kPhaseAt), chosen(*reinterpret_cast<Chosen*>(shared + kChosenAt)),
        plan(*reinterpret_cast<FewPlan*>(shared + kPlanAt)),
        dealt{int(blockIdx.x), int(gridDim.x), int(threadIdx.x) / kWarp}, warp(threadIdx.x / kWarp), lane(threadIdx.x % kWarp),
        num_rows(rows_in_use(k.a.num_rows_device, k.a.num_rows)), rows(shared_address(shared + kPhaseAt)),
        ring(Jobs(k, chosen, dealt), shared_address(shared) + warp * kRingSlots * kSlotBytes,
             shared_address(shared) + kBarriersAt + warp * kRingSlots * 8),
        meeting(k.scratch.num_met, gridDim.x) {}

  __device__ __forceinline__ const DecodeLayer& weights() const { return k.layers[layer]; }
  __device__ __forceinline__ Bf16* x(int row) const { return static_cast<Bf16*>(a.x) + row * a.dim; }

  __device__ __forceinline__ void run() {
    ring.fill();
    if (warp == 0) {
      const FewPlan found = plan_few(k.attention, k.costs, look_at_stream(k.attention), dealt.num_blocks, lane);
      if (lane == 0) plan = found;
    }
#pragma unroll 1
    for (layer = 0; layer < a.num_layers; ++layer)
#pragma unroll 1
      for (int phase = a.first_phase; phase < a.end_phase; ++phase) {
        if (phase == kJoint || phase == kQueryPhase || phase == kRouter) norm(phase);
        else if (phase == kAbsorb || phase == kOutput || phase == kDown) copy(phase);
        else if (phase == kUp) choose();
        __syncthreads();
        if (phase == kJoint || phase == kQueryPhase || phase == kValues || phase == kRouter) segments(phase);
        else if (phase == kAbsorb || phase == kOutput) halves(phase);
        else if (phase == kLeaves) attend_few<1>(k.attention, plan, weights().cache, memory, dealt.block, dealt.num_blocks);
        else if (phase == kUp) up();
        else if (phase == kDown) down();
        meeting.come();
        meeting.wait();
      }
  }

  // --- rows --------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void norm(int phase) const {
    const bool of_queries = phase == kQueryPhase;
    const DecodeLayer& w = weights();
    const int dim = int(of_queries ? a.query_dim : a.dim);
    const Bf16* from = of_queries ? k.scratch.q_kv : x(0);
    DecodeNorm norm(dim);
    norm.read_weight(static_cast<const Bf16*>(of_queries ? w.q_norm : phase == kJoint ? w.norm : w.moe_norm));
    norm_rows(norm, memory, from, of_queries ? k.sizes.joint_tiles * kTileOut : dim, num_rows, dim,
              of_queries ? a.latent_eps : a.eps);
  }

  __device__ __forceinline__ void copy(int phase) const {
    const int num_in = phase == kAbsorb ? int(a.num_heads * a.nope_dim) : phase == kOutput ? k.sizes.value_units * kUnitInputs
                                                                                          : int(a.width);
    const int count = phase == kDown ? num_rows * int(a.top_k) : num_rows;
    const Bf16* from = phase == kAbsorb ? k.scratch.q : phase == kOutput ? k.scratch.value : k.scratch.hidden;
    copy_rows(memory, row_pitch(num_in), from, phase == kAbsorb ? k.sizes.query_tiles * kTileOut : num_in, count, num_in);
    if (phase == kDown)
      copy_rows(memory + count * row_pitch(num_in), row_pitch(int(a.shared_width)), k.scratch.shared_hidden, a.shared_width, num_rows,
                int(a.shared_width));
  }

  // --- results -----------------------------------------------------------------------------------------------------

  // f(row, output, element of the sums) of a tile, for rows in use.
  template <class F>
  __device__ __forceinline__ void each(int tile, F&& f) const {
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (Sums::row(lane, e) < num_rows) f(Sums::row(lane, e), tile * kTileOut + Sums::out(lane, e), e);
  }

  __device__ __forceinline__ void store(Bf16* to, int stride, int tile, const Sums& sums) const {
    each(tile, [&](int row, int out, int e) { to[row * stride + out] = from_float<Bf16>(sums.value[e]); });
  }

  // x += sums, each rounded.
  __device__ __forceinline__ void add_to_x(int tile, const Sums& sums) const {
    each(tile, [&](int row, int out, int e) {
      Bf16* at = x(row) + out;
      const float before = to_float(__ushort_as_bfloat16(__ldcg(reinterpret_cast<const unsigned short*>(at))));
      *at = from_float<Bf16>(__fadd_rn(to_float(from_float<Bf16>(sums.value[e])), before));
    });
  }

  using SharedSums = float4[kDecodeWarps][kWarp];

  __device__ __forceinline__ SharedSums* shared_sums() const { return reinterpret_cast<SharedSums*>(memory + kSumsAt); }

  __device__ __forceinline__ Sums sum_of_segments(const SharedSums& sums) const {
    Sums v[kNumSegments];
#pragma unroll
    for (int s = 0; s < kNumSegments; ++s) as_sums(sums[s][lane], v[s]);
    return add_on_tree(v);
  }

  static __device__ __forceinline__ void as_sums(const float4& from, Sums& to) {
    to.value[0] = from.x, to.value[1] = from.y, to.value[2] = from.z, to.value[3] = from.w;
  }
  static __device__ __forceinline__ float4 as_vector(const Sums& from) {
    return make_float4(from.value[0], from.value[1], from.value[2], from.value[3]);
  }

  // --- a segment of a tile for each warp ---------------------------------------------------------------------------

  __device__ __forceinline__ void segments(int phase) {
    const bool is_router = phase == kRouter, folds = phase == kValues;
    const DecodeSizes& z = k.sizes;
    const int num_units = phase == kQueryPhase ? z.query_units : folds ? z.latent_units : z.dim_units;
    const int num_tiles = phase == kJoint ? z.joint_tiles : phase == kQueryPhase ? z.query_tiles : folds ? z.value_tiles
                                                                              : z.router_tiles + 2 * z.shared_tiles;
    Bf16* const to = phase == kJoint ? k.scratch.q_kv : phase == kQueryPhase ? k.scratch.q : k.scratch.value;
    const RowPlace place(rows, row_pitch(num_units * kUnitInputs), num_rows, lane);
#pragma unroll 1
    for (int n = 0;; ++n) {
      const int at = is_router ? dealt.segment(n) : 0, tile = is_router ? at / kNumSegments : dealt.block + n * dealt.num_blocks;
      if (tile >= num_tiles) break;
      if (folds) fold_rows(tile / (int(a.value_dim) / kTileOut));
      const DecodeSpan span = segment_units(num_units, is_router ? at % kNumSegments : warp);
      Sums mine;
      constexpr int kUnits = units_of_slot(Weights::kFloats);
#pragma unroll 1
      for (int u = span.begin; u < span.end; u += kUnits) {
        const uint32_t slot = ring.take();
#pragma unroll
        for (int i = 0; i < kUnits; ++i)
          if (u + i < span.end) add_floats(mine, slot + i * kBf16UnitBytes, place.unit(u + i), lane);
        ring.give_back();
      }
      if (is_router) {
        __stcg(reinterpret_cast<float4*>(k.scratch.sums) + at * kWarp + lane, as_vector(mine));
        continue;
      }
      shared_sums()[n % 2][warp][lane] = as_vector(mine);
      __syncthreads();
      if (warp == 0) store(to, num_tiles * kTileOut, tile, sum_of_segments(shared_sums()[n % 2]));
    }
    if (phase == kQueryPhase) append_latents();
  }

  // Every block has read the joint rows; the last blocks, whose tiles are fewer, have a row each to put into the cache.
  __device__ __forceinline__ void append_latents() const {
    const int row = dealt.num_blocks - 1 - dealt.block;
    if (row >= num_rows) return;
    LatentAppendArgs latent{};
    latent.position = a.position, latent.stream = a.stream, latent.slot = a.slot, latent.cos_sin = a.cos_sin;
    latent.cache = weights().cache, latent.num_streams = 1, latent.num_slots = a.num_slots, latent.latent_dim = a.latent_dim;
    latent.rope_dim = a.rope_dim, latent.num_positions = a.num_positions;
    const Bf16* joint = k.scratch.q_kv + row * k.sizes.joint_tiles * kTileOut + a.query_dim;
    Bf16* const to = slot_of<Bf16>(latent, row);
    DecodeNorm norm(int(a.latent_dim));
    norm.read_weight(static_cast<const Bf16*>(weights().kv_norm));
    norm.read_row(joint);
    norm.write(to, a.latent_eps);
    turn_key(latent, row, joint + a.latent_dim, to == nullptr ? to : to + a.latent_dim);
  }

  // --- four segments of a tile for each warp -----------------------------------------------------------------------

  __device__ __forceinline__ void halves(int phase) {
    const bool absorbs = phase == kAbsorb;
    const DecodeSizes& z = k.sizes;
    const int num_units = absorbs ? z.nope_units : z.value_units, num_tiles = absorbs ? z.absorb_tiles : z.dim_tiles;
    const int tiles_of_head = z.latent_units * 2, pitch = row_pitch(absorbs ? int(a.num_heads * a.nope_dim) : num_units * kUnitInputs);
    const DecodeSpan mine_units = half_units(num_units, dealt.half());
    constexpr int kUnits = units_of_slot(Weights::kFloats);
#pragma unroll 1
    for (int n = 0, tile; (tile = dealt.tile_of_two(n)) < num_tiles; ++n) {
      const int head = absorbs ? tile / tiles_of_head : 0;
      const RowPlace place(rows + head * num_units * kUnitInputs * 2, pitch, num_rows, lane);
      SumOfFour four;
      Sums mine;
      int s = 0;
      DecodeSpan span = segment_units(num_units, dealt.half() * kHalfSegments);
#pragma unroll 1
      for (int u = mine_units.begin; u < mine_units.end; u += kUnits) {
        const uint32_t slot = ring.take();
#pragma unroll 1
        for (int i = 0; i < kUnits && u + i < mine_units.end; ++i) {
          while (u + i >= span.end) {  // the segment has ended, or is empty
            four.take(s, mine), mine = Sums();
            span = segment_units(num_units, dealt.half() * kHalfSegments + ++s);
          }
          add_floats(mine, slot + i * kBf16UnitBytes, place.unit(u + i), lane);
        }
        ring.give_back();
      }
#pragma unroll 1
      for (; s < kHalfSegments - 1; ++s) four.take(s, mine), mine = Sums();
      four.take(s, mine);
      if (!joins(mine)) continue;
      if (absorbs) store(k.scratch.q_latent, num_tiles * kTileOut, tile, mine);
      else add_to_x(tile, mine);
    }
    if (absorbs) turn_queries();
  }

  // The first of two warps adds what the second has; true for the first. The second goes on when the first has read.
  __device__ __forceinline__ bool joins(Sums& mine) const {
    float4& between = shared_sums()[0][warp / 2][lane];
    if (dealt.half() == 1) between = as_vector(mine);
    meet_two();
    if (dealt.half() == 0) {
      Sums other;
      as_sums(between, other);
#pragma unroll
      for (int e = 0; e < 4; ++e) mine.value[e] = __fadd_rn(mine.value[e], other.value[e]);
    }
    meet_two();
    return dealt.half() == 0;
  }
  __device__ __forceinline__ void meet_two() const { asm volatile("bar.sync %0, 64;" ::"r"(1 + warp / 2) : "memory"); }

  // The rotary parts of the queries, by the last blocks.
  __device__ __forceinline__ void turn_queries() const {
    const int half = int(a.rope_dim) / 2, pairs = int(a.num_heads) * half;
#pragma unroll 1
    for (int i = (dealt.num_blocks - 1 - dealt.block) * kDecodeThreads + threadIdx.x; i < num_rows * pairs;
         i += dealt.num_blocks * kDecodeThreads) {
      const int row = i / pairs, head = i % pairs / half, at = i % half;
      const Bf16* from = k.scratch.q + row * k.sizes.query_tiles * kTileOut + a.num_heads * a.nope_dim + head * a.rope_dim;
      Bf16* to = k.scratch.q_rope + (row * a.num_heads + head) * a.rope_dim;
      const int32_t position = a.position[row];
      if (position < 0 || position >= a.num_positions) to[at] = to[at + half] = from_float<Bf16>(__int_as_float(0x7fffffff));
      else rotate_pair(from, a.cos_sin + position * a.rope_dim, to, at, half);
    }
  }

  // --- attention ---------------------------------------------------------------------------------------------------

  // Of all rows the queries of a head: the leaves' sums added up and rounded, into shared memory. All threads.
  __device__ __forceinline__ void fold_rows(int head) const {
#pragma unroll 1
    for (int row = 0; row < num_rows; ++row)
      fold_head<Bf16>(k.attention, row * int(a.num_heads) + head, reinterpret_cast<float*>(memory + kFoldAt),
                reinterpret_cast<Bf16*>(memory + row * row_pitch(int(a.latent_dim))));
  }

  // --- experts -----------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void choose() {
    choose_experts(k, weights().bias, num_rows, memory, chosen);
    ring.jobs.num_routed = layer + 1;
    ring.fill();
  }

  static __device__ __forceinline__ float rounded_swiglu(float gate, float up) {
    return swiglu_of(to_float(from_float<Bf16>(gate)), to_float(from_float<Bf16>(up)));
  }

  __device__ __forceinline__ void up() {
    const int gates = k.sizes.gate_tiles, num_items = chosen.num_experts * gates;
    const DecodeSpan span = segment_units(k.sizes.dim_units, warp);
    const RowPlace place(rows, row_pitch(int(a.dim)), num_rows, lane);
    constexpr int kUnits = units_of_slot(Weights::kPair);
#pragma unroll 1
    for (int item = dealt.block; item < num_items; item += dealt.num_blocks) {
      Sums mine[2];
#pragma unroll 1
      for (int u = span.begin; u < span.end; u += kUnits) {
        const uint32_t slot = ring.take();
#pragma unroll
        for (int i = 0; i < kUnits; ++i)
          if (u + i < span.end) {
            const uint4 row = place.unit(u + i);
            add_int4(mine[0], slot + 2 * i * kInt4BlockBytes, row, lane);
            add_int4(mine[1], slot + (2 * i + 1) * kInt4BlockBytes, row, lane);
          }
        ring.give_back();
      }
      if (item > dealt.block) __syncthreads();  // the sums of the item before have been read
      shared_sums()[0][warp][lane] = as_vector(mine[0]), shared_sums()[1][warp][lane] = as_vector(mine[1]);
      __syncthreads();
      if (warp > 0) continue;
      const Sums gate = sum_of_segments(shared_sums()[0]), up = sum_of_segments(shared_sums()[1]);
      const int i = item / gates;
      each(item - i * gates, [&](int row, int out, int e) {
        const int pair = chosen.pair[i][row];
        if (pair >= 0)
          k.scratch.hidden[(row * a.top_k + pair) * a.width + out] = from_float<Bf16>(rounded_swiglu(gate.value[e], up.value[e]));
      });
    }
    shared_swiglu();
  }

  // The shared expert's swiglu, by the last blocks.
  __device__ __forceinline__ void shared_swiglu() const {
    const int width = int(a.shared_width), gates = k.sizes.router_tiles, ups = gates + k.sizes.shared_tiles;
#pragma unroll 1
    for (int i = (dealt.num_blocks - 1 - dealt.block) * kDecodeThreads + threadIdx.x; i < num_rows * width;
         i += dealt.num_blocks * kDecodeThreads) {
      const int row = i / width, out = i % width;
      const float gate = router_sum(k.scratch.sums, gates + out / kTileOut, out % kTileOut, row);
      const float up = router_sum(k.scratch.sums, ups + out / kTileOut, out % kTileOut, row);
      k.scratch.shared_hidden[row * width + out] = from_float<Bf16>(rounded_swiglu(gate, up));
    }
  }

  // Four segments of every expert, weighted, then of the shared one; two warps have a tile.
  __device__ __forceinline__ void down() {
    const int top_k = int(a.top_k), pitch = row_pitch(int(a.width)), shared_pitch = row_pitch(int(a.shared_width));
    const uint32_t shared_rows = rows + num_rows * top_k * pitch;
    const int own = lane / 4, first_row = Sums::row(lane, 0);
#pragma unroll 1
    for (int n = 0, tile; (tile = dealt.tile_of_two(n)) < k.sizes.dim_tiles; ++n) {
      Sums total[kHalfSegments];
#pragma unroll 1
      for (int i = 0; i < chosen.num_experts; ++i) {
        const int pair = own < num_rows ? chosen.pair[i][own] : -1;
        const RowPlace place(pair < 0 ? 0u : rows + (own * top_k + pair) * pitch + lane % 4 * 4);
        RowWeights weight;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int chosen_pair = first_row + j < num_rows ? chosen.pair[i][first_row + j] : -1;
          weight.value[j] = chosen_pair < 0 ? 0.0f : chosen.weight[(first_row + j) * top_k + chosen_pair];
          weight.is_used[j] = chosen_pair >= 0;
        }
        add_half<Weights::kInt4>(total, place, weight, k.sizes.width_units);
      }
      add_half<Weights::kFloats>(total, RowPlace(shared_rows, shared_pitch, num_rows, lane), {{1.0f, 1.0f}, {true, true}},
                                 k.sizes.shared_units);
      Sums mine;
#pragma unroll
      for (int e = 0; e < 4; ++e)
        mine.value[e] = __fadd_rn(__fadd_rn(total[0].value[e], total[1].value[e]), __fadd_rn(total[2].value[e], total[3].value[e]));
      if (joins(mine)) add_to_x(tile, mine);
    }
  }

  // Of the two rows whose sums a lane has.
  struct RowWeights {
    float value[2];
    bool is_used[2];
  };

  static __device__ __forceinline__ void add_weighted(Sums& total, const RowWeights& weight, const Sums& sums) {
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (weight.is_used[e % 2]) total.value[e] = __fmaf_rn(weight.value[e % 2], sums.value[e], total.value[e]);
  }

  template <Weights kind>
  static __device__ __forceinline__ void add_unit(Sums& sums, uint32_t weights, const uint4& x, int lane) {
    if constexpr (kind == Weights::kFloats) add_floats(sums, weights, x, lane);
    else add_int4(sums, weights, x, lane);
  }

  // total += weight * the segments' sums. num_units is a multiple of 8, so that all segments are as long; those of one unit are
  // computed side by side.
  template <Weights kind>
  __device__ __forceinline__ void add_half(Sums (&total)[kHalfSegments], const RowPlace& x, const RowWeights& weight, int num_units) {
    constexpr int kUnits = units_of_slot(kind), kBytes = kind == Weights::kFloats ? kBf16UnitBytes : kInt4BlockBytes;
    constexpr int kSide = kUnits < kHalfSegments ? kUnits : kHalfSegments;
    const int length = num_units / kNumSegments, begin = dealt.half() * kHalfSegments * length;
    if (length == 1) {
#pragma unroll
      for (int first = 0; first < kHalfSegments; first += kSide) {
        const uint32_t slot = ring.take();
        Sums sums[kSide];
#pragma unroll
        for (int i = 0; i < kSide; ++i) add_unit<kind>(sums[i], slot + i * kBytes, x.unit(begin + first + i), lane);
#pragma unroll
        for (int i = 0; i < kSide; ++i) add_weighted(total[first + i], weight, sums[i]);
        ring.give_back();
      }
      return;
    }
    uint32_t slot = 0;
    int in_slot = kUnits;
#pragma unroll 1
    for (int s = 0; s < kHalfSegments; ++s) {
      Sums sums;
#pragma unroll 1
      for (int u = 0; u < length; ++u) {
        if (in_slot == kUnits) slot = ring.take(), in_slot = 0;
        add_unit<kind>(sums, slot + in_slot * kBytes, x.unit(begin + s * length + u), lane);
        const bool is_last = s == kHalfSegments - 1 && u + 1 == length;
        if (++in_slot == kUnits || is_last) ring.give_back();
      }
#pragma unroll
      for (int t = 0; t < kHalfSegments; ++t)
        if (t == s) add_weighted(total[t], weight, sums);
    }
  }
};

}  // namespace kdtree
