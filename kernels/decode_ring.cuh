// The weights of decode_layers on their way to shared memory: each warp has a ring of slots of its own, fills it with what it
// will multiply next, in that order, and goes on with what comes after, across phases and layers, while it waits for other
// blocks. Who computes a tile is decided by decode_jobs.cuh; here is only how its bytes come.
#pragma once
#include "cuda_async.cuh"
#include "int4_layout.h"
#include "segments.h"

namespace kdtree {

constexpr int kDecodeWarps = 8, kDecodeThreads = kDecodeWarps * kWarp;
constexpr int kUnitInputs = static_cast<int>(kSegmentUnit), kTileOut = 16, kTileRowsOfB = 8;
constexpr int kBf16UnitBytes = kUnitInputs * kTileOut * 2, kColumnUnitBytes = kInt4ColumnTiles * kInt4BlockBytes;
constexpr int kSlotBytes = 2304, kRingSlots = 8, kRingBytes = kDecodeWarps * kRingSlots * kSlotBytes;

// How a job's units lie in memory, and how many of them a slot takes.
enum class Weights : int {
  kFloats,  // BF16, one unit behind the other
  kPair,    // INT4: of a tile of gates and the tile of ups that belongs to it, each unit in a column
  kInt4,    // INT4: of one tile, each unit in a column
};

__device__ __forceinline__ constexpr int units_of_slot(Weights w) {
  return w == Weights::kFloats ? kSlotBytes / kBf16UnitBytes
                               : kSlotBytes / kInt4BlockBytes / (w == Weights::kPair ? 2 : 1);
}
static_assert(units_of_slot(Weights::kFloats) == 2 && units_of_slot(Weights::kPair) == 4 && units_of_slot(Weights::kInt4) == 8);

// Neighbouring units of one tile: what one warp multiplies in a row.
struct Job {
  const char* from;
  uint32_t second;   // kPair: bytes from a gate's block to its up's
  int num_units;     // 0: there is no such job
  Weights kind;
};

// Copies up to a slot full of units; 16 bytes a lane.
__device__ __forceinline__ void copy_units(uint32_t to, const Job& job, int num_units, int lane) {
  if (job.kind == Weights::kFloats) {
#pragma unroll
    for (int i = 0; i < 2 * kBf16UnitBytes / 16 / kWarp; ++i)
      if (i < num_units * (kBf16UnitBytes / 16 / kWarp)) cp_async16(to + (i * kWarp + lane) * 16, job.from + (i * kWarp + lane) * 16);
    return;
  }
  constexpr int kPieces = kInt4BlockBytes / 16;  // of a block
  const bool is_pair = job.kind == Weights::kPair;
  const int num_blocks = is_pair ? 2 * num_units : num_units;
#pragma unroll
  for (int i = 0; i < (kSlotBytes / 16 + kWarp - 1) / kWarp; ++i) {
    const int piece = i * kWarp + lane, block = piece / kPieces, unit = is_pair ? block / 2 : block;
    if (block >= num_blocks) continue;
    const char* from = job.from + unit * kColumnUnitBytes + (is_pair && block % 2 ? job.second : 0u);
    cp_async16(to + piece * 16, from + (piece - block * kPieces) * 16);
  }
}

__device__ __forceinline__ int64_t bytes_of_units(Weights kind, int num_units) {
  return int64_t(num_units) * (kind == Weights::kFloats ? kBf16UnitBytes : kColumnUnitBytes);
}

// A warp's ring. Jobs: finds the job after the one that was found last, `Job next()`; num_units 0 while it is not known yet, or when
// there is none left.
template <class Jobs>
struct Ring {
  Jobs jobs;
  const uint32_t slots, full;  // shared addresses of this warp's slots and barriers
  int num_asked = 0, num_taken = 0;  // slots, since the kernel began
  Job job{nullptr, 0, 0, Weights::kFloats};  // what is asked for next

  __device__ __forceinline__ Ring(const Jobs& jobs, uint32_t slots, uint32_t full) : jobs(jobs), slots(slots), full(full) {}

  static __device__ __forceinline__ void init_barriers(uint32_t full) {
    for (int s = 0; s < kRingSlots; ++s) barrier_init(full + s * 8, kWarp);
  }

  __device__ __forceinline__ bool ask() {
    if (job.num_units == 0) job = jobs.next();
    if (job.num_units == 0) return false;
    const int slot = num_asked % kRingSlots, units = min(job.num_units, units_of_slot(job.kind));
    copy_units(slots + slot * kSlotBytes, job, units, threadIdx.x % kWarp);
    barrier_arrive_after_copies(full + slot * 8);
    job.from += bytes_of_units(job.kind, units);
    job.num_units -= units;
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
    barrier_wait(full + num_taken % kRingSlots * 8, num_taken / kRingSlots & 1);
    return slots + num_taken % kRingSlots * kSlotBytes;
  }

  // It has been read.
  __device__ __forceinline__ void give_back() {
    __syncwarp();
    ++num_taken;
    ask();
  }
};

}  // namespace kdtree
