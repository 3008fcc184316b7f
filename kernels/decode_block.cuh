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

// Not in line: it needs so many registers that the rest of the kernel would have too few. All it reads is in shared memory, since
// a kernel's parameters are far away from a function that is called.
__device__ __noinline__ void attend(const AttnLaunch& launch, const FewPlan& plan, const void* cache, unsigned char* memory) {
  attend_few<1>(launch, plan, cache, memory, int(blockIdx.x), int(gridDim.x));
}

struct DecodeBlock {
  const DecodeArgs& k;
  const DecodeLayersArgs& a;
  unsigned char* const memory;        // of the phase, kPhaseBytes
  Chosen& chosen;
  FewPlan& plan;                      // of attention, the same for all layers
  AttnLaunch& attention;              // k.attention
  const Dealt dealt;
  const int warp, lane, num_rows;
  const uint32_t rows;                // shared address of `memory`
  WeightRing ring;
  Meeting meeting;
  int layer = 0;

  __device__ __forceinline__ DecodeBlock(const DecodeArgs& k, unsigned char* shared)
      : k(k), a(k.a), memory(shared + kPhaseAt), chosen(*reinterpret_cast<Chosen*>(shared + kChosenAt)),
        plan(*reinterpret_cast<FewPlan*>(shared + kPlanAt)),
        attention(*reinterpret_cast<AttnLaunch*>(shared + kAttentionAt)),
        dealt{int(blockIdx.x), int(gridDim.x), int(threadIdx.x) / kWarp}, warp(threadIdx.x / kWarp), lane(threadIdx.x % kWarp),
        num_rows(rows_in_use(k.a.num_rows_device, k.a.num_rows)), rows(shared_address(shared + kPhaseAt)),
        ring(Pieces(k, chosen, dealt), shared_address(shared) + warp * kRingSlots * kSlotBytes,
             shared_address(shared) + kBarriersAt + warp * kRingSlots * 8),
        meeting(k.scratch.num_met, gridDim.x) {}

  __device__ __forceinline__ const DecodeLayer& weights() const { return k.layers[layer]; }
  __device__ __forceinline__ Bf16* x(int row) const { return static_cast<Bf16*>(a.x) + row * Dims::kDim; }

  __device__ __forceinline__ void run() {
    ring.fill();
    if (warp == 0) {
      const FewPlan found = plan_few(k.attention, k.costs, look_at_stream(k.attention), dealt.num_blocks, lane);
      if (lane == 0) plan = found, attention = k.attention;
    }
    prefetch_vectors(0), prefetch_maps(0);
#pragma unroll 1
    for (layer = 0; layer < a.num_layers; ++layer) {
      prefetch_vectors(layer + 1), prefetch_maps(layer + 1);
#pragma unroll 1
      for (int phase = a.first_phase; phase < a.end_phase; ++phase) {
        if (phase == kJoint || phase == kQueryPhase || phase == kRouter) norm(phase);
        else if (phase == kAbsorb || phase == kOutput || phase == kDown) copy(phase);
        else if (phase == kUp) choose();
        __syncthreads();
        if (phase == kJoint || phase == kQueryPhase || phase == kValues || phase == kRouter) segments(phase);
        else if (phase == kAbsorb) absorb();
        else if (phase == kLeaves) attend(attention, plan, weights().cache, memory);
        else if (phase == kOutput) output();
        else if (phase == kUp) up();
        else if (phase == kDown) down();
        meeting.come();
        meeting.wait();
      }
    }
  }

  // Norms and biases of a layer come to the L2 cache, where they are looked for in the middle of a phase.
  __device__ __forceinline__ void prefetch_vectors(int index) const {
    if (dealt.block > 0 || threadIdx.x > 0 || index >= a.num_layers) return;
    const DecodeLayer& w = k.layers[index];
    prefetch_to_l2(w.norm, Dims::kDim * 2), prefetch_to_l2(w.moe_norm, Dims::kDim * 2), prefetch_to_l2(w.q_norm, Dims::kQuery * 2);
    prefetch_to_l2(w.kv_norm, Dims::kLatent * 2);
    if (w.bias != nullptr) prefetch_to_l2(w.bias, Dims::kExperts * 4);
  }

  // A layer's maps, which every multiprocessor has to fetch.
  __device__ __forceinline__ void prefetch_maps(int index) const {
    if (threadIdx.x > 0 || index >= a.num_layers) return;
    prefetch_map(k.maps[index].gate_up), prefetch_map(k.maps[index].down);
  }

