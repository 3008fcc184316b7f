// What the groups of attn_wgmma_kernel share: constants, shared memory, the ring of stages.
#pragma once
#include "verify_attn_begin.cuh"
#include "wgmma.cuh"

namespace kdtree {

constexpr int kWgmmaThreads = 3 * kWarpgroup, kWgmmaStages = 2, kWgmmaLatent = 512, kWgmmaRope = 64;
constexpr int kWgmmaBoxes = (kWgmmaLatent + kWgmmaRope) / kTileColumns, kStageBytes = kWgmmaBoxes * kTileBytes;
constexpr int kRowBytes = 2 * (kWgmmaLatent + kWgmmaRope), kRopeBox = (kWgmmaBoxes - 1) * kTileBytes;
constexpr int kQueries = kWgmmaStages * kStageBytes;  // where the queries are
constexpr int kRegisterSteps = 20;  // of 16 columns of the queries: they stay in registers, which spares shared memory
constexpr int kParts = 3, kPartBoxes = kWgmmaBoxes / kParts;  // of a tile: scores begin with the first one that has come

struct AttnMaps {
  CUtensorMap keys, q_latent, q_rope;
};

// What the values groups do with a stage.
struct ValuesTask {
  enum Kind : int { kKeys = 0, kStartsLeaf = 1, kEndsLeaf = 2, kNoMore = 4 };
  float* sums;  // of the leaf's first query, in the workspace
  int num_queries, kind;
  int next_key;  // row of the cache where the tile begins that they ask for, or -1
};

// Behind the stages in shared memory.
struct WgmmaShared {
  ValuesTask task[kWgmmaStages];
  uint64_t full[kWgmmaStages][kParts];  // a part of a tile has come: its bytes, or one thread that has copied the tile
  uint64_t scored[kWgmmaStages];    // its P is there: the scores group's warps
  uint64_t empty[kWgmmaStages];     // it is not needed any more: the values groups' warps
  uint64_t queries_full;            // the item's queries have come
  uint64_t item_ready[2];           // `items` holds it: one thread
  AttnPlan plan;
  AttnItem items[2];                // in turn
  float alpha[kWgmmaStages][kTileRows];  // rescaling factors
  int grows[kWgmmaStages][4];       // some alpha of these 16 queries is not 1
  uint16_t path[kTileRows];         // the nodes of a tile's keys, where they lie on the path
};
constexpr int kWgmmaSharedBytes = kQueries + kStageBytes + int(sizeof(WgmmaShared));
static_assert(kWgmmaSharedBytes <= 227 * 1024);

// A place in the ring of stages, which is gone round twice until phases repeat.
struct RingPlace {
  int place = 0;
  __device__ __forceinline__ int stage() const { return place < kWgmmaStages ? place : place - kWgmmaStages; }
  __device__ __forceinline__ uint32_t phase() const { return place >= kWgmmaStages; }
  __device__ __forceinline__ RingPlace after(int steps) const {
    const int next = place + steps;
    return {next < 2 * kWgmmaStages ? next : next - 2 * kWgmmaStages};
  }
};

__device__ __forceinline__ int num_tiles_of(const AttnItem& item) {
  return (item.end - item.begin + kTileRows - 1) / kTileRows;
}
// Whether tile i of the item is full of keys whose slots are their positions.
__device__ __forceinline__ bool is_plain(const AttnItem& item, int i) {
  return item.begin + (i + 1) * kTileRows <= item.plain_end;
}
// Tiles of the leaf that begins with tile i.
__device__ __forceinline__ int leaf_tiles(const AttnItem& item, int i) {
  return (1 << (kLog2FirstLeaf + leaf_region(item.begin + i * kTileRows))) / kTileRows;
}

// What the groups have in common: where things are, and which thread this is in its group.
struct WgmmaGroup {
  const AttnLaunch& launch;
  WgmmaShared& shared;
  const uint32_t base;  // of the stages
  const int thread = int(threadIdx.x) % kWarpgroup;

  __device__ __forceinline__ int warp() const { return __shfl_sync(0xffffffffu, thread / kWarp, 0); }
  __device__ __forceinline__ int lane() const { return thread % kWarp; }
  __device__ __forceinline__ int row() const {  // and `row` + 8 are this thread's of 64
    return thread / kWarp * 16 + thread % kWarp / 4;
  }
  __device__ __forceinline__ uint32_t stage_at(int stage) const { return base + stage * kStageBytes; }
  __device__ __forceinline__ void arrive(uint64_t& barrier) const {  // the warp, for what all its threads have done
    __syncwarp();
    if (lane() == 0) barrier_arrive(shared_address(&barrier));
  }
  __device__ __forceinline__ void wait(uint64_t& barrier, uint32_t phase) const {
    barrier_wait(shared_address(&barrier), phase);
  }
  // One warp: asks for a part of a tile of keys that begins at this row of the cache.
  __device__ __forceinline__ void ask_part(const CUtensorMap& keys, int first, int stage, int part) const {
    if (elect_one()) {
      const uint32_t barrier = shared_address(&shared.full[stage][part]);
      barrier_arrive_expect(barrier, kPartBoxes * kTileBytes);
      copy_tiles(stage_at(stage) + part * kPartBoxes * kTileBytes, keys, first, part * kPartBoxes, barrier);
    }
    __syncwarp();
  }
  __device__ __forceinline__ const AttnItem& wait_for_item(int index) const {
    wait(shared.item_ready[index & 1], (index >> 1) & 1);
    return shared.items[index & 1];
  }
};

constexpr int kDrawer = kWarpgroup - kWarp;  // the thread of the scores group that draws tickets

}  // namespace kdtree
