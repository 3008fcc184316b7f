// The work of a block of attend_few on its tiles of 64 keys; see verify_attn_few.cuh. Products are turned round: keys (for
// scores) and latent columns (for values) are the 16 rows of mma.sync, 8 queries its columns, so that 8 heads fill it. Bits
// are those of the warpgroup kernel: the same chains over columns and keys, the same maxima, the same order of the sum of P.
#pragma once
#include "verify_attn_few_plan.cuh"
#include "verify_attn_softmax.cuh"

namespace kdtree {

constexpr int kFewThreads = 256, kFewWarps = kFewThreads / kWarp, kFewSteps = (kWgmmaLatent + kWgmmaRope) / 16;
constexpr int kFewGroup = 8, kFewBlocks = kWgmmaLatent / kFewWarps / 16;  // queries of a product; of 16 columns, of a warp
constexpr int kProbsBytes = kTileRows * kFewGroup * 2;
static_assert(kFewWarps == kWgmmaBoxes - 1, "a warp brings one box of latent columns");

// A tile lies as in wgmma.cuh: boxes of 64 columns. P lies transposed, 8 queries for each key.
template <int kStages>
struct alignas(128) FewShared {
  unsigned char keys[kStages][kStageBytes];
  union {
    unsigned char probs[2][kProbsBytes];  // of each group of queries
    FewTree tree;                         // between items
  };
  float twos[12][4][kFewGroup];  // P of two keys added, by 8 keys of the tile, pair among them, query
  float maxima[4][kFewQueries];  // by 16 keys
  uint64_t full[kStages][kWgmmaBoxes];
  uint8_t path[kFewTreeSlots];
};
static_assert(sizeof(FewShared<1>) <= 77824 && sizeof(FewShared<2>) <= 227 * 1024);

// kStages: tiles at once in shared memory. With two of them, 8 queries' scores of two tiles are made side by side.
template <int kStages>
struct FewBlock {
  const AttnLaunch& launch;
  FewShared<kStages>& shared;
  const int warp = __shfl_sync(0xffffffffu, int(threadIdx.x) / kWarp, 0);
  int lane = int(threadIdx.x) % kWarp;
  const int num_groups, log2_slices, place;  // place: tiles before this item
  uint32_t query[kFewSteps][2];
  RowMaximum rows[2][2];               // of each group; the sums are right in one warp for each group
  float s[4], alpha[2][2];
  float acc[kFewBlocks][2][4];

  __device__ __forceinline__ FewBlock(const AttnLaunch& launch, FewShared<kStages>& shared, const FewItem& item,
                                      int log2_slices, int place)
      : launch(launch), shared(shared), num_groups(item.num_queries > kFewGroup ? 2 : 1), log2_slices(log2_slices),
        place(place) {}

  struct Tile {
    int num_keys, stage;
    bool starts_leaf, ends_leaf, is_scored_here;
  };

  // What follows from the lane is found again for each tile: kept in registers, it would leave too few.
  __device__ __forceinline__ void forget_lane() { asm volatile("" : "+r"(lane)); }
  __device__ __forceinline__ int pair() const { return lane % 4; }    // the lane's queries of a group: 2 * pair and the next
  __device__ __forceinline__ int keys16() const { return warp % 4; }  // which 16 keys of a tile the warp scores
  __device__ __forceinline__ bool has_two_tiles() const { return kStages > 1 && num_groups == 1; }
  __device__ __forceinline__ int group() const { return num_groups > 1 ? warp / 4 : 0; }
  __device__ __forceinline__ int stage_of(int i) const { return (place + i) % kStages; }
  __device__ __forceinline__ uint32_t stage_at(int stage) const { return shared_address(shared.keys[stage]); }

  // --- loads ---

