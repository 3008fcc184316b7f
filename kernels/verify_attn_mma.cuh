// verify_attn with tensor cores (mma.sync, BF16) for fixed dimensions. A block of 8 warps takes M queries at a time:
//   S = Q K^T   the C + R long reduction is cut into 4 quarters of 16-element steps; a warp owns one quarter, its queries
//               stay in registers, and the 4 partial scores meet in shared memory as (p0 + p1) + (p2 + p3)
//   softmax     a warp owns 8 queries; the maximum moves only when it grows by more than 8 (in log2), so that rescaling the
//               accumulators is rare. Maxima and sums of a tile go over 4 lanes by shuffles
//   O += P V    a warp owns a share of the latent's columns for all queries
// A tile of keys comes by cp.async, 16 bytes at a time, so a path costs what a stretch of the prefix costs. Leaves
// start from nothing and end in the workspace. The order of additions is a constant of (C, R, tile length): M, skew,
// stages and the number of leaves in an item do not enter it.
#pragma once
#include "mma_bf16.cuh"
#include "verify_attn_plan.cuh"

namespace kdtree {

constexpr int kMmaThreads = 256, kMmaMaxQueries = 64, kQuarters = 4;
constexpr float kLazyMaximum = 8.0f;

template <int kLatent_, int kRope_, int kKeys_, int kStages_, bool kSkewed_>
struct MmaShape {
  static constexpr int kLatent = kLatent_, kRope = kRope_, kKeys = kKeys_, kStages = kStages_;
  static constexpr bool kSkewed = kSkewed_;                         // warps 4-7 run half a tile behind (M > 16)
  static constexpr int kRowBytes = 2 * (kLatent + kRope), kPitch = kRowBytes + 16;  // 16: no bank conflicts
  static constexpr int kSteps = (kLatent + kRope) / 16, kQuarterSteps = (kSteps + kQuarters - 1) / kQuarters;
  static constexpr int kWarpColumns = kLatent >= 128 ? kLatent / 8 : 16, kValueWarps = kLatent / kWarpColumns;
  static constexpr int kKeyBlocks = kKeys / 16, kTileBytes = kKeys * kPitch;
  static constexpr int kSlices = kMmaMaxQueries / 8;
  // shared memory
  static constexpr int kExchange = kStages * kTileBytes;  // partial scores [slice][quarter][key block][lane][4]
  static constexpr int kExchangeSlice = kQuarters * kKeyBlocks * 512;
  static constexpr int kProbs = kExchange + kSlices * kExchangeSlice;  // P, twice: [slice][8 keys][8 queries][8 keys]
  static constexpr int kProbsSlice = kKeys / 8 * 128, kProbsBytes = kSlices * kProbsSlice;
  static constexpr int kAlpha = kProbs + 2 * kProbsBytes;           // rescaling factors, twice: [query]
  static constexpr int kFlags = kAlpha + 2 * kMmaMaxQueries * 4;    // slice needs rescaling, twice: [slice]
  static constexpr int kPlan = kFlags + 2 * kSlices;
  static constexpr int kSharedBytes = kPlan + int(sizeof(AttnPlan));
  static_assert(kLatent % 16 == 0 && kRope % 16 == 0 && kLatent % kWarpColumns == 0 && kValueWarps <= 8);
  static_assert(kStages * kTileBytes >= 4 * kMaxPath && kPlan % 8 == 0);
};

// All warps meet, each at its own place in the code; __syncthreads() would want one place for all.
__device__ __forceinline__ void meet() { asm volatile("bar.sync 1, %0;" ::"n"(kMmaThreads) : "memory"); }

// A value computed anew for each item: the compiler must not keep what follows from it in registers between items.
template <class Int>
__device__ __forceinline__ Int for_this_item(Int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// One item of M queries. The arrays live in registers: every index is known at compile time.
template <class S, int M>
struct MmaWorker {
  static constexpr bool kSkewed = S::kSkewed && M > 16;
  static constexpr int kKeys = S::kKeys, kRowTiles = M / 16, kSlices = M / 8, kColumnTiles = S::kWarpColumns / 8;
  static constexpr int kScoreTiles = kRowTiles >= 2 ? kRowTiles / 2 : 1;  // 16-query tiles of a warp in Q K^T
  static constexpr int kScoreBlocks = kRowTiles >= 2 || S::kKeyBlocks == 1 ? S::kKeyBlocks : S::kKeyBlocks / 2;
  static constexpr int kAhead = kSkewed ? S::kStages - 3 : S::kStages - 1;  // tiles on their way
  static constexpr int kFirstTiles = 2;  // on their way before the first score; their issue alone takes a while
  static_assert(kSkewed ? kAhead == kFirstTiles : kAhead >= kFirstTiles);
  static constexpr int kThreadsPerKey = kMmaThreads / kKeys, kPieces = S::kRowBytes / 16;
  static constexpr int kThreadPieces = (kPieces + kThreadsPerKey - 1) / kThreadsPerKey;

  const AttnLaunch& launch;
  AttnPlan& plan;
  unsigned char* const memory;
  const uint32_t base = shared_address(memory);
  const int thread = for_this_item(int(threadIdx.x)), warp = thread / kWarp, lane = thread % kWarp;
  const int group = lane / 4, pair = lane % 4;
  const int quarter = warp % 4, half = warp / 4;
  const int load_key = thread / kThreadsPerKey, load_piece = thread % kThreadsPerKey;
  const int score_tile = kRowTiles >= 2 ? half * kScoreTiles : 0;     // first 16-query tile of this warp in Q K^T
  const int score_block = kRowTiles >= 2 || S::kKeyBlocks == 1 ? 0 : half * kScoreBlocks;
  const bool scores = kRowTiles >= 2 || S::kKeyBlocks > 1 || half == 0;
  const int slice = kSkewed ? half * (kSlices / 2) + quarter : warp;  // its queries in the softmax: 8 * slice …
  const bool softmaxes = kSkewed ? quarter < kSlices / 2 : warp < kSlices;
  const bool values = S::kValueWarps == 8 || warp < S::kValueWarps;
  const uint32_t load_at = base + load_key * S::kPitch + load_piece * 16;
  const uint32_t key_at = base + ((lane & 7) + ((lane >> 4) << 3)) * S::kPitch + ((lane >> 3) & 1) * 16 +
                          quarter * S::kQuarterSteps * 32 + score_block * 16 * S::kPitch;
  const uint32_t value_at = base + (lane & 15) * S::kPitch + (lane >> 4) * 16 + warp * S::kWarpColumns * 2;
  const uint32_t probs_at = base + S::kProbs + ((lane >> 3) & 1) * S::kProbsSlice + (lane >> 4) * 128 + (lane & 7) * 16;
  const uint32_t exchange_to = base + S::kExchange + quarter * (S::kKeyBlocks * 512) + lane * 16 + score_block * 512;
  const uint32_t exchange_from = base + S::kExchange + slice * S::kExchangeSlice + lane * 16;

  int num_tiles = 0;
  uint32_t query[kScoreTiles][S::kQuarterSteps][4];
  float acc[kRowTiles][kColumnTiles][4];
  float row_max = -INFINITY, row_sum = 0.0f;  // of query 8 * slice + group
  float v[S::kKeyBlocks * 4];

  __device__ MmaWorker(const AttnLaunch& launch, AttnPlan& plan, unsigned char* memory)
      : launch(launch), plan(plan), memory(memory) {}

  __device__ __forceinline__ void run() {
    const AttnItem& item = plan.item;
    num_tiles = (item.end - item.begin + kKeys - 1) / kKeys;
    load_queries();  // first: they are few, and what is loaded first comes first
#pragma unroll 1
    for (int i = 0; i < kFirstTiles; ++i) load_tile(i, i * S::kTileBytes);
    clear();
    if (thread == 0) draw_ticket(launch, plan);
    if constexpr (kSkewed)
      run_skewed();
    else
      run_plain();
    cp_async_wait<0>();
  }

  // --- keys and queries --------------------------------------------------------------------------------------------

  __device__ __forceinline__ const char* key_address(int tile, int& num_bytes) const {
    const AttnItem& item = plan.item;
    const int position = item.begin + tile * kKeys + load_key;
    int slot = position;
    num_bytes = 16;
    if (position - load_key + kKeys > item.plain_end) {  // the same for all threads
      const bool used = position < item.end;
      slot = !used ? 0 : position < item.prefix ? position : item.prefix + plan.path[position - item.prefix];
      num_bytes = used ? 16 : 0;  // 0: nothing is read, zeros are written
    }
    return item.keys + int64_t(slot) * S::kRowBytes + load_piece * 16;
  }

  __device__ __forceinline__ void load(uint32_t stage, const char* from, int j, int num_bytes) const {
    if (j * kThreadsPerKey + kThreadsPerKey <= kPieces || j * kThreadsPerKey + load_piece < kPieces)
      cp_async16(load_at + stage + j * kThreadsPerKey * 16, from + j * kThreadsPerKey * 16, num_bytes);
  }

  __device__ __forceinline__ void load_tile(int tile, uint32_t stage) const {
    if (tile < num_tiles) {
      int num_bytes;
      const char* from = key_address(tile, num_bytes);
#pragma unroll
      for (int j = 0; j < kThreadPieces; ++j) load(stage, from, j, num_bytes);
    }
    cp_async_commit();
  }

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
        const int64_t q = launch.row_begin * a.num_heads + plan.item.first_query + row;
        const auto* latent = static_cast<const __nv_bfloat16*>(a.q_latent) + q * S::kLatent + column;
        const auto* rope = static_cast<const __nv_bfloat16*>(a.q_rope) + q * S::kRope + column - S::kLatent;
        const bool used = row < plan.item.num_queries;
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

  // Partial scores of the tile in stage `from`; meanwhile, loads tile `next` into stage `to`.
  template <bool kLoad>
  __device__ __forceinline__ void score_tile_of(uint32_t from, int next, uint32_t to) {
    int num_bytes = 0;
    const char* source = nullptr;
    if constexpr (kLoad) source = key_address(next, num_bytes);
    if (!scores) {
#pragma unroll
      for (int j = 0; j < kThreadPieces; ++j)
        if constexpr (kLoad) load(to, source, j, num_bytes);
    } else {
#pragma unroll
      for (int b = 0; b < kScoreBlocks; ++b) score_block_of<kLoad>(from, b, to, source, num_bytes);
    }
    if constexpr (kLoad) cp_async_commit();
  }

  template <bool kLoad>
  __device__ __forceinline__ void score_block_of(uint32_t from, int b, uint32_t to, const char* source, int num_bytes) {
    float s[kScoreTiles][2][4];
#pragma unroll
    for (int m = 0; m < kScoreTiles; ++m)
#pragma unroll
      for (int c = 0; c < 4; ++c) s[m][0][c] = s[m][1][c] = 0.0f;
#pragma unroll
    for (int k = 0; k < (S::kQuarterSteps > kThreadPieces ? S::kQuarterSteps : kThreadPieces); ++k) {
      if (kLoad && b == 0 && k < kThreadPieces) load(to, source, k, num_bytes);
      if (k >= S::kQuarterSteps || !step_exists(k)) continue;
      uint32_t keys[4];
      load_matrix4(keys, key_at + from + b * 16 * S::kPitch + k * 32);
#pragma unroll
      for (int m = 0; m < kScoreTiles; ++m) {
        mma_bf16(s[m][0], query[m][k < S::kQuarterSteps ? k : 0], keys[0], keys[1]);
        mma_bf16(s[m][1], query[m][k < S::kQuarterSteps ? k : 0], keys[2], keys[3]);
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
    const int position = plan.item.begin + tile * kKeys;
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
    const bool fresh = starts_leaf(i);
    row_max = fresh ? -INFINITY : row_max;
    row_sum = fresh ? 0.0f : row_sum;
    const int num_left = plan.item.end - plan.item.begin - i * kKeys - 2 * pair;  // keys from here on that count
    float largest = -INFINITY;
#pragma unroll
    for (int j = 0; j < S::kKeyBlocks * 4; ++j) {
      v[j] = (j >> 1) * 8 + (j & 1) >= num_left ? -INFINITY : v[j];
      largest = fmaxf(largest, v[j]);
    }
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    const float new_max = __fmul_rn(largest, launch.scale_log2);
    const bool grows = new_max > __fadd_rn(row_max, kLazyMaximum);  // always, in a fresh leaf
    const float alpha = grows && !fresh ? exp2_approx(__fsub_rn(row_max, new_max)) : 1.0f;
    row_max = grows ? new_max : row_max;
    row_sum = __fmul_rn(row_sum, alpha);
#pragma unroll
    for (int j = 0; j < S::kKeyBlocks * 4; ++j) v[j] = exp2_approx(__fmaf_rn(v[j], launch.scale_log2, -row_max));
    store_probs(i, alpha);
    float sum = v[0];
#pragma unroll
    for (int j = 1; j < S::kKeyBlocks * 4; ++j) sum = __fadd_rn(sum, v[j]);
    sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 1));
    sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 2));
    row_sum = __fadd_rn(row_sum, sum);
    if (ends_leaf(i)) store_stats(i);
  }

