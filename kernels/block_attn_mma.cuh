// block_attn in BF16 on tensor cores, for head lengths that are a multiple of 8. A lane loads 8 neighbouring elements of a
// key or value at once, straight into the operands of the products: the elements of a head may take their places in the
// reduction, and in the results, in any order, as long as queries and stores follow it.
#pragma once
#include "block_attn_tile.cuh"

namespace kdtree {

template <int kGroups>  // of 32 elements of a head
struct MmaWorker {
  using Float = __nv_bfloat16;
  using Stored = __nv_bfloat16;
  using Memory = AttnMemory<Float, Stored>;

  static constexpr int kScratch = 0, kPairs = 32 * kGroups / 2 / kHeadLanes;
  static constexpr int kWide = kGroups == 4 ? 2 : 1, kWidth = 64 * kWide;  // groups of 64 elements of the results

  static __host__ __device__ int query_stride(int dim) { return dim; }

  const RowTile<Float>& tile;
  const Memory& memory;
  const int warp, quad, place;  // lane = 4 * quad + place
  const float scale;
  static constexpr bool kHeld = kGroups <= 4;  // in registers; longer heads are read again for every tile
  uint4 held[kHeld ? kGroups : 1][2];
  uint4 keys[2][kGroups], values[kWide][4];  // of the tile that comes next, but for the block's own keys
  float largest[2], sum[2], acc[kWide][8][4];

  __device__ MmaWorker(const RowTile<Float>& t, const Memory& m, int w)
      : tile(t), memory(m), warp(w), quad(threadIdx.x % kWarp / 4), place(threadIdx.x % 4), scale(t.a.scale * kLog2E) {
#pragma unroll
    for (int h = 0; h < 2; ++h) largest[h] = -INFINITY, sum[h] = 0.0f;
#pragma unroll
    for (int w64 = 0; w64 < kWide; ++w64)
#pragma unroll
      for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c) acc[w64][i][c] = 0.0f;
  }

  // Elements `at` … + 7 of a head, zeros past its end or where there is none.
  __device__ uint4 chunk(const Float* head, int at) const {
    return head != nullptr && at < tile.dim ? *reinterpret_cast<const uint4*>(head + at) : make_uint4(0, 0, 0, 0);
  }

  // Rows quad and quad + 8, elements 32 g + 8 place … + 7.
  __device__ uint4 query(int g, int h) const {
    return chunk(memory.query + (quad + 8 * h) * tile.dim, 32 * g + 8 * place);
  }