  // The warp's box of tile i, and the rope columns of its 8 keys. Nobody reads them any more.
  __device__ __forceinline__ void ask(const FewItem& item, int i) {
    const int stage = stage_of(i), chunk = lane % 8, first = lane / 8;
    const uint32_t to = stage_at(stage) + warp * kTileBytes, rope = stage_at(stage) + kRopeBox;
    const char* const box = item.keys + warp * 128 + chunk * 16;
    const char* const rope_box = item.keys + kWgmmaLatent * 2 + chunk * 16;
    const int begin = item.begin + i * kTileRows;
    if (is_plain(item, i)) {
      const char* const from = box + int64_t(begin + first) * kRowBytes;
      const char* const rope_from = rope_box + int64_t(begin + warp * 8 + first) * kRowBytes;
#pragma unroll
      for (int j = 0; j < 16; ++j) cp_async16(to + chunk_offset(first + 4 * j, chunk), from + 4 * j * kRowBytes);
      barrier_arrive_after_copies(shared_address(&shared.full[stage][warp]));
#pragma unroll
      for (int j = 0; j < 2; ++j)
        cp_async16(rope + chunk_offset(warp * 8 + first + 4 * j, chunk), rope_from + 4 * j * kRowBytes);
    } else {
#pragma unroll 1
      for (int j = 0; j < 16; ++j) ask_one(item, begin, first + 4 * j, box, to, chunk);
      barrier_arrive_after_copies(shared_address(&shared.full[stage][warp]));
#pragma unroll 1
      for (int j = 0; j < 2; ++j) ask_one(item, begin, warp * 8 + first + 4 * j, rope_box, rope, chunk);
    }
    barrier_arrive_after_copies(shared_address(&shared.full[stage][kWgmmaBoxes - 1]));
  }

  // 16 bytes of a key that may lie on the path, or not be there: then they become zeros.
  __device__ __forceinline__ void ask_one(const FewItem& item, int begin, int key, const char* box, uint32_t to,
                                          int chunk) const {
    const int position = begin + key;
    const bool used = position < item.end, is_chain = item.depth == item.node;
    int slot = used ? position : 0;
    if (used && position >= item.prefix && !is_chain) slot = item.prefix + shared.path[position - item.prefix];
    cp_async16(to + chunk_offset(key, chunk), box + int64_t(slot) * kRowBytes, used ? 16 : 0);
  }

  // Asks the L2 cache for tile i: more is under way than shared memory has room for.
  __device__ __forceinline__ void prefetch(const FewItem& item, int i) const {
    constexpr int kShare = kTileRows / kFewWarps * kRowBytes;
    if (item.slice != 0 || i >= num_tiles_of(item) || !is_plain(item, i)) return;
    if (elect_one())
      prefetch_to_l2(item.keys + int64_t(item.begin + i * kTileRows) * kRowBytes + warp * kShare, kShare);
    __syncwarp();
  }

  // The 8 queries that the warp scores: of each 16 columns, this lane's are 2 * pair, the next, and the two 8 further on, of
  // query lane / 4. Four lanes load 64 bytes of it and exchange their parts.
  __device__ __forceinline__ void load_queries(const FewItem& item) {
    const int q = group() * kFewGroup + lane / 4;
    const int64_t at = launch.query_begin + item.first_query + q;
    const uint4* latent = static_cast<const uint4*>(launch.a.q_latent) + at * (kWgmmaLatent / 8) + pair();
    const uint4* rope = static_cast<const uint4*>(launch.a.q_rope) + at * (kWgmmaRope / 8) + pair();
#pragma unroll
    for (int j = 0; j < kFewSteps / 2; ++j) {
      uint4 v = make_uint4(0, 0, 0, 0);
      if (q < item.num_queries) v = __ldcg(j < kWgmmaLatent / 32 ? latent + j * 4 : rope + (j - kWgmmaLatent / 32) * 4);
      query[2 * j][0] = v.x, query[2 * j][1] = v.y, query[2 * j + 1][0] = v.z, query[2 * j + 1][1] = v.w;
    }
#pragma unroll
    for (int j = 0; j < kFewSteps / 2; ++j)
      transpose(query[2 * j][0], query[2 * j][1], query[2 * j + 1][0], query[2 * j + 1][1]);
  }

  // Word i of lane j of the four becomes word j of lane i.
  __device__ __forceinline__ void transpose(uint32_t& w0, uint32_t& w1, uint32_t& w2, uint32_t& w3) const {
    const bool odd = lane & 1, high = lane & 2;
    const auto exchange = [](uint32_t& keeps_low, uint32_t& keeps_high, bool is_high, int mask) {
      const uint32_t other = __shfl_xor_sync(0xffffffffu, is_high ? keeps_low : keeps_high, mask);
      keeps_low = is_high ? other : keeps_low;
      keeps_high = is_high ? keeps_high : other;
    };
    exchange(w0, w1, odd, 1);
    exchange(w2, w3, odd, 1);
    exchange(w0, w2, high, 2);
    exchange(w1, w3, high, 2);
  }

  // --- scores ---

