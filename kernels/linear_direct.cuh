// One block tile of out = W x for few rows: each of 8 warps loads the weights of a segment from global memory into registers,
// in the order in which mma reads them, and x beside them. The arguments, the order of additions and so the bits are those of
// linear_tile.cuh; there is no ring of stages to fill, hand over and drain, which is what a small product mostly waits for.
// Weights that are settled are on their way before the previous kernel ends.
#pragma once
#include "linear_tile.cuh"

namespace kdtree {

// A warp computes OutTiles x 16 outputs of RowTiles x 8 rows; MinBlocks of a multiprocessor share its registers. The names are
// those of TileShape, for the parts of linear_tile.cuh that serve both.
template <int OutTiles, int RowTiles, int MinBlocks, bool Partials = false>
struct DirectShape {
  using T = __nv_bfloat16;
  static constexpr int kSegWarps = kNumSegments, kOutWarps = 1, kRowWarps = 1, kOutTiles = OutTiles, kRowTiles = RowTiles;
  static constexpr int kUnits = 1, kSeq = 1, kCluster = 1, kMinBlocks = MinBlocks, kThreads = kSegWarps * kWarp;
  static constexpr bool kPartials = Partials, kIsInt4 = false, kWgmma = false;
  static constexpr int kBlockTiles = OutTiles, kBlockOut = OutTiles * kOutTile, kBlockRows = RowTiles * kRowTile;
  static constexpr int kUnitBytes = kUnit * kOutTile * sizeof(T), kRowBytes = kUnit * sizeof(T);
  static constexpr bool kSwiglu = false;
  static constexpr int kRuns = 1, kRunTiles = kBlockTiles;
  static constexpr int kFragments = OutTiles * RowTiles, kShare = kFragments;
  static constexpr int kSums = kSegWarps, kSharedBytes = Partials ? 0 : kSums * kBlockRows * kBlockOut * 4;
  // Of 8 rows a lane reads the words that it multiplies; of more, which would take as many loads as the weights, 16 bytes, which
  // four lanes then exchange.
  static constexpr bool kXChunks = RowTiles > 1;
  static constexpr int kTileWords = 8;  // that a lane holds of a tile's unit
  static constexpr int kRoomWords = 65536 / (kThreads * MinBlocks) - 40 - OutTiles * RowTiles * 4;  // registers left for units
  static constexpr int kFit = kRoomWords / (OutTiles * kTileWords + RowTiles * 4);
  static constexpr int kBatch = kFit < 16 ? kFit / 2 : 8;  // units of which the loads are waited for together
  static_assert(kBatch >= 1, "two batches in flight");
};

// Loads that stay where they are written: moved down to their use, they would no longer overlap. Weights pass L1 by; x goes
// through it, since blocks of a multiprocessor share rows.
__device__ __forceinline__ uint32_t load_word(const char* from) {
  uint32_t v;
  asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}
// Zeros unless `wanted`.
__device__ __forceinline__ uint32_t load_word(const char* from, bool wanted) {
  uint32_t v;
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\nmov.u32 %0, 0;\n@p ld.global.ca.u32 %0, [%1];\n}"
               : "=&r"(v) : "l"(from), "r"(uint32_t(wanted)) : "memory");
  return v;
}
__device__ __forceinline__ void load_chunk(uint32_t (&v)[4], const char* from, bool wanted) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\nmov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\nmov.u32 %3, 0;\n"
      "@p ld.global.ca.v4.u32 {%0,%1,%2,%3}, [%4];\n}"
      : "=&r"(v[0]), "=&r"(v[1]), "=&r"(v[2]), "=&r"(v[3]) : "l"(from), "r"(uint32_t(wanted)) : "memory");
}

// What a lane holds of one unit.
template <class S>
struct DirectUnit {
  uint32_t weight[S::kOutTiles][S::kTileWords];  // the A matrices of inputs 0-15 and 16-31
  uint32_t x[S::kRowTiles][4];                   // the B matrices of both; in chunks until they are turned

  // tiles: where the lane begins to read in the unit of each tile of outputs.
  __device__ __forceinline__ void load_weights(const char* const (&tiles)[S::kOutTiles], uint32_t offset) {
#pragma unroll
    for (int r = 0; r < S::kOutTiles; ++r)
#pragma unroll
      for (int i = 0; i < 8; ++i) weight[r][i] = load_word(tiles[r] + offset + i / 4 * 256 + i % 2 * 512 + i / 2 % 2 * 128);
  }

