// A block of decode_layers: the phases of a layer, one after the other. All blocks do the same phase at the same time, each its
// tiles; what every block needs whole (a norm, the choice of experts) every block computes for itself.
#pragma once
#include "decode_meet.cuh"
#include "decode_products.cuh"
#include "decode_rows.cuh"
#include "latent_row.cuh"
#include "moe_route_row.cuh"
#include "swiglu.cuh"
#include "verify_attn_fold.cuh"

namespace kdtree {

struct DecodeBlock {
  const DecodeArgs& k;
  const DecodeLayersArgs& a;
  unsigned char* const memory;
  unsigned char* const phase_memory;  // kPhaseBytes
  Chosen& chosen;
  const int block, num_blocks, warp, lane, num_rows;
  const uint32_t rows;                // shared address of phase_memory
  Asker<Jobs>& asker;
  const Dealt dealt;
  WeightRing ring;
  Meeting meeting;
  int layer = 0;

  __device__ __forceinline__ DecodeBlock(const DecodeArgs& k, unsigned char* memory, Asker<Jobs>& asker)
      : k(k), a(k.a), memory(memory), phase_memory(memory + kPhaseAt), chosen(*reinterpret_cast<Chosen*>(memory + kChosenAt)),
        block(blockIdx.x), num_blocks(gridDim.x), warp(threadIdx.x / kWarp), lane(threadIdx.x % kWarp),
        num_rows(rows_in_use(k.a.num_rows_device, k.a.num_rows)), rows(shared_address(memory + kPhaseAt)),
        asker(asker), dealt{block, num_blocks, warp},
        ring(asker, shared_address(memory) + warp * kRingSlots * kSlotBytes,
             shared_address(memory) + kBarriersAt + warp * kRingSlots * 8),
        meeting(k.scratch.num_met, gridDim.x) {}

  __device__ __forceinline__ const DecodeLayer& weights() const { return k.layers[layer]; }
  __device__ __forceinline__ Bf16* x(int row) const { return static_cast<Bf16*>(a.x) + row * a.dim; }
  __device__ __forceinline__ bool is_mine(int e) const { return Sums::row(lane, e) < num_rows; }
  __device__ __forceinline__ bool runs(int phase) const { return phase >= a.first_phase && phase < a.end_phase; }

  __device__ __forceinline__ void run() {
    ring.fill();
#pragma unroll 1
    for (layer = 0; layer < a.num_layers; ++layer) {
      if (runs(kJoint)) joint();
      if (runs(kQueries)) queries();
      if (runs(kAbsorb)) absorb();
      if (runs(kLeaves)) leaves();
      if (runs(kValues)) values();
      if (runs(kOutput)) output();
      if (runs(kRouter)) router();
      if (runs(kUp)) up();
      if (runs(kDown)) down();
    }
  }

  __device__ __forceinline__ void meet() { meeting.come(), meeting.wait(); }

  // --- products ----------------------------------------------------------------------------------------------------

  // Tiles by block: store(tile, sums) of one warp, for the sum of all segments of a tile.
  template <class Store>
  __device__ __forceinline__ void tiles_by_block(int num_tiles, int num_in, const RowPlace& x, Store&& store) {
    auto* sums = reinterpret_cast<float4(*)[kDecodeWarps][kWarp]>(phase_memory + kSumsAt);
    const DecodeSpan span = segment_units(num_in / kUnitInputs, warp);
#pragma unroll 1
    for (int tile = block, n = 0; tile < num_tiles; tile += num_blocks, ++n) {
      Sums mine;
      add_segment(ring, mine, x, span.begin, span.size());
      sums[n % 2][warp][lane] = *reinterpret_cast<const float4*>(mine.value);
      __syncthreads();
      if (warp == n % kDecodeWarps) store(tile, sum_of_segments(sums[n % 2]));
    }
  }

  __device__ __forceinline__ Sums sum_of_segments(const float4 (&sums)[kDecodeWarps][kWarp]) const {
    Sums v[kNumSegments];
#pragma unroll
    for (int s = 0; s < kNumSegments; ++s) *reinterpret_cast<float4*>(v[s].value) = sums[s][lane];
    return add_on_tree(v);
  }

  // f(row, output, element of the sums) of a tile, for rows in use.
  template <class F>
  __device__ __forceinline__ void each(int tile, F&& f) const {
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (is_mine(e)) f(Sums::row(lane, e), tile * kTileOut + Sums::out(lane, e), e);
  }