  // s = the warp's 16 keys of tile i by 8 queries: this lane has keys lane / 4 and 8 more, by its two queries.
  __device__ __forceinline__ void score(int i) {
    const int stage = stage_of(i);
    const uint32_t phase = uint32_t(place + i) / kStages & 1, from = stage_at(stage) + (keys16() * 16 + lane % 16) * 128;
    uint32_t chunk[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) chunk[k] = from + (((2 * k + lane / 16) ^ (lane & 7)) * 16);
#pragma unroll
    for (float& x : s) x = 0.0f;
#pragma unroll
    for (int box = 0; box < kWgmmaBoxes; ++box) {
      barrier_wait(shared_address(&shared.full[stage][box]), phase);
      uint32_t keys[4][4];
#pragma unroll
      for (int k = 0; k < 4; ++k) load_matrix4(keys[k], chunk[k] + box * kTileBytes);
#pragma unroll
      for (int k = 0; k < 4; ++k) mma_bf16(s, keys[k], query[box * 4 + k][0], query[box * 4 + k][1]);
    }
  }

  // All warps: the tile's largest score of each query moves its maximum.
  __device__ __forceinline__ void move_maxima(const Tile& tile) {
    if (tile.is_scored_here) {
      const int key = keys16() * 16 + lane / 4;
      if (key >= tile.num_keys) s[0] = s[1] = -INFINITY;
      if (key + 8 >= tile.num_keys) s[2] = s[3] = -INFINITY;
      float2 largest = make_float2(fmaxf(s[0], s[2]), fmaxf(s[1], s[3]));
#pragma unroll
      for (int offset = 4; offset < kWarp; offset *= 2) {
        largest.x = fmaxf(largest.x, __shfl_xor_sync(0xffffffffu, largest.x, offset));
        largest.y = fmaxf(largest.y, __shfl_xor_sync(0xffffffffu, largest.y, offset));
      }
      if (lane < 4) *reinterpret_cast<float2*>(&shared.maxima[keys16()][group() * kFewGroup + 2 * pair()]) = largest;
    }
    __syncthreads();  // scores are complete: the rope columns, and P of the tile before, are not needed any more
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      if (g >= num_groups) continue;
      float2 largest = *reinterpret_cast<const float2*>(&shared.maxima[0][g * kFewGroup + 2 * pair()]);
#pragma unroll
      for (int m = 1; m < 4; ++m) {
        const float2 other = *reinterpret_cast<const float2*>(&shared.maxima[m][g * kFewGroup + 2 * pair()]);
        largest = make_float2(fmaxf(largest.x, other.x), fmaxf(largest.y, other.y));
      }
      alpha[g][0] = rows[g][0].move(__fmul_rn(largest.x, launch.scale_log2), tile.starts_leaf);
      alpha[g][1] = rows[g][1].move(__fmul_rn(largest.y, launch.scale_log2), tile.starts_leaf);
    }
  }

  // Where P of keys 8 * b … of two keys each lies. With two groups, their first warps keep what they have of it.
  __device__ __forceinline__ float2* two_at(int b) const {
    return reinterpret_cast<float2*>(&shared.twos[num_groups > 1 ? group() * 6 + b - 2 : b][lane / 8][2 * pair()]);
  }