  // num_chunks: of 8 inputs, that x still has from the unit's first on; the rest of the unit is zero.
  __device__ __forceinline__ void load_x(const char* const (&rows)[S::kRowTiles], uint32_t offset, int num_chunks) {
    if constexpr (S::kXChunks) {
#pragma unroll
      for (int j = 0; j < S::kRowTiles; ++j) load_chunk(x[j], rows[j] + offset, int(threadIdx.x % 4) < num_chunks);
    } else {
#pragma unroll
      for (int j = 0; j < S::kRowTiles; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) x[j][i] = load_word(rows[j] + offset + i * 16, i < num_chunks);
    }
  }

  __device__ __forceinline__ void add_to(Accumulator<S>& acc) {
    if constexpr (S::kXChunks) {
#pragma unroll
      for (int j = 0; j < S::kRowTiles; ++j) transpose_quad<1>(x[j], threadIdx.x % kWarp);
    }
#pragma unroll
    for (int r = 0; r < S::kOutTiles; ++r)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint4 a = {weight[r][4 * h], weight[r][4 * h + 1], weight[r][4 * h + 2], weight[r][4 * h + 3]};
#pragma unroll
        for (int j = 0; j < S::kRowTiles; ++j) mma_bf16(acc.value[r][j], a, x[j][2 * h], x[j][2 * h + 1]);
      }
  }
};

// Where a lane reads: of each tile of outputs and of each of its rows.
template <class S>
struct DirectPlaces {
  const char *tiles[S::kOutTiles], *rows[S::kRowTiles];

  // The weights, once the tile's group is known. Past the last tile: a harmless copy of it.
  __device__ __forceinline__ void find_weights(const TileArgs& a, const Tile<S>& tile) {
    const int lane = threadIdx.x % kWarp, num_tiles = (a.num_out + kOutTile - 1) / kOutTile;
    const int64_t tile_bytes = static_cast<int64_t>(tile.num_units) * S::kUnitBytes;
#pragma unroll
    for (int r = 0; r < S::kOutTiles; ++r) {
      const int64_t place = static_cast<int64_t>(tile.group) * num_tiles + min(tile.first_out_tile + r, num_tiles - 1);
      tiles[r] = static_cast<const char*>(a.packed) + place * tile_bytes + lane / 4 * 16 + lane % 4 * 4;
    }
  }

  // The rows. Those past the last of x, which no sum of another row sees: its first. Of a dense product it need not be known
  // how many are in use, so that their loads do not wait for that number.
  __device__ __forceinline__ void find_rows(const TileArgs& a, const Tile<S>& tile) {
    const __nv_bfloat16* x = static_cast<const __nv_bfloat16*>(a.x) + (tile.rows ? 0 : tile.group * a.x_group_stride);
    const int lane = threadIdx.x % kWarp, begin = tile.row_tile * S::kBlockRows;
#pragma unroll
    for (int j = 0; j < S::kRowTiles; ++j) {
      const int m = j * kRowTile + lane / 4;
      int64_t row = 0;
      if (tile.rows != nullptr) row = m < tile.num_rows ? __ldcg(tile.rows + m) / a.rows_per_source : 0;
      else if (begin + m < a.num_rows) row = begin + m;
      rows[j] = reinterpret_cast<const char*>(x + row * a.x_row_stride + lane % 4 * (S::kXChunks ? 8 : 2));
    }
  }
};

// The item of a block of experts, read together with the number of items. Items past the last hold anything.
template <class S>
__device__ __forceinline__ void find_item(const TileArgs& a, Tile<S>& tile) {
  const int4 item = __ldcg(a.items + tile.row_tile);
  if (tile.row_tile < __ldcg(a.num_items)) tile.group = item.x, tile.rows = a.row_list + item.y, tile.num_rows = item.z;
}

// Units of the warp's segment: two batches in flight in turn. A load is waited for by one of six counters of its warp, so loads
// that are used one by one would wait for later ones on the same counter.
template <class S>
struct DirectSegment {
  DirectUnit<S> units[2][S::kBatch];
  DirectPlaces<S> at;
  int first, num_units, num_chunks;  // chunks of 8 inputs in x

