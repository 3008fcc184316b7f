// verify_attn on Hopper for few queries of one stream (BF16, latent 512, rope 64), by mma.sync. The bits are those of
// verify_attn_wgmma.cuh, and the fold behind it is the same; time is not spent on filling up 64 queries. A block of 8 warps
// takes 16 queries, or 8, at a time; for each tile of 64 keys
//   scores   4 warps for 8 queries: a chain of 36 products over 16 keys each, as boxes of columns come. With two stages and 8
//            queries, the other 4 warps score the next tile meanwhile
//   softmax  where the scores are: the warps exchange maxima, and P of two keys added up
//   values   O += P V, each warp its share of the columns; then it asks for its box of the tile that takes the place
// Reads 1,152 bytes of a key for 16 queries and each slice of columns. A tile takes some 1,200 cycles of scores (a product
// waits 33 for the one before it), 300 of softmax, 500 of values; loads hide behind them with two stages.
#pragma once
#include "verify_attn_few_tile.cuh"

namespace kdtree {

// All threads: an item with keys. Returns the tiles it had.
template <int kStages>
__device__ __forceinline__ int attend_item(const AttnLaunch& launch, FewShared<kStages>& shared, const FewItem& item,
                                           int log2_slices, int place) {
  const int num_tiles = num_tiles_of(item);
  FewBlock<kStages> block(launch, shared, item, log2_slices, place);
#pragma unroll
  for (int i = 0; i < kStages; ++i)
    if (i < num_tiles) block.ask(item, i);
  block.prefetch(item, kStages);
  const int step = block.has_two_tiles() ? 2 : 1, ahead = block.has_two_tiles() ? block.warp / 4 : 0;
  const bool scores = block.has_two_tiles() || block.warp / 4 < block.num_groups;
  if (scores) block.load_queries(item);
  int leaf_end = 0;  // the tile behind the leaf
#pragma unroll 1
  for (int i = 0; i < num_tiles; ++i) {
    block.forget_lane();
    if (i % step == 0 && scores && i + ahead < num_tiles) block.score(i + ahead);
    const bool starts_leaf = i == leaf_end;
    if (starts_leaf) leaf_end = min(i + leaf_tiles(item, i), num_tiles);
    const typename FewBlock<kStages>::Tile tile{item.end - item.begin - i * kTileRows, block.stage_of(i),
                                                starts_leaf, i + 1 == leaf_end, scores && i % step == ahead};
    block.move_maxima(tile);
    if (tile.is_scored_here) block.store_probs();
    __syncthreads();  // P is there
    block.add_values(tile, item.slice);
    if (i + kStages < num_tiles) {
      if (block.log2_slices > 0) __syncthreads();  // several warps share a box
      block.ask(item, i + kStages);
      block.prefetch(item, i + kStages + 1);
    }
    if (block.adds_sums()) block.add_sums();
    if (tile.ends_leaf) block.flush(item, leaf_of(item.begin + i * kTileRows));
  }
  return num_tiles;
}

// All 256 threads of a block: its items over `cache`, of a plan that is the same in all blocks. Shared memory holds nothing that is still
// needed, and afterwards nothing that is.
template <int kStages>
__device__ __forceinline__ void attend_few(const AttnLaunch& launch, const FewPlan& plan, const void* cache,
                                           unsigned char* memory, int block, int num_blocks) {
  FewShared<kStages>& shared = *reinterpret_cast<FewShared<kStages>*>(memory);
  const int thread = int(threadIdx.x);
  if (block + 1 == num_blocks)
#pragma unroll 1
    for (int t = plan.num_rows + thread; t < int(launch.num_rows); t += kFewThreads) launch.num_leaves[t] = kUnusedRow;
  if (block >= plan.num_items) return;
  if (thread < kStages * kWgmmaBoxes) {  // a warp brings a box of latent columns, all warps bring that of rope columns
    const int box = thread % kWgmmaBoxes;
    barrier_init(shared_address(&shared.full[thread / kWgmmaBoxes][box]), box + 1 < kWgmmaBoxes ? kWarp : kFewThreads);
  }
  fence_barrier_init();
  int place = 0;  // tiles so far
#pragma unroll 1
  for (int index = block; index < plan.num_items; index += num_blocks) {
    __syncthreads();  // nobody is at the item before any more
    const FewItem item = find_few(launch, plan, cache, index, shared.tree, shared.path);
    if (item.end > item.begin) place += attend_item(launch, shared, item, plan.log2_slices, place);
  }
  __syncthreads();
  if (thread < kStages * kWgmmaBoxes) barrier_invalidate(shared_address(&shared.full[0][0] + thread));
  __syncthreads();
}

}  // namespace kdtree