  __device__ __forceinline__ void store_stats(int i) const {
    const AttnItem& item = plan.item;
    const int query_in_item = slice * 8 + group;
    if (pair == 0 && query_in_item < item.num_queries)
      launch.stats[(item.first_query + query_in_item) * launch.max_leaves + leaf_of(item.begin + i * kKeys)] =
          make_float2(row_max, row_sum);
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
    const AttnItem& item = plan.item;
    const int64_t leaf = leaf_of(item.begin + i * kKeys), num_queries = launch.num_rows * launch.a.num_heads;
    float* to = launch.partials + (leaf * num_queries + item.first_query + group) * S::kLatent;
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

  // --- the two schedules -------------------------------------------------------------------------------------------

  // The stage `ahead` tiles behind the one at hand, in the ring of stages.
  static __device__ __forceinline__ uint32_t stage_after(uint32_t stage, int ahead) {
    const uint32_t after = stage + ahead * S::kTileBytes;
    return after >= S::kStages * S::kTileBytes ? after - S::kStages * S::kTileBytes : after;
  }

  // Warps 4-7 run half a tile behind warps 0-3: while one group is in Q K^T, the other is in the softmax and P V. A
  // group does the softmax of the queries whose scores it computed, so only P crosses groups, and it is half a step old
  // by then.
  __device__ __forceinline__ void run_skewed() {
    uint32_t stage = 0;
    cp_async_wait<kAhead - 1>();
    meet();
    if (half) meet();
#pragma unroll 1
    for (int i = 0; i <= num_tiles; ++i) {
      if (i < num_tiles)
        score_tile_of<true>(stage, i + kAhead, stage_after(stage, kAhead));
      else
        cp_async_commit();
      if (half) cp_async_wait<kAhead - 1>();  // tile i + 1 is here
      meet();
      if (i > 0) {
        rescale(i - 1);
#pragma unroll
        for (int k = 0; k < S::kKeyBlocks; ++k) add_values(i - 1, stage_after(stage, S::kStages - 1), k);
      }
      if (softmaxes && i < num_tiles) softmax(i);
      if (!half) cp_async_wait<kAhead - 1>();
      meet();
      if (i > 0 && ends_leaf(i - 1)) flush(i - 1);
      stage = stage_after(stage, 1);
    }
    if (!half) meet();
  }

  // Two barriers a tile: Q K^T of tile i + 1 | softmax of tile i + 1 beside P V of tile i and the loads of tile i +
  // kAhead, which would hold up the reads of Q K^T.
  __device__ __forceinline__ void run_plain() {
    uint32_t stage = 0;
    cp_async_wait<kFirstTiles - 1>();  // tile 0 is here
    __syncthreads();
    score_tile_of<false>(stage, 0, 0);
    __syncthreads();
    if (softmaxes) softmax(0);
#pragma unroll 1
    for (int i = kFirstTiles; i < kAhead; ++i) load_tile(i, i * S::kTileBytes);
    cp_async_wait<kAhead - 2>();  // tile 1 is here
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < num_tiles; ++i) {
      if (i + 1 < num_tiles) score_tile_of<false>(stage_after(stage, 1), 0, 0);
      __syncthreads();
      rescale(i);
      if (softmaxes && warp < 4 && i + 1 < num_tiles) softmax(i + 1);
      load_tile(i + kAhead, stage_after(stage, kAhead));
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

template <class S>
__global__ void __launch_bounds__(kMmaThreads, 1)
    attn_mma_kernel(const __grid_constant__ AttnLaunch launch, const __grid_constant__ AttnCosts costs) {
#if __CUDA_ARCH__ >= 1200
  constexpr bool kFits = S::kSharedBytes <= kMaxSharedBytes;  // else it cannot be launched there: no code
#else
  constexpr bool kFits = true;
#endif
  if constexpr (!kFits) return;
  extern __shared__ __align__(128) unsigned char memory[];
  AttnPlan& plan = *reinterpret_cast<AttnPlan*>(memory + S::kPlan);
  wait_for_previous_kernel();
  allow_next_kernel();
  make_plan(launch, costs, plan);
  int* scratch = reinterpret_cast<int*>(memory);
  for (uint32_t ticket = blockIdx.x; begin_item(launch, plan, ticket, scratch); ticket = plan.ticket) {
    if (plan.item.end == plan.item.begin) {
      if (threadIdx.x == 0) draw_ticket(launch, plan);
    } else if (plan.item.log2_rows == 4) {
      MmaWorker<S, 16>(launch, plan, memory).run();
    } else if (plan.item.log2_rows == 5) {
      MmaWorker<S, 32>(launch, plan, memory).run();
    } else {
      MmaWorker<S, 64>(launch, plan, memory).run();
    }
    __syncthreads();
  }
}

}  // namespace kdtree