  // x += sums, each rounded.
  __device__ __forceinline__ void add_to_x(int tile, const Sums& sums) const {
    each(tile, [&](int row, int out, int e) {
      Bf16* at = x(row) + out;
      const float before = to_float(__ushort_as_bfloat16(__ldcg(reinterpret_cast<const unsigned short*>(at))));
      *at = from_float<Bf16>(__fadd_rn(to_float(from_float<Bf16>(sums.value[e])), before));
    });
  }

  // --- attention ---------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void joint() {
    DecodeNorm norm(int(a.dim));
    norm.read_weight(static_cast<const Bf16*>(weights().norm));
    norm_rows(norm, phase_memory, x(0), a.dim, num_rows, int(a.dim), a.eps);
    const int num_out = k.num_joint();
    tiles_by_block(num_out / kTileOut, int(a.dim), RowPlace(rows, row_pitch(int(a.dim)), num_rows, lane),
                   [&](int tile, const Sums& sums) {
                     each(tile, [&](int row, int out, int e) {
                       k.scratch.q_kv[row * num_out + out] = from_float<Bf16>(sums.value[e]);
                     });
                   });
    meet();
  }

  // The last blocks have a row each to put into the cache.
  __device__ __forceinline__ void append_latents() {
    const int row = num_blocks - 1 - block;
    if (row >= num_rows) return;
    LatentAppendArgs latent{};
    latent.position = a.position, latent.stream = a.stream, latent.slot = a.slot, latent.cos_sin = a.cos_sin;
    latent.cache = weights().cache, latent.num_streams = 1, latent.num_slots = a.num_slots, latent.latent_dim = a.latent_dim;
    latent.rope_dim = a.rope_dim, latent.num_positions = a.num_positions;
    const Bf16* joint = k.scratch.q_kv + row * k.num_joint() + a.query_dim;
    Bf16* const to = slot_of<Bf16>(latent, row);
    DecodeNorm norm(int(a.latent_dim));
    norm.read_weight(static_cast<const Bf16*>(weights().kv_norm));
    norm.read_row(joint);
    norm.write(to, a.latent_eps);
    __syncthreads();
    turn_key(latent, row, joint + a.latent_dim, to == nullptr ? to : to + a.latent_dim);
  }

  __device__ __forceinline__ void queries() {
    append_latents();
    DecodeNorm norm(int(a.query_dim));
    norm.read_weight(static_cast<const Bf16*>(weights().q_norm));
    norm_rows(norm, phase_memory, k.scratch.q_kv, k.num_joint(), num_rows, int(a.query_dim), a.latent_eps);
    const int num_out = k.num_query();
    tiles_by_block(num_out / kTileOut, int(a.query_dim), RowPlace(rows, row_pitch(int(a.query_dim)), num_rows, lane),
                   [&](int tile, const Sums& sums) {
                     each(tile, [&](int row, int out, int e) {
                       k.scratch.q[row * num_out + out] = from_float<Bf16>(sums.value[e]);
                     });
                   });
    meet();
  }

  // The rotary parts of the queries, by the last blocks.
  __device__ __forceinline__ void turn_queries() const {
    const int half = int(a.rope_dim) / 2, pairs = int(a.num_heads) * half;
#pragma unroll 1
    for (int i = (num_blocks - 1 - block) * kDecodeThreads + threadIdx.x; i < num_rows * pairs; i += num_blocks * kDecodeThreads) {
      const int row = i / pairs, head = i % pairs / half, at = i % half;
      const Bf16* from = k.scratch.q + row * k.num_query() + a.num_heads * a.nope_dim + head * a.rope_dim;
      Bf16* to = k.scratch.q_rope + (row * a.num_heads + head) * a.rope_dim;
      const int32_t position = a.position[row];
      if (position < 0 || position >= a.num_positions) to[at] = to[at + half] = from_float<Bf16>(__int_as_float(0x7fffffff));
      else rotate_pair(from, a.cos_sin + position * a.rope_dim, to, at, half);
    }
  }

  __device__ __forceinline__ void absorb() {
    turn_queries();
    const int nope = int(a.num_heads * a.nope_dim), pitch = row_pitch(nope), tiles_of_head = int(a.latent_dim) / kTileOut;
    copy_rows(phase_memory, pitch, k.scratch.q, k.num_query(), num_rows, nope);
    __syncthreads();
#pragma unroll 1
    for (int n = 0, tile; (tile = dealt.place(n)) < int(a.num_heads) * tiles_of_head; ++n) {
      const int head = tile / tiles_of_head;
      Sums segments[kNumSegments];
      add_tile<Weights::kFloats>(ring, segments, RowPlace(rows + head * int(a.nope_dim) * 2, pitch, num_rows, lane),
                                 int(a.nope_dim) / kUnitInputs);
      const Sums sums = add_on_tree(segments);
      each(tile, [&](int row, int out, int e) {
        k.scratch.q_latent[row * a.num_heads * a.latent_dim + out] = from_float<Bf16>(sums.value[e]);
      });
    }
    meet();
  }

