// The weights of decode_layers on their way to shared memory: each warp has a ring of slots of its own, fills it with what it
// will multiply next, in that order, and goes on with what comes after, across phases and layers, while it waits for other
// blocks. Who computes a tile is decided by decode_jobs.cuh; here is only how its bytes come.
#pragma once
#include "cuda_async.cuh"
#include "int4_layout.h"
#include "segments.h"
#include "wgmma.cuh"

namespace kdtree {

constexpr int kDecodeWarps = 8, kDecodeThreads = kDecodeWarps * kWarp;
constexpr int kUnitInputs = static_cast<int>(kSegmentUnit), kTileOut = 16;
constexpr int kBf16UnitBytes = kUnitInputs * kTileOut * 2, kColumnUnitBytes = kInt4ColumnTiles * kInt4BlockBytes;
constexpr int kSlotBytes = 16 * kInt4BlockBytes, kRingSlots = 4, kRingBytes = kDecodeWarps * kRingSlots * kSlotBytes;

// What a slot takes of BF16 weights, of a tile of INT4 gates with its ups, and of INT4 down products: units of a tile, or experts,
// with some units of each.
constexpr int kFloatUnits = 4, kPairUnits = 8, kDownExperts = 4, kDownUnits = 4;
constexpr int kUpsAt = kPairUnits * kInt4BlockBytes;  // in a slot, behind the gates
static_assert(kFloatUnits * kBf16UnitBytes <= kSlotBytes && 2 * kPairUnits * kInt4BlockBytes == kSlotBytes &&
              kDownExperts * kDownUnits * kInt4BlockBytes == kSlotBytes);

constexpr int kBoxUnits = 4, kBoxBytes = kBoxUnits * kInt4BlockBytes;  // of a copy of INT4 weights
static_assert(kBoxBytes % 128 == 0 && kSlotBytes % 128 == 0, "where such a copy may go");

// What comes into a slot: one piece of BF16 weights, or boxes of INT4 ones, a lane's each, which lie anywhere.
struct Piece {
  int num_bytes;           // of all; 0: nothing is known to come
  const char* from;        // of BF16
  const CUtensorMap* map;  // of INT4; else nullptr
  bool has_box;            // this lane: its place in the slot, tile in the column, unit of all columns
  int to, tile, unit;
};

// Maps INT4 weights, packed, for copies of kBoxUnits units of a tile.
inline int map_int4(CUtensorMap& map, const void* packed, int64_t num_column_units) {
  decltype(&cuTensorMapEncodeTiled) encode;
  if (const int status = find_map_encoder(encode)) return status;
  const cuuint64_t sizes[3] = {kInt4BlockBytes / 2, kInt4ColumnTiles, cuuint64_t(num_column_units)};
  const cuuint64_t pitch[2] = {kInt4BlockBytes, kColumnUnitBytes};
  const cuuint32_t box[3] = {kInt4BlockBytes / 2, 1, kBoxUnits}, step[3] = {1, 1, 1};
  const CUresult result =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 3, const_cast<void*>(packed), sizes, pitch, box, step,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? kOk : kUnsupported;
}

// A warp's ring. Pieces: finds the piece after the one that was found last, `Piece next(lane)`.
template <class Pieces>
struct Ring {
  Pieces pieces;
  const uint32_t slots, full;  // shared addresses of this warp's slots and barriers
  uint32_t num_asked = 0, num_taken = 0;  // slots, since the kernel began

  __device__ __forceinline__ Ring(const Pieces& pieces, uint32_t slots, uint32_t full)
      : pieces(pieces), slots(slots), full(full) {}

  static __device__ __forceinline__ void init_barriers(uint32_t full) {
    for (int s = 0; s < kRingSlots; ++s) barrier_init(full + s * 8, 1);
  }

  __device__ __forceinline__ bool ask() {
    const int lane = threadIdx.x % kWarp;
    const Piece piece = pieces.next(lane);
    if (piece.num_bytes == 0) return false;
    const uint32_t s = num_asked % kRingSlots, barrier = full + s * 8, to = slots + s * kSlotBytes;
    if (lane == 0) barrier_arrive_expect(barrier, piece.num_bytes);
    if (piece.map == nullptr) {
      if (lane == 0) bulk_copy(to, piece.from, piece.num_bytes, barrier);
    } else if (piece.has_box) {
      copy_tiles(to + piece.to, *piece.map, piece.tile, piece.unit, barrier);
    }
    ++num_asked;
    return true;
  }

  // As much as there is room for.
  __device__ __forceinline__ void fill() {
#pragma unroll 1
    while (num_asked - num_taken < kRingSlots && ask()) {}
  }

  // The oldest slot, whose bytes are there. It has been asked for: what is taken is known.
  __device__ __forceinline__ uint32_t take() const {
    const uint32_t s = num_taken % kRingSlots;
    barrier_wait(full + s * 8, num_taken / kRingSlots & 1);
    return slots + s * kSlotBytes;
  }

  // It has been read.
  __device__ __forceinline__ void give_back() {
    __syncwarp();
    ++num_taken;
    ask();
  }
};

}  // namespace kdtree