  __device__ void load_queries() {
    if constexpr (kHeld) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g)
#pragma unroll
        for (int h = 0; h < 2; ++h) held[g][h] = query(g, h);
    }
  }

  // What a tile needs from memory, on its way while something else is computed.
  __device__ void fetch(int first) {
    fetch_keys(first);
    fetch_values(first);
  }

  __device__ void add_keys(int first) {
    constexpr int kNext = kAttnWorkers * kTileKeys;
    if (first + kTileKeys > tile.prefix) take_own_keys(first);
    float score[2][4];
    add_scores(score);
    fetch_keys(first + kNext);
    uint32_t p[4];
    soften(first, score, p);
#pragma unroll
    for (int w64 = 0; w64 < kWide; ++w64) mix(p, values[w64], acc[w64]);
    fetch_values(first + kNext);
  }

  // Elements 32 g + 8 place … of the keys quad and quad + 8.
  __device__ void fetch_keys(int first) {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const int position = first + 8 * t + quad;
      const Float* head = tile.holds(position) && position < tile.prefix ? tile.cached(tile.a.keys, position) : nullptr;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) keys[t][g] = chunk(head, 32 * g + 8 * place);
    }
  }
  __device__ void take_own_keys(int first) {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const int position = first + 8 * t + quad;
      if (position < tile.prefix || position >= tile.end) continue;
      const Float* head = memory.own + (position - int(tile.prefix)) * tile.dim;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) keys[t][g] = chunk(head, 32 * g + 8 * place);
    }
  }

  // Elements 64 w + 8 quad … of the keys 2 place, + 1, + 8, + 9.
  __device__ void fetch_values(int first) {
#pragma unroll
    for (int w64 = 0; w64 < kWide; ++w64)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int position = first + 2 * place + j % 2 + j / 2 * 8;
        values[w64][j] =
            chunk(tile.holds(position) ? tile.value(position) : nullptr, tile.column + 64 * w64 + 8 * quad);
      }
  }

  __device__ void add_scores(float (&score)[2][4]) const {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
      for (int c = 0; c < 4; ++c) score[t][c] = 0.0f;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const uint4 low = kHeld ? held[kHeld ? g : 0][0] : query(g, 0), high = kHeld ? held[kHeld ? g : 0][1] : query(g, 1);
        mma_bf16(score[t], {low.x, high.x, low.y, high.y}, keys[t][g].x, keys[t][g].y);
        mma_bf16(score[t], {low.z, high.z, low.w, high.w}, keys[t][g].z, keys[t][g].w);
      }
    }
  }

  // p of 16 queries and 16 keys, rounded, as the first operand of the product with the values.
  __device__ void soften(int first, float (&score)[2][4], uint32_t (&p)[4]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int2 seen = memory.seen[quad + 8 * h];
      float now = largest[h];
#pragma unroll
      for (int t = 0; t < 2; ++t)
#pragma unroll
        for (int c = 2 * h; c < 2 * h + 2; ++c) {
          const int position = first + 8 * t + 2 * place + c % 2;
          score[t][c] = position >= seen.x && position < seen.y ? __fmul_rn(score[t][c], scale) : -INFINITY;
          now = fmaxf(now, score[t][c]);
        }
      now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 1));
      now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 2));
      const float base = now == -INFINITY ? 0.0f : now, keep = exp2_approx(largest[h] - base);
      largest[h] = now;
      sum[h] = __fmul_rn(sum[h], keep);
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const float low = exp2_approx(score[t][2 * h] - base), high = exp2_approx(score[t][2 * h + 1] - base);
        sum[h] += low + high;
        p[2 * t + h] = pack_bf16(low, high);
      }
#pragma unroll
      for (int w64 = 0; w64 < kWide; ++w64)
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
          for (int c = 2 * h; c < 2 * h + 2; ++c) acc[w64][i][c] = __fmul_rn(acc[w64][i][c], keep);
    }
  }

  // Product i gives elements 8 n + i, n = 0 … 7, of 64: of each value's 8 elements that a lane holds, number i.
  __device__ void mix(const uint32_t (&p)[4], const uint4 (&v)[4], float (&out)[8][4]) const {
    const uint32_t* words[4] = {&v[0].x, &v[1].x, &v[2].x, &v[3].x};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t halves = i % 2 ? 0x7632 : 0x5410;
      mma_bf16(out[i], p, __byte_perm(words[0][i / 2], words[1][i / 2], halves),
               __byte_perm(words[2][i / 2], words[3][i / 2], halves));
    }
  }

  __device__ void store() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 1);
      sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 2);
      const int row = warp * kTileRows + quad + 8 * h;
      if (place == 0) memory.largest[row] = largest[h], memory.sum[row] = sum[h];
#pragma unroll
      for (int w64 = 0; w64 < kWide; ++w64)
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const int column = 64 * w64 + 8 * (2 * place + n);
          if (column >= tile.width) continue;
          float4* to = reinterpret_cast<float4*>(memory.acc + row * tile.width + column);
          const auto& from = acc[w64];
          const int c = 2 * h + n;
          to[0] = make_float4(from[0][c], from[1][c], from[2][c], from[3][c]);
          to[1] = make_float4(from[4][c], from[5][c], from[6][c], from[7][c]);
        }
    }
  }
};

}  // namespace kdtree