  // The warps that scored the tile: scores become P, and the sums of two keys.
  __device__ __forceinline__ void store_probs() {
    const bool second = group() > 0;
    const float maximum[2] = {second ? rows[1][0].maximum : rows[0][0].maximum,
                              second ? rows[1][1].maximum : rows[0][1].maximum};
#pragma unroll
    for (int j = 0; j < 4; ++j) s[j] = exp2_approx(__fmaf_rn(s[j], launch.scale_log2, -maximum[j % 2]));
    const uint32_t to = shared_address(shared.probs[group()]) + (keys16() * 16 + lane / 4) * (kFewGroup * 2) + pair() * 4;
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(pack_bf16(s[0], s[1])) : "memory");
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to + 8 * kFewGroup * 2), "r"(pack_bf16(s[2], s[3])) : "memory");
#pragma unroll
    for (float& x : s) x = __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, 4));  // keys 2 * (lane / 8) and the next
    if ((lane & 4) || (num_groups > 1 && keys16() == 0)) return;
    *two_at(2 * keys16()) = make_float2(s[0], s[1]);
    *two_at(2 * keys16() + 1) = make_float2(s[2], s[3]);
  }

  __device__ __forceinline__ bool adds_sums() const { return keys16() == 0 && warp / 4 < num_groups; }

  // One warp for each group: the order is that of a row's four threads in the warpgroup kernel, a lane / 8 each.
  __device__ __forceinline__ void add_sums() {
    float2 two[8];
#pragma unroll
    for (int b = 0; b < 8; ++b)
      two[b] = b < 2 && num_groups > 1 ? make_float2(s[2 * (b & 1)], s[2 * (b & 1) + 1]) : *two_at(b);
    float sum[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float four[4];
#pragma unroll
      for (int b = 0; b < 4; ++b) four[b] = h ? __fadd_rn(two[b].y, two[b + 4].y) : __fadd_rn(two[b].x, two[b + 4].x);
      sum[h] = __fadd_rn(__fadd_rn(four[0], four[1]), __fadd_rn(four[2], four[3]));
    }
#pragma unroll
    for (int g = 0; g < 2; ++g)  // of the two groups, one is this warp's
#pragma unroll
      for (int h = 0; h < 2; ++h) rows[g][h].sum = __fadd_rn(rows[g][h].sum, sum[h]);
  }

  // --- values ---

  __device__ __forceinline__ int num_blocks() const { return kFewBlocks >> log2_slices; }
  __device__ __forceinline__ int first_column(int slice) const {
    return (slice * kWgmmaLatent + warp * (kWgmmaLatent / kFewWarps)) >> log2_slices;
  }

  // O += P V for the warp's columns: acc has columns lane / 4 and 8 more of each 16, by the lane's two queries.
  __device__ __forceinline__ void add_values(const Tile& tile, int slice) {
#pragma unroll
    for (int b = 0; b < kFewBlocks; ++b)
#pragma unroll
      for (int g = 0; g < 2; ++g)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          acc[b][g][j] = tile.starts_leaf ? 0.0f : g < num_groups ? __fmul_rn(acc[b][g][j], alpha[g][j % 2]) : 0.0f;
    const int column = first_column(slice), row = lane / 16 * 8 + lane % 8;
    const uint32_t from = stage_at(tile.stage) + row * 128;
    uint32_t chunk[kFewBlocks];
#pragma unroll
    for (int b = 0; b < kFewBlocks; ++b) {
      const int c = column + b * 16;
      chunk[b] = from + c / kTileColumns * kTileBytes + (((c % kTileColumns / 8 + lane / 8 % 2) ^ (lane & 7)) * 16);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t probs[2][4];  // of 32 keys
#pragma unroll
      for (int g = 0; g < 2; ++g)
        if (g < num_groups)
          load_matrix4_transposed(probs[g], shared_address(shared.probs[g]) + (32 * half + lane) * (kFewGroup * 2));
#pragma unroll
      for (int k = 0; k < 2; ++k)
#pragma unroll
        for (int b = 0; b < kFewBlocks; ++b) {
          if (b >= num_blocks()) continue;
          uint32_t values[4];
          load_matrix4_transposed(values, chunk[b] + (2 * half + k) * 16 * 128);
          mma_bf16(acc[b][0], values, probs[0][2 * k], probs[0][2 * k + 1]);
          if (num_groups > 1) mma_bf16(acc[b][1], values, probs[1][2 * k], probs[1][2 * k + 1]);
        }
    }
  }

  // --- results ---

  // A leaf is complete: its sums, and its statistics, go to the workspace.
  __device__ __forceinline__ void flush(const FewItem& item, int leaf) {
    float* const to = launch.partials + (int64_t(leaf) * launch.num_queries + item.first_query) * kWgmmaLatent +
                      first_column(item.slice) + lane / 4;
#pragma unroll
    for (int g = 0; g < 2; ++g)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int q = g * kFewGroup + 2 * pair() + h;
        if (g >= num_groups || q >= item.num_queries) continue;
#pragma unroll
        for (int b = 0; b < kFewBlocks; ++b)
          if (b < num_blocks()) {
            to[q * kWgmmaLatent + b * 16] = acc[b][g][h];
            to[q * kWgmmaLatent + b * 16 + 8] = acc[b][g][2 + h];
          }
      }
    if (item.slice == 0 && adds_sums()) store_stats(item, leaf);
  }

  __device__ __forceinline__ void store_stats(const FewItem& item, int leaf) const {
    const bool second = group() > 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = second ? rows[1][h].sum : rows[0][h].sum;
      sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 8));
      sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 16));
      const int q = group() * kFewGroup + 2 * pair() + h;
      if (lane < 4 && q < item.num_queries)
        launch.stats[int64_t(item.first_query + q) * launch.max_leaves + leaf] =
            make_float2(second ? rows[1][h].maximum : rows[0][h].maximum, sum);
    }
  }
};

}  // namespace kdtree