  // --- rows --------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void norm(int phase) const {
    const bool of_queries = phase == kQueryPhase;
    const DecodeLayer& w = weights();
    const int dim = of_queries ? Dims::kQuery : Dims::kDim;
    DecodeNorm norm(dim);
    norm.read_weight(static_cast<const Bf16*>(of_queries ? w.q_norm : phase == kJoint ? w.norm : w.moe_norm));
    norm_rows(norm, memory, of_queries ? k.scratch.q_kv : x(0), of_queries ? kJointOut : dim, num_rows, dim,
              of_queries ? a.latent_eps : a.eps);
  }

  __device__ __forceinline__ void copy(int phase) const {
    const int num_in = phase == kAbsorb ? Dims::kHeads * Dims::kNope : phase == kOutput ? kValueOut : Dims::kWidth;
    const int count = phase == kDown ? num_rows * Dims::kTopK : num_rows;
    const Bf16* from = phase == kAbsorb ? k.scratch.q : phase == kOutput ? k.scratch.value : k.scratch.hidden;
    copy_rows(memory, row_pitch(num_in), from, phase == kAbsorb ? kQueryOut : num_in, count, num_in);
    if (phase == kDown)
      copy_rows(memory + count * row_pitch(num_in), row_pitch(Dims::kSharedWidth), k.scratch.shared_hidden, Dims::kSharedWidth,
                num_rows, Dims::kSharedWidth);
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
    const int num_units = phase == kQueryPhase ? units_of(Dims::kQuery) : units_of(folds ? Dims::kLatent : Dims::kDim);
    const int num_tiles = phase == kJoint ? tiles_of(kJointOut) : phase == kQueryPhase ? tiles_of(kQueryOut)
                          : folds ? tiles_of(kValueOut) : kAllRouterTiles;
    Bf16* const to = phase == kJoint ? k.scratch.q_kv : phase == kQueryPhase ? k.scratch.q : k.scratch.value;
    const RowPlace place(rows, row_pitch(num_units * kUnitInputs), num_rows, lane);
#pragma unroll 1
    for (int n = 0;; ++n) {
      const int at = is_router ? dealt.segment(n) : 0, tile = is_router ? at / kNumSegments : dealt.tile(n);
      if (tile >= num_tiles) break;
      if (folds) fold_rows(tile / tiles_of(Dims::kValue));
      const DecodeSpan span = segment_units(num_units, is_router ? at % kNumSegments : warp);
      Sums mine;
#pragma unroll 1
      for (int u = span.begin; u < span.end; u += kFloatUnits) {
        add_floats<kFloatUnits>(mine, ring.take(), place, u, min(kFloatUnits, span.end - u), lane);
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
    const Bf16* joint = k.scratch.q_kv + row * kJointOut + Dims::kQuery;
    Bf16* const to = slot_of<Bf16>(latent, row);
    DecodeNorm norm(Dims::kLatent);
    norm.read_weight(static_cast<const Bf16*>(weights().kv_norm));
    norm.read_row(joint);
    norm.write(to, a.latent_eps);
    turn_key(latent, row, joint + Dims::kLatent, to == nullptr ? to : to + Dims::kLatent);
  }

  // --- four segments of a tile for each warp -----------------------------------------------------------------------

  // Of four segments two are empty: there are four units for eight.
  __device__ __forceinline__ void absorb() {
    static_assert(units_of(Dims::kNope) == kNumSegments / 2);
#pragma unroll 1
    for (int n = 0, tile; (tile = dealt.tile_of_two(n)) < tiles_of(Dims::kHeads * Dims::kLatent); ++n) {
      const int head = tile / tiles_of(Dims::kLatent);
      const RowPlace place(rows + head * Dims::kNope * 2, row_pitch(Dims::kHeads * Dims::kNope), num_rows, lane);
      const uint32_t slot = ring.take();
      Sums two[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) add_floats(two[i], slot + i * kBf16UnitBytes, place.unit(dealt.half() * 2 + i), lane);
      ring.give_back();
#pragma unroll
      for (int e = 0; e < 4; ++e)
        two[0].value[e] = __fadd_rn(__fadd_rn(0.0f, two[0].value[e]), __fadd_rn(0.0f, two[1].value[e]));
      if (joins(two[0])) store(k.scratch.q_latent, Dims::kHeads * Dims::kLatent, tile, two[0]);
    }
    turn_queries();
  }

  __device__ __forceinline__ void output() {
    static_assert(units_of(kValueOut) == kNumSegments * kFloatUnits, "a slot holds a segment");
    const RowPlace place(rows, row_pitch(kValueOut), num_rows, lane);
#pragma unroll 1
    for (int n = 0, tile; (tile = dealt.tile_of_two(n)) < tiles_of(Dims::kDim); ++n) {
      Sums mine, before, pair;
#pragma unroll 1
      for (int s = 0; s < kHalfSegments; ++s) {
        mine = Sums();
        add_floats<kFloatUnits>(mine, ring.take(), place, (dealt.half() * kHalfSegments + s) * kFloatUnits, kFloatUnits, lane);
        ring.give_back();
#pragma unroll
        for (int e = 0; e < 4; ++e) {  // (0 + 1) + (2 + 3)
          const float two = __fadd_rn(before.value[e], mine.value[e]);
          if (s % 2 == 0) before.value[e] = mine.value[e];
          else if (s == 1) pair.value[e] = two;
          else mine.value[e] = __fadd_rn(pair.value[e], two);
        }
      }
      if (joins(mine)) add_to_x(tile, mine);
    }
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
    constexpr int kHalf = Dims::kRope / 2, kPairsOfRow = Dims::kHeads * kHalf;
#pragma unroll 1
    for (int i = (dealt.num_blocks - 1 - dealt.block) * kDecodeThreads + threadIdx.x; i < num_rows * kPairsOfRow;
         i += dealt.num_blocks * kDecodeThreads) {
      const int row = i / kPairsOfRow, head = i % kPairsOfRow / kHalf, at = i % kHalf;
      const Bf16* from = k.scratch.q + row * kQueryOut + Dims::kHeads * Dims::kNope + head * Dims::kRope;
      Bf16* to = k.scratch.q_rope + (row * Dims::kHeads + head) * Dims::kRope;
      const int32_t position = a.position[row];
      if (position < 0 || position >= a.num_positions) to[at] = to[at + kHalf] = from_float<Bf16>(__int_as_float(0x7fffffff));
      else rotate_pair(from, a.cos_sin + position * Dims::kRope, to, at, kHalf);
    }
  }

  // --- attention ---------------------------------------------------------------------------------------------------

  // Of all rows the queries of a head: the leaves' sums added up and rounded, into shared memory. All threads.
  __device__ __forceinline__ void fold_rows(int head) const {
#pragma unroll 1
    for (int row = 0; row < num_rows; ++row)
      fold_head<Bf16>(k.attention, row * Dims::kHeads + head, reinterpret_cast<float*>(memory + kFoldAt),
                reinterpret_cast<Bf16*>(memory + row * row_pitch(Dims::kLatent)));
  }

  // --- experts -----------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void choose() {
    choose_experts(k, weights().bias, num_rows, memory, chosen);
    ring.pieces.num_routed = layer + 1;
    ring.fill();
  }

  static __device__ __forceinline__ float rounded_swiglu(float gate, float up) {
    return swiglu_of(to_float(from_float<Bf16>(gate)), to_float(from_float<Bf16>(up)));
  }

  __device__ __forceinline__ void up() {
    const int num_items = chosen.num_experts * kGateTiles;
    const DecodeSpan span = segment_units(units_of(Dims::kDim), warp);
    const RowPlace place(rows, row_pitch(Dims::kDim), num_rows, lane);
#pragma unroll 1
    for (int n = 0, item; (item = dealt.tile(n)) < num_items; ++n) {
      Sums mine[2];
#pragma unroll 1
      for (int u = span.begin; u < span.end; u += kPairUnits) {
        const uint32_t slot = ring.take();
        const int units = min(kPairUnits, span.end - u);
#pragma unroll 1
        for (int i = 0; i < units; i += 2)  // segments are of an even number of units
#pragma unroll
          for (int j = i; j < i + 2; ++j) {
            const uint4 row = place.unit(u + j);
            add_int4(mine[0], slot + j * kInt4BlockBytes, row, lane);
            add_int4(mine[1], slot + kUpsAt + j * kInt4BlockBytes, row, lane);
          }
        ring.give_back();
      }
      if (n > 0) __syncthreads();  // the sums of the item before have been read
      shared_sums()[0][warp][lane] = as_vector(mine[0]), shared_sums()[1][warp][lane] = as_vector(mine[1]);
      __syncthreads();
      if (warp > 0) continue;
      const Sums gate = sum_of_segments(shared_sums()[0]), up = sum_of_segments(shared_sums()[1]);
      const int i = item / kGateTiles;
      each(item % kGateTiles, [&](int row, int out, int e) {
        const int pair = chosen.pair[i][row];
        if (pair >= 0)
          k.scratch.hidden[(row * Dims::kTopK + pair) * Dims::kWidth + out] =
              from_float<Bf16>(rounded_swiglu(gate.value[e], up.value[e]));
      });
    }
    shared_swiglu();
  }
  static_assert(units_of(Dims::kDim) % (2 * kNumSegments) == 0);

  // The shared expert's swiglu, by the last blocks.
  __device__ __forceinline__ void shared_swiglu() const {
    constexpr int kOut = Dims::kSharedWidth;
#pragma unroll 1
    for (int i = (dealt.num_blocks - 1 - dealt.block) * kDecodeThreads + threadIdx.x; i < num_rows * kOut;
         i += dealt.num_blocks * kDecodeThreads) {
      const int row = i / kOut, out = i % kOut, tile = kRouterTiles + out / kTileOut;
      const float gate = router_sum(k.scratch.sums, tile, out % kTileOut, row);
      const float up = router_sum(k.scratch.sums, tile + kSharedTiles, out % kTileOut, row);
      k.scratch.shared_hidden[row * kOut + out] = from_float<Bf16>(rounded_swiglu(gate, up));
    }
  }

  // Four segments of every expert, weighted, then of the shared one; two warps have a tile.
  __device__ __forceinline__ void down() {
    constexpr int kPitch = row_pitch(Dims::kWidth), kSharedPitch = row_pitch(Dims::kSharedWidth);
    const int first_unit = dealt.half() * kDownUnits, own = lane / 4;
    const RowPlace shared(rows + num_rows * Dims::kTopK * kPitch, kSharedPitch, num_rows, lane);
#pragma unroll 1
    for (int n = 0, tile; (tile = dealt.tile_of_two(n)) < tiles_of(Dims::kDim); ++n) {
      Sums total[kHalfSegments];
#pragma unroll 1
      for (int first = 0; first < chosen.num_experts; first += kDownExperts) {
        const uint32_t slot = ring.take();
#pragma unroll 1
        for (int j = 0; j < min(kDownExperts, chosen.num_experts - first); ++j) {
          const int pair = own < num_rows ? chosen.pair[first + j][own] : -1;
          const RowPlace place(pair < 0 ? 0u : rows + (own * Dims::kTopK + pair) * kPitch + lane % 4 * 4);
          Sums sums[kHalfSegments];
#pragma unroll
          for (int u = 0; u < kDownUnits; ++u)
            add_int4(sums[u], slot + (j * kDownUnits + u) * kInt4BlockBytes, place.unit(first_unit + u), lane);
          add_weighted(total, first + j, sums);
        }
        ring.give_back();
      }
      const uint32_t slot = ring.take();
#pragma unroll
      for (int u = 0; u < kDownUnits; ++u) {
        Sums sums;
        add_floats(sums, slot + u * kBf16UnitBytes, shared.unit(first_unit + u), lane);
#pragma unroll
        for (int e = 0; e < 4; ++e) total[u].value[e] = __fmaf_rn(1.0f, sums.value[e], total[u].value[e]);
      }
      ring.give_back();
      Sums mine;
#pragma unroll
      for (int e = 0; e < 4; ++e)
        mine.value[e] = __fadd_rn(__fadd_rn(total[0].value[e], total[1].value[e]), __fadd_rn(total[2].value[e], total[3].value[e]));
      if (joins(mine)) add_to_x(tile, mine);
    }
  }

  // Adds the sums of expert i to those of a lane's two rows that chose it.
  __device__ __forceinline__ void add_weighted(Sums (&total)[kHalfSegments], int i, const Sums (&sums)[kHalfSegments]) const {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = Sums::row(lane, j), pair = row < num_rows ? chosen.pair[i][row] : -1;
      if (pair < 0) continue;
      const float weight = chosen.weight[row * Dims::kTopK + pair];
#pragma unroll
      for (int s = 0; s < kHalfSegments; ++s) {
        total[s].value[j] = __fmaf_rn(weight, sums[s].value[j], total[s].value[j]);
        total[s].value[j + 2] = __fmaf_rn(weight, sums[s].value[j + 2], total[s].value[j + 2]);
      }
    }
  }
};

}  // namespace kdtree