  __device__ __forceinline__ void leaves() { meet(); }

  // Of the query of a row and a head, all columns, by all threads: the leaves' sums added up, rounded, into shared memory.
  __device__ __forceinline__ void fold_query(int row, int head, Bf16* to) const {
    const AttnLaunch& launch = k.attention;
    const int query = row * int(a.num_heads) + head, latent = int(a.latent_dim), num_leaves = __ldcg(launch.num_leaves + row);
    const int64_t leaf_stride = launch.num_queries * launch.pitch;
    const float2* stats = launch.stats + query * launch.max_leaves;
    const QueryTotal total = total_of(stats, num_leaves, lane);
#pragma unroll 1
    for (int column = threadIdx.x * 2; column < latent; column += kDecodeThreads * 2) {
      const float* from = launch.partials + query * launch.pitch + column;
      float2 acc[kFoldSums];
#pragma unroll
      for (auto& sum : acc) sum = make_float2(0.0f, 0.0f);
#pragma unroll 1
      for (int begin = 0; begin < num_leaves; begin += kFoldSums)
#pragma unroll
        for (int j = 0; j < kFoldSums; ++j)
          if (begin + j < num_leaves) {
            const float2 v = __ldcg(reinterpret_cast<const float2*>(from + (begin + j) * leaf_stride));
            const float weight = exp2f(__fsub_rn(__ldcg(stats + begin + j).x, total.largest));
            acc[j].x = __fmaf_rn(weight, v.x, acc[j].x), acc[j].y = __fmaf_rn(weight, v.y, acc[j].y);
          }
#pragma unroll
      for (int j = 1; j < kFoldSums; ++j) acc[0].x = __fadd_rn(acc[0].x, acc[j].x), acc[0].y = __fadd_rn(acc[0].y, acc[j].y);
      const float scale = num_leaves > 0 ? total.inverse_sum : NAN;
      to[column] = from_float<Bf16>(__fmul_rn(acc[0].x, scale)), to[column + 1] = from_float<Bf16>(__fmul_rn(acc[0].y, scale));
    }
  }

  __device__ __forceinline__ void values() {
    const int latent = int(a.latent_dim), pitch = row_pitch(latent), tiles_of_head = int(a.value_dim) / kTileOut;
    auto* sums = reinterpret_cast<float4(*)[kDecodeWarps][kWarp]>(phase_memory + kSumsAt);
    const DecodeSpan span = segment_units(latent / kUnitInputs, warp);
    const RowPlace place(rows, pitch, num_rows, lane);
#pragma unroll 1
    for (int tile = block, n = 0; tile < int(a.num_heads) * tiles_of_head; tile += num_blocks, ++n) {
      for (int row = 0; row < num_rows; ++row)
        fold_query(row, tile / tiles_of_head, reinterpret_cast<Bf16*>(phase_memory + row * pitch));
      __syncthreads();
      Sums mine;
      add_segment(ring, mine, place, span.begin, span.size());
      sums[0][warp][lane] = *reinterpret_cast<const float4*>(mine.value);
      __syncthreads();
      if (warp > 0) continue;
      const Sums total = sum_of_segments(sums[0]);
      each(tile, [&](int row, int out, int e) {
        k.scratch.value[row * k.num_value() + out] = from_float<Bf16>(total.value[e]);
      });
    }
    meet();
  }

  __device__ __forceinline__ void output() {
    const int num_in = k.num_value(), pitch = row_pitch(num_in);
    copy_rows(phase_memory, pitch, k.scratch.value, num_in, num_rows, num_in);
    __syncthreads();
    const RowPlace place(rows, pitch, num_rows, lane);
#pragma unroll 1
    for (int n = 0, tile; (tile = dealt.place(n)) < int(a.dim) / kTileOut; ++n) {
      Sums segments[kNumSegments];
      add_tile<Weights::kFloats>(ring, segments, place, num_in / kUnitInputs);
      add_to_x(tile, add_on_tree(segments));
    }
    meet();
  }

