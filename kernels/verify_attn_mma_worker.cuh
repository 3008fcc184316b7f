// One item of attn_mma_kernel: scores, softmax, values. See verify_attn_mma.cuh.
#pragma once
#include "verify_attn_mma_keys.cuh"
#include "verify_attn_softmax.cuh"

namespace kdtree {

// One item of M queries. The arrays live in registers: every index is known at compile time.
template <class S, int M>
struct MmaWorker {
  static constexpr int kKeys = S::kKeys, kRowTiles = M / 16, kSlices = M / 8, kColumnTiles = S::kWarpColumns / 8;
  static constexpr int kScoreTiles = kRowTiles >= 2 ? kRowTiles / 2 : 1;  // 16-query tiles of a warp in Q K^T
  static constexpr int kScoreBlocks = kRowTiles >= 2 || S::kKeyBlocks == 1 ? S::kKeyBlocks : S::kKeyBlocks / 2;
  static constexpr int kAhead = S::kStages - 1;  // tiles on their way
  static constexpr int kFirstTiles = 2;  // on their way before the first score; their issue alone takes a while
  static_assert(kAhead >= kFirstTiles);

  const AttnLaunch& launch;
  const AttnPlan& plan;
  AttnWork& work;
  unsigned char* const memory;
  const uint32_t base = shared_address(memory);
  const int thread = for_this_item(int(threadIdx.x)), warp = thread / kWarp, lane = thread % kWarp;
  const int group = lane / 4, pair = lane % 4;
  const int quarter = warp % 4, half = warp / 4;
  const int score_tile = kRowTiles >= 2 ? half * kScoreTiles : 0;     // first 16-query tile of this warp in Q K^T
  const int score_block = kRowTiles >= 2 || S::kKeyBlocks == 1 ? 0 : half * kScoreBlocks;
  const bool scores = kRowTiles >= 2 || S::kKeyBlocks > 1 || half == 0;
  const int slice = warp;  // its queries in the softmax: 8 * slice …
  const bool softmaxes = warp < kSlices;
  const bool values = S::kValueWarps == 8 || warp < S::kValueWarps;
  const uint32_t key_at = base + ((lane & 7) + ((lane >> 4) << 3)) * S::kPitch + ((lane >> 3) & 1) * 16 +
                          quarter * S::kQuarterSteps * 32 + score_block * 16 * S::kPitch;
  const uint32_t value_at = base + (lane & 15) * S::kPitch + (lane >> 4) * 16 + warp * S::kWarpColumns * 2;
  const uint32_t probs_at = base + S::kProbs + ((lane >> 3) & 1) * S::kProbsSlice + (lane >> 4) * 128 + (lane & 7) * 16;
  const uint32_t exchange_to = base + S::kExchange + quarter * (S::kKeyBlocks * 512) + lane * 16 + score_block * 512;
  const uint32_t exchange_from = base + S::kExchange + slice * S::kExchangeSlice + lane * 16;

  int num_tiles = 0;
  const MmaKeys<S> keys{work, thread, base};
  uint32_t query[kScoreTiles][S::kQuarterSteps][4];
  float acc[kRowTiles][kColumnTiles][4];
  RowMaximum row;  // of query 8 * slice + group
  float v[S::kKeyBlocks * 4];

  __device__ MmaWorker(const AttnLaunch& launch, const AttnPlan& plan, AttnWork& work, unsigned char* memory)
      : launch(launch), plan(plan), work(work), memory(memory) {}

  __device__ __forceinline__ void run() {
    const AttnItem& item = work.item;
    num_tiles = (item.end - item.begin + kKeys - 1) / kKeys;
    load_queries();  // first: they are few, and what is loaded first comes first
#pragma unroll 1
    for (int i = 0; i < kFirstTiles; ++i) keys.load_tile(i, num_tiles, i * S::kTileBytes);
    clear();
    if (thread == 0) work.next_ticket = draw_ticket(launch, plan);
    run_tiles();
    cp_async_wait<0>();
  }

  // --- queries ------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ bool step_exists(int k) const {
    return S::kSteps % kQuarters == 0 || quarter * S::kQuarterSteps + k < S::kSteps;
  }