  __device__ DirectSegment(const TileArgs& a, const Tile<S>& tile) {
    const Span span = tile.span(threadIdx.x / kWarp, 0);
    first = span.begin, num_units = span.end - span.begin, num_chunks = a.num_in / 8;
  }

  __device__ __forceinline__ void load_weights(int i, int k, int unit) {
    units[i][k].load_weights(at.tiles, (first + unit) * S::kUnitBytes);
  }
  __device__ __forceinline__ void load_x(int i, int k, int unit) {
    units[i][k].load_x(at.rows, (first + unit) * S::kRowBytes, num_chunks - (first + unit) * (kUnit / 8));
  }

  // f(k) for the units begin + k of a batch.
  template <class F>
  __device__ __forceinline__ void each(int begin, F&& f) {
    if (begin + S::kBatch <= num_units) {
#pragma unroll
      for (int k = 0; k < S::kBatch; ++k) f(k);
    } else {
#pragma unroll
      for (int k = 0; k < S::kBatch; ++k)
        if (begin + k < num_units) f(k);
    }
  }

  __device__ __forceinline__ void load_first_weights() {
#pragma unroll
    for (int i = 0; i < 2; ++i) each(i * S::kBatch, [&](int k) { load_weights(i, k, i * S::kBatch + k); });
  }
  __device__ __forceinline__ void load_first_x() {
#pragma unroll
    for (int i = 0; i < 2; ++i) each(i * S::kBatch, [&](int k) { load_x(i, k, i * S::kBatch + k); });
  }

  __device__ __forceinline__ void add_to(Accumulator<S>& acc) {
#pragma unroll 1
    for (int begin = 0; begin < num_units; begin += 2 * S::kBatch)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int now = begin + i * S::kBatch, then = now + 2 * S::kBatch;
        each(now, [&](int k) { units[i][k].add_to(acc); });
        each(then, [&](int k) { load_weights(i, k, then + k), load_x(i, k, then + k); });
      }
  }
};

// The sums of the warp's segment.
template <class S>
__device__ __forceinline__ void sum_segment(const TileArgs& a, Tile<S>& tile, Accumulator<S>& acc) {
  DirectSegment<S> segment(a, tile);
  const bool early = a.weights_settled && a.items == nullptr;
  if (early) segment.at.find_weights(a, tile), segment.load_first_weights();
  wait_for_previous_kernel();
  allow_next_kernel();
  if (a.items != nullptr) {
    find_item<S>(a, tile);
    if (tile.num_rows == 0) return;
  }
  if (!early) segment.at.find_weights(a, tile), segment.load_first_weights();
  segment.at.find_rows(a, tile);
  segment.load_first_x();
  if (a.items == nullptr) tile.find_rows(a);
  if (tile.num_rows == 0) return;
  acc.fill(tile.mine(threadIdx.x / kWarp, 0) ? 0.f : -0.f);
  segment.add_to(acc);
}

// What block `block` of a product does, as do_tile.
template <class S>
__device__ __forceinline__ void do_direct(const TileArgs& a, int block, unsigned char* shared) {
  Tile<S> tile(a, block);
  Accumulator<S> acc;
  sum_segment<S>(a, tile, acc);
  if (tile.num_rows == 0) return;
  if constexpr (S::kPartials) {
    store_partials<S>(a, tile, acc);
  } else {
    const uint32_t sums = shared_address(shared);
    send_sums<S>(tile, acc, sums, 0);
    __syncthreads();
    combine<S>(a, tile, sums);
  }
}

template <class S>
__global__ void __launch_bounds__(S::kThreads, S::kMinBlocks) linear_direct_kernel(const __grid_constant__ TileArgs a) {
  extern __shared__ __align__(128) unsigned char shared[];
  do_direct<S>(a, blockIdx.x, shared);
}

// x in whole and aligned chunks of 16 bytes.
template <class S>
int launch_direct(TileArgs a, int num_groups, void* stream) {
  if (!a.x_aligned || a.num_in % 8 != 0) return kUnsupported;
  return launch_blocks<S>(linear_direct_kernel<S>, a, num_groups, stream);
}

}  // namespace kdtree