  // --- experts -----------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void norm_for_experts() {
    DecodeNorm norm(int(a.dim));
    norm.read_weight(static_cast<const Bf16*>(weights().moe_norm));
    norm_rows(norm, phase_memory, x(0), a.dim, num_rows, int(a.dim), a.eps);
  }

  __device__ __forceinline__ void router() {
    norm_for_experts();
    const RowPlace place(rows, row_pitch(int(a.dim)), num_rows, lane);
    const int num_units = int(a.dim) / kUnitInputs, num_tiles = k.router_tiles() + 2 * k.shared_tiles();
#pragma unroll 1
    for (int n = 0, at; (at = dealt.place(n, kRouterShift)) < num_tiles * kNumSegments; ++n) {
      const DecodeSpan span = segment_units(num_units, at % kNumSegments);
      Sums sums;
      add_segment(ring, sums, place, span.begin, span.size());
      __stcg(reinterpret_cast<float4*>(k.scratch.sums) + at * kWarp + lane, *reinterpret_cast<const float4*>(sums.value));
    }
    meet();
  }

  // The sum of all segments that the router phase left for an output of a tile, and a row.
  __device__ __forceinline__ float router_sum(int tile, int out, int row) const {
    const int place = (out % 8 * 4 + row / 2) * 4 + out / 8 * 2 + row % 2;
    const float* from = k.scratch.sums + tile * kNumSegments * kWarp * 4 + place;
    float v[kNumSegments];
#pragma unroll
    for (int s = 0; s < kNumSegments; ++s) v[s] = __ldcg(from + s * kWarp * 4);
    return __fadd_rn(__fadd_rn(__fadd_rn(v[0], v[1]), __fadd_rn(v[2], v[3])),
                     __fadd_rn(__fadd_rn(v[4], v[5]), __fadd_rn(v[6], v[7])));
  }

  // Every block finds the same: the experts of each row, then all of them in order.
  __device__ __forceinline__ void choose_experts() {
    const int top_k = int(a.top_k), num_experts = int(a.num_experts);
    float* logits = reinterpret_cast<float*>(phase_memory + kSumsAt);
    MoeRouteArgs route{};
    route.bias = weights().bias, route.expert_id = chosen.expert_id, route.weight = chosen.weight;
    route.num_rows = num_rows, route.num_experts = num_experts, route.top_k = top_k, route.scoring = kSigmoid;
    route.renormalize = a.renormalize, route.scaling_factor = a.scaling_factor;
    const RouteSizes sizes(route);
    const RouteShared shared(route, sizes, reinterpret_cast<double*>(phase_memory + kRouteAt));
#pragma unroll 1
    for (int row = 0; row < num_rows; ++row) {
      for (int e = threadIdx.x; e < num_experts; e += kDecodeThreads) logits[e] = router_sum(e / kTileOut, e % kTileOut, row);
      __syncthreads();
      route_row(route, sizes, shared, row, logits);
      __syncthreads();
    }
    list_experts(num_rows * top_k, top_k);
  }

  __device__ __forceinline__ void list_experts(int num_pairs, int top_k) {
    constexpr int kWords = kMaxDecodeExperts / 32;
    const int thread = threadIdx.x;
    if (thread < kWords) chosen.bits[thread] = 0;
    if (thread < kMaxDecodeRows * kMaxDecodeTopK)
      for (int row = 0; row < kMaxDecodeRows; ++row) chosen.pair[thread][row] = -1;
    __syncthreads();
    const int id = thread < num_pairs ? chosen.expert_id[thread] : 0;
    if (thread < num_pairs) atomicOr(&chosen.bits[id / 32], 1u << id % 32);
    __syncthreads();
    if (thread < num_pairs) {
      int before = __popc(chosen.bits[id / 32] & ((1u << id % 32) - 1));
      for (int word = 0; word < id / 32; ++word) before += __popc(chosen.bits[word]);
      chosen.expert[before] = id;
      chosen.pair[before][thread / top_k] = static_cast<signed char>(thread % top_k);
    }
    if (thread == 0) {
      int count = 0;
      for (int word = 0; word < kWords; ++word) count += __popc(chosen.bits[word]);
      chosen.num_experts = count;
    }
    __syncthreads();
  }

  // The shared expert's swiglu, by the last blocks.
  __device__ __forceinline__ void shared_swiglu() const {
    const int width = int(a.shared_width), gates = k.router_tiles(), ups = gates + k.shared_tiles();
#pragma unroll 1
    for (int i = (num_blocks - 1 - block) * kDecodeThreads + threadIdx.x; i < num_rows * width; i += num_blocks * kDecodeThreads) {
      const int row = i / width, out = i % width;
      const float gate = router_sum(gates + out / kTileOut, out % kTileOut, row);
      const float up = router_sum(ups + out / kTileOut, out % kTileOut, row);
      k.scratch.shared_hidden[row * width + out] = from_float<Bf16>(rounded_swiglu(gate, up));
    }
  }

  static __device__ __forceinline__ float rounded_swiglu(float gate, float up) {
    return swiglu_of(to_float(from_float<Bf16>(gate)), to_float(from_float<Bf16>(up)));
  }

  __device__ __forceinline__ void up() {
    if (!runs(kRouter)) norm_for_experts();
    choose_experts();
    asker.jobs.num_routed = layer + 1;
    ring.fill();
    shared_swiglu();
    auto* sums = reinterpret_cast<float4(*)[kDecodeWarps][kWarp]>(phase_memory + kSumsAt);  // of gates and of ups
    const int gates = int(a.width) / kTileOut, num_items = chosen.num_experts * gates;
    const DecodeSpan span = segment_units(int(a.dim) / kUnitInputs, warp);
    const RowPlace place(rows, row_pitch(int(a.dim)), num_rows, lane);
#pragma unroll 1
    for (int item = block; item < num_items; item += num_blocks) {
      Sums mine[2];
      add_pair_segment(ring, mine, place, span.begin, span.size());
      if (item > block) __syncthreads();
#pragma unroll
      for (int half = 0; half < 2; ++half) sums[half][warp][lane] = *reinterpret_cast<const float4*>(mine[half].value);
      __syncthreads();
      if (warp > 0) continue;
      const Sums gate = sum_of_segments(sums[0]), up = sum_of_segments(sums[1]);
      const int i = item / gates;
      each(item % gates, [&](int row, int out, int e) {
        const int pair = chosen.pair[i][row];
        if (pair >= 0)
          k.scratch.hidden[(row * a.top_k + pair) * a.width + out] = from_float<Bf16>(rounded_swiglu(gate.value[e], up.value[e]));
      });
    }
    meet();
  }

  // Adds an expert's sums, by segments, to those rows that chose it.
  __device__ __forceinline__ void add_weighted(Sums (&total)[kNumSegments], const Sums (&sums)[kNumSegments],
                                               const float (&weight)[2], const bool (&chose)[2]) const {
#pragma unroll
    for (int s = 0; s < kNumSegments; ++s)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (chose[e % 2]) total[s].value[e] = __fmaf_rn(weight[e % 2], sums[s].value[e], total[s].value[e]);
  }

  __device__ __forceinline__ void add_expert(Sums (&total)[kNumSegments], int i, uint32_t hidden, int pitch) {
    const int top_k = int(a.top_k), own = lane / 4, pair = own < num_rows ? chosen.pair[i][own] : -1;
    Sums sums[kNumSegments];
    const RowPlace place(pair < 0 ? 0u : hidden + (own * top_k + pair) * pitch + lane % 4 * 4);
    add_tile<Weights::kInt4>(ring, sums, place, int(a.width) / kUnitInputs);
    float weight[2];
    bool chose[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = Sums::row(lane, j), chosen_pair = row < num_rows ? chosen.pair[i][row] : -1;
      chose[j] = chosen_pair >= 0;
      weight[j] = chose[j] ? chosen.weight[row * top_k + chosen_pair] : 0.0f;
    }
    add_weighted(total, sums, weight, chose);
  }

  __device__ __forceinline__ void down() {
    const int width = int(a.width), shared_width = int(a.shared_width), pitch = row_pitch(width), num_pairs = num_rows * int(a.top_k);
    copy_rows(phase_memory, pitch, k.scratch.hidden, width, num_pairs, width);
    copy_rows(phase_memory + num_pairs * pitch, row_pitch(shared_width), k.scratch.shared_hidden, shared_width, num_rows, shared_width);
    __syncthreads();
    const RowPlace shared(rows + num_pairs * pitch, row_pitch(shared_width), num_rows, lane);
    const float one[2] = {1.0f, 1.0f};
    const bool both[2] = {true, true};
#pragma unroll 1
    for (int n = 0, tile; (tile = dealt.place(n)) < int(a.dim) / kTileOut; ++n) {
      Sums total[kNumSegments], sums[kNumSegments];
#pragma unroll 1
      for (int i = 0; i < chosen.num_experts; ++i) add_expert(total, i, rows, pitch);
      add_tile<Weights::kFloats>(ring, sums, shared, shared_width / kUnitInputs);
      add_weighted(total, sums, one, both);
      add_to_x(tile, add_on_tree(total));
    }
    meet();
  }
};

}  // namespace kdtree