  // A fragments of this warp's queries over its quarter of [q_latent, q_rope]; zero past the last query.
  __device__ __forceinline__ void load_queries() {
    const VerifyAttnArgs& a = launch.a;
    const int column = quarter * S::kQuarterSteps * 16 + 2 * pair;
#pragma unroll
    for (int m = 0; m < kScoreTiles; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = (score_tile + m) * 16 + group + 8 * h;
        const int64_t q = launch.query_begin + work.item.first_query + row;
        const auto* latent = static_cast<const __nv_bfloat16*>(a.q_latent) + q * S::kLatent + column;
        const auto* rope = static_cast<const __nv_bfloat16*>(a.q_rope) + q * S::kRope + column - S::kLatent;
        const bool used = row < work.item.num_queries;
#pragma unroll
        for (int k = 0; k < S::kQuarterSteps; ++k) {
          const auto* from = (quarter * S::kQuarterSteps + k) * 16 < S::kLatent ? latent : rope;
          const bool exists = used && step_exists(k);
          query[m][k][h] = exists ? *reinterpret_cast<const uint32_t*>(from + k * 16) : 0;
          query[m][k][h + 2] = exists ? *reinterpret_cast<const uint32_t*>(from + k * 16 + 8) : 0;
        }
      }
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) acc[m][n][c] = 0.0f;
  }

  // --- scores ------------------------------------------------------------------------------------------------------

  // Partial scores of the tile in stage `from`.
  __device__ __forceinline__ void score_tile_of(uint32_t from) {
    if (!scores) return;
#pragma unroll
    for (int b = 0; b < kScoreBlocks; ++b) score_block_of(from, b);
  }

  __device__ __forceinline__ void score_block_of(uint32_t from, int b) {
    float s[kScoreTiles][2][4];
#pragma unroll
    for (int m = 0; m < kScoreTiles; ++m)
#pragma unroll
      for (int c = 0; c < 4; ++c) s[m][0][c] = s[m][1][c] = 0.0f;
#pragma unroll
    for (int k = 0; k < S::kQuarterSteps; ++k) {
      if (!step_exists(k)) continue;
      uint32_t b16[4];
      load_matrix4(b16, key_at + from + b * 16 * S::kPitch + k * 32);
#pragma unroll
      for (int m = 0; m < kScoreTiles; ++m) {
        mma_bf16(s[m][0], query[m][k], b16[0], b16[1]);
        mma_bf16(s[m][1], query[m][k], b16[2], b16[3]);
      }
    }
#pragma unroll
    for (int m = 0; m < kScoreTiles; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        store_shared4(exchange_to + ((score_tile + m) * 2 + h) * S::kExchangeSlice + b * 512, s[m][0][2 * h],
                      s[m][0][2 * h + 1], s[m][1][2 * h], s[m][1][2 * h + 1]);
  }

  // --- softmax -----------------------------------------------------------------------------------------------------

  __device__ __forceinline__ bool starts_leaf(int tile) const {
    const int position = work.item.begin + tile * kKeys;
    return leaf_begin(position) == position;
  }
  __device__ __forceinline__ bool ends_leaf(int tile) const { return tile + 1 == num_tiles || starts_leaf(tile + 1); }

  __device__ __forceinline__ void add_quarters() {
#pragma unroll
    for (int b = 0; b < S::kKeyBlocks; ++b) {
      float4 p[kQuarters];
#pragma unroll
      for (int q = 0; q < kQuarters; ++q) p[q] = load_shared4(exchange_from + (q * S::kKeyBlocks + b) * 512);
      v[b * 4 + 0] = __fadd_rn(__fadd_rn(p[0].x, p[1].x), __fadd_rn(p[2].x, p[3].x));
      v[b * 4 + 1] = __fadd_rn(__fadd_rn(p[0].y, p[1].y), __fadd_rn(p[2].y, p[3].y));
      v[b * 4 + 2] = __fadd_rn(__fadd_rn(p[0].z, p[1].z), __fadd_rn(p[2].z, p[3].z));
      v[b * 4 + 3] = __fadd_rn(__fadd_rn(p[0].w, p[1].w), __fadd_rn(p[2].w, p[3].w));
    }
  }

  // Scores of tile i become P.
  __device__ __forceinline__ void softmax(int i) {
    add_quarters();
    const int num_left = work.item.end - work.item.begin - i * kKeys - 2 * pair;  // keys from here on that count
    float largest = -INFINITY;
#pragma unroll
    for (int j = 0; j < S::kKeyBlocks * 4; ++j) {
      v[j] = (j >> 1) * 8 + (j & 1) >= num_left ? -INFINITY : v[j];
      largest = fmaxf(largest, v[j]);
    }
    const float alpha = row.move(__fmul_rn(quad_max(largest), launch.scale_log2), starts_leaf(i));
#pragma unroll
    for (int j = 0; j < S::kKeyBlocks * 4; ++j) v[j] = exp2_approx(__fmaf_rn(v[j], launch.scale_log2, -row.maximum));
    store_probs(i, alpha);
    float sum = v[0];
#pragma unroll
    for (int j = 1; j < S::kKeyBlocks * 4; ++j) sum = __fadd_rn(sum, v[j]);
    row.sum = __fadd_rn(row.sum, quad_sum(sum));
    if (ends_leaf(i)) store_stats(i);
  }

  __device__ __forceinline__ void store_stats(int i) const {
    const AttnItem& item = work.item;
    const int query_in_item = slice * 8 + group;
    if (pair == 0 && query_in_item < item.num_queries)
      launch.stats[(item.first_query + query_in_item) * launch.max_leaves + leaf_of(item.begin + i * kKeys)] =
          make_float2(row.maximum, row.sum);
  }

  __device__ __forceinline__ void store_probs(int i, float alpha) {
    const uint32_t to = base + S::kProbs + (i & 1) * S::kProbsBytes + slice * S::kProbsSlice + group * 16 + pair * 4;
#pragma unroll
    for (int j = 0; j < S::kKeyBlocks * 2; ++j)
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(to + j * 128), "r"(pack_bf16(v[2 * j], v[2 * j + 1])) : "memory");
    const unsigned any = __ballot_sync(0xffffffffu, alpha != 1.0f);
    if (pair == 0) reinterpret_cast<float*>(memory + S::kAlpha)[(i & 1) * kMmaMaxQueries + slice * 8 + group] = alpha;
    if (lane == 0) memory[S::kFlags + (i & 1) * S::kSlices + slice] = any != 0;
  }

  // --- values ------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void rescale(int i) {
    const unsigned char* flags = memory + S::kFlags + (i & 1) * S::kSlices;
    bool any;
    if constexpr (kSlices == 8)
      any = *reinterpret_cast<const volatile uint64_t*>(flags) != 0;
    else if constexpr (kSlices == 4)
      any = *reinterpret_cast<const volatile uint32_t*>(flags) != 0;
    else
      any = *reinterpret_cast<const volatile uint16_t*>(flags) != 0;
    if (!any) return;
    const float* alpha = reinterpret_cast<const float*>(memory + S::kAlpha) + (i & 1) * kMmaMaxQueries + group;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float factor = alpha[m * 16 + h * 8];
#pragma unroll
        for (int n = 0; n < kColumnTiles; ++n)
#pragma unroll
          for (int c = 2 * h; c < 2 * h + 2; ++c) acc[m][n][c] = __fmul_rn(acc[m][n][c], factor);
      }
  }

  // acc += P V over 16 keys of the tile in stage `from`.
  __device__ __forceinline__ void add_values(int i, uint32_t from, int k) {
    if (!values) return;
    uint32_t probs[kRowTiles][4];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
      load_matrix4(probs[m], probs_at + (i & 1) * S::kProbsBytes + m * 2 * S::kProbsSlice + k * 256);
#pragma unroll
    for (int n = 0; n < kColumnTiles / 2; ++n) {
      uint32_t b[4];
      load_matrix4_transposed(b, value_at + from + k * 16 * S::kPitch + n * 32);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        mma_bf16(acc[m][2 * n], probs[m], b[0], b[1]);
        mma_bf16(acc[m][2 * n + 1], probs[m], b[2], b[3]);
      }
    }
  }

  // The leaf that tile i belongs to is complete: its sums go to the workspace.
  __device__ __forceinline__ void flush(int i) {
    const AttnItem& item = work.item;
    const int64_t leaf = leaf_of(item.begin + i * kKeys);
    float* to = launch.partials + (leaf * launch.num_queries + item.first_query + group) * S::kLatent;
    to += warp * S::kWarpColumns + 2 * pair;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        if (values && m * 16 + h * 8 + group < item.num_queries)
#pragma unroll
          for (int n = 0; n < kColumnTiles; ++n)
            *reinterpret_cast<float2*>(to + (m * 16 + h * 8) * S::kLatent + n * 8) =
                make_float2(acc[m][n][2 * h], acc[m][n][2 * h + 1]);
    clear();
  }

  // --- the schedule ------------------------------------------------------------------------------------------------

  // The stage `ahead` tiles behind the one at hand, in the ring of stages.
  static __device__ __forceinline__ uint32_t stage_after(uint32_t stage, int ahead) {
    const uint32_t after = stage + ahead * S::kTileBytes;
    return after >= S::kStages * S::kTileBytes ? after - S::kStages * S::kTileBytes : after;
  }

  // Two barriers a tile: Q K^T of tile i + 1 | softmax of tile i + 1 beside P V of tile i and the loads of tile i +
  // kAhead, which would hold up the reads of Q K^T.
  __device__ __forceinline__ void run_tiles() {
    uint32_t stage = 0;
    cp_async_wait<kFirstTiles - 1>();  // tile 0 is here
    __syncthreads();
    score_tile_of(stage);
    __syncthreads();
    if (softmaxes) softmax(0);
#pragma unroll 1
    for (int i = kFirstTiles; i < kAhead; ++i) keys.load_tile(i, num_tiles, i * S::kTileBytes);
    cp_async_wait<kAhead - 2>();  // tile 1 is here
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < num_tiles; ++i) {
      if (i + 1 < num_tiles) score_tile_of(stage_after(stage, 1));
      __syncthreads();
      rescale(i);
      if (softmaxes && warp < 4 && i + 1 < num_tiles) softmax(i + 1);
      keys.load_tile(i + kAhead, num_tiles, stage_after(stage, kAhead));
      add_values(i, stage, 0);
      if (softmaxes && warp >= 4 && i + 1 < num_tiles) softmax(i + 1);
      if constexpr (S::kKeyBlocks == 2) add_values(i, stage, 1);
      cp_async_wait<S::kStages - 3>();  // tile i + 2 is here
      __syncthreads();
      if (ends_leaf(i)) flush(i);
      stage = stage_after(stage, 1);
    }
  }
};

}  // namespace kdtree
