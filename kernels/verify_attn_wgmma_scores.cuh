// The group of attn_wgmma_kernel that makes P of queries and keys. See verify_attn_wgmma.cuh.
#pragma once
#include "verify_attn_softmax.cuh"
#include "verify_attn_wgmma_group.cuh"

namespace kdtree {

struct ScoresGroup : WgmmaGroup {
  const AttnMaps& maps;
  uint32_t query[kRegisterSteps][4];
  RowMaximum rows[2];
  float s[32];

  __device__ __forceinline__ ScoresGroup(const WgmmaGroup& group, const AttnMaps& maps) : WgmmaGroup(group), maps(maps) {}

  __device__ __forceinline__ void run() {
    RingPlace at;
    bool is_asked = false;  // the tile after the one at hand
    uint64_t drawn = 0;     // of one thread: what the item after the one at hand will be
    if (thread / kWarp == kDrawer / kWarp) publish_first();
    ask_queries(0);
    ask(0, 0, at);
    for (int index = 0;; ++index) {
      const AttnItem& item = wait_for_item(index);
      const int num_tiles = num_tiles_of(item);
      if (num_tiles == 0) break;
      meet();  // nobody looks at the item before any more
      if (index == 0 && num_tiles > 1) {
        ask(0, 1, at.after(1));
        is_asked = true;
      }
      wait(shared.queries_full, index & 1);
      load_queries();
      const int num_plain = (item.plain_end - item.begin) / kTileRows, key = first_key(item, 0);
      int leaf_end = 0;  // the tile behind the leaf
#pragma unroll 1
      for (int i = 0; i < num_tiles; ++i) {
        if (thread == kDrawer && i == max(num_tiles - 4, 0)) drawn = draw(launch, shared.plan);
        if (thread / kWarp == kDrawer / kWarp && i == max(num_tiles - 3, 0)) publish_item(index + 1, drawn);
        if (i >= num_plain) finish_copies();
        score(at);
        if (!is_asked) ask(index, i + 1, at.after(1));  // while the products are under way, as all up to the wait
        const bool is_near = i + kWgmmaStages < num_plain;
        const int next_key = is_near ? key + (i + kWgmmaStages) * kTileRows : key_after_next(index, i);
        is_asked = next_key >= 0;
        TileRole role{i == leaf_end, false, item.end - item.begin - i * kTileRows};
        if (role.starts_leaf) leaf_end = min(i + leaf_tiles(item, i), num_tiles);
        role.ends_leaf = i + 1 == leaf_end;
        if (thread == 0) give_task(item, i, role, next_key, shared.task[at.stage()]);
        wgmma_wait();
        pin(s);
        meet();  // no warp reads the queries or the rope columns any more
        softmax(role, at.stage());
        arrive(shared.scored[at.stage()]);
        if (i + 1 == num_tiles) ask_queries(index + 1);
        if (role.ends_leaf) store_stats(item, i);
        at = at.after(1);
      }
    }
    wait(shared.empty[at.stage()], at.phase() ^ 1);
    if (thread == 0) shared.task[at.stage()].kind = ValuesTask::kNoMore;
    arrive(shared.scored[at.stage()]);
  }

  __device__ __forceinline__ void meet() const { asm volatile("bar.sync 1, %0;" ::"n"(kWarpgroup) : "memory"); }

  __device__ __forceinline__ void finish_copies() const {
    cp_async_wait<0>();
    fence_for_async();
    meet();
  }

  // --- items and loads ---

  // One warp: item 0 was found with the plan. If it has no keys, as that of a row that is not valid, the next one takes its
  // place.
  __device__ __forceinline__ void publish_first() {
    const AttnItem& item = shared.items[0];
    const bool is_empty = item.end == item.begin && blockIdx.x < uint32_t(shared.plan.num_items);
    __syncwarp();
    if (is_empty)
      publish_item(0, lane() == 0 ? draw(launch, shared.plan) : 0);
    else
      arrive(shared.item_ready[0]);
  }

  // One warp, whose first thread has drawn: the first item with keys, from what was drawn on, becomes number `index`. Late
  // draws keep the work even.
  __device__ __forceinline__ void publish_item(int index, uint64_t drawn) {
    AttnItem& item = shared.items[index & 1];
    if (lane() == 0) {
      uint32_t ticket = ticket_of(launch, shared.plan, drawn);
      item.begin = item.end = 0;
      while (ticket < uint32_t(shared.plan.num_items)) {
        find_item(launch, shared.plan, ticket, item);
        if (item.end > item.begin) break;
        ticket = ticket_of(launch, shared.plan, draw(launch, shared.plan));
      }
    }
    arrive(shared.item_ready[index & 1]);
  }

  // Asks for the queries of an item. No product of the item before is under way.
  __device__ __forceinline__ void ask_queries(int index) const {
    const AttnItem& item = wait_for_item(index);
    if (num_tiles_of(item) == 0 || warp() != 0 || !elect_one()) return;
    const uint32_t barrier = shared_address(&shared.queries_full), to = base + kQueries;
    const int first = int(launch.query_begin) + item.first_query;
    barrier_arrive_expect(barrier, kStageBytes);
    copy_tiles(to, maps.q_latent, first, 0, barrier);
    copy_tiles(to + kRopeBox, maps.q_rope, first, 0, barrier);
  }

  // Asks for tile i of an item, or the first one of the item after it, as soon as its stage is empty.
  __device__ __forceinline__ void ask(int index, int i, RingPlace to) {
    if (const int num_tiles = num_tiles_of(wait_for_item(index)); num_tiles > 0 && i >= num_tiles) i = 0, ++index;
    const AttnItem& item = wait_for_item(index);
    if (num_tiles_of(item) == 0) return;
    wait(shared.empty[to.stage()], to.phase() ^ 1);
    if (!is_plain(item, i)) {
      find_path(item, i, stage_at(to.stage()));
      copy_mixed_tile(item, i, stage_at(to.stage()));
      cp_async_commit();
      if (thread < kParts) barrier_arrive(shared_address(&shared.full[to.stage()][thread]));  // to count the phases
    } else if (warp() < kParts) {
      ask_part(maps.keys, first_key(item, i), to.stage(), warp());
    }
  }

  __device__ __forceinline__ int first_key(const AttnItem& item, int i) const {
    return item.stream * int(launch.a.num_slots) + item.begin + i * kTileRows;
  }

  // Where the tile two places behind tile i begins in the cache; -1 if that is not known yet, or it is not plain.
  __device__ __forceinline__ int key_after_next(int index, int i) const {
    const int num_tiles = num_tiles_of(wait_for_item(index));
    i += kWgmmaStages;
    if (i >= num_tiles) i -= num_tiles, ++index;
    const AttnItem& item = wait_for_item(index);
    return i < num_tiles_of(item) && is_plain(item, i) ? first_key(item, i) : -1;
  }

  // The nodes of tile i's keys. Parents are looked up in the tile's stage, which is still empty.
  __device__ __forceinline__ void find_path(const AttnItem& item, int i, uint32_t stage) const {
    const int first = item.begin + i * kTileRows - item.prefix, node = item.node;  // depth of the tile's first key
    if (first + kTileRows <= 0 || item.depth == node) return;  // only a chain is as deep as its index
    const int32_t* parent = launch.a.parent + item.stream * launch.a.num_tree_slots;
#pragma unroll 1
    for (int n = thread; n <= node; n += kWarpgroup)
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(stage + 4 * n), "r"(parent[n]) : "memory");
    meet();
    if (thread == 0) {
      int at = node;
#pragma unroll 1
      for (int depth = item.depth; depth >= max(first, 0); --depth) {
        if (depth < first + kTileRows) shared.path[depth - first] = uint16_t(at);
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(at) : "r"(stage + 4 * at) : "memory");
        at = at < 0 || at > node ? 0 : at;  // a broken tree may give wrong sums, not wrong addresses
      }
    }
    meet();
  }

  __device__ __forceinline__ void copy_mixed_tile(const AttnItem& item, int i, uint32_t to) const {
    const int t = thread, chunk = t % 8;
    const bool is_chain = item.depth == item.node;
#pragma unroll 1
    for (int key = t / 8; key < kTileRows; key += kWarpgroup / 8) {
      const int position = item.begin + i * kTileRows + key;
      const bool used = position < item.end;
      const int slot = !used ? 0 : position < item.prefix || is_chain ? position : item.prefix + shared.path[key];
      const char* from = item.keys + int64_t(slot) * kRowBytes + chunk * 16;
#pragma unroll
      for (int box = 0; box < kWgmmaBoxes; ++box)
        cp_async16(to + box * kTileBytes + chunk_offset(key, chunk), from + box * 128, used ? 16 : 0);
    }
  }

  // --- products ---

  __device__ __forceinline__ void load_queries() {
    const int at_row = thread / kWarp * 16 + thread % 16, at_chunk = thread % kWarp / 16;
#pragma unroll
    for (int k = 0; k < kRegisterSteps; ++k)
      load_matrix4(query[k], base + kQueries + k / 4 * kTileBytes + chunk_offset(at_row, k % 4 * 2 + at_chunk));
  }

  __device__ __forceinline__ void score(RingPlace at) {
    const uint64_t a = tile_descriptor(base + kQueries), b = tile_descriptor(stage_at(at.stage()));
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      wait(shared.full[at.stage()][part], at.phase());
      wgmma_begin();
#pragma unroll
      for (int k = part * kPartBoxes * 4; k < (part + 1) * kPartBoxes * 4; ++k) {
        const int offset = k / 4 * (kTileBytes / 16) + k % 4 * 2;  // 16 columns
        if (k < kRegisterSteps)
          wgmma_64x64(s, query[k < kRegisterSteps ? k : 0], b + offset, k == 0);
        else
          wgmma_64x64(s, a + offset, b + offset, k == 0);
      }
    }
    wgmma_commit();
  }

  struct TileRole {
    bool starts_leaf, ends_leaf;
    int num_keys;  // that count
  };
  __device__ __forceinline__ void give_task(const AttnItem& item, int i, TileRole role, int next_key, ValuesTask& task) const {
    task.kind = (role.starts_leaf ? ValuesTask::kStartsLeaf : 0) | (role.ends_leaf ? ValuesTask::kEndsLeaf : 0);
    task.next_key = next_key;
    if (!role.ends_leaf) return;
    const int64_t leaf = leaf_of(item.begin + i * kTileRows);
    task.sums = launch.partials + (leaf * launch.num_queries + item.first_query) * kWgmmaLatent;
    task.num_queries = item.num_queries;
  }

  // Scores become P. A thread has 16 keys of each of its two rows: 8 * block + 2 * pair, and the next.
  __device__ __forceinline__ void softmax(TileRole role, int stage) {
    if (role.num_keys < kTileRows) {
      const int pair = thread % 4;
#pragma unroll
      for (int j = 0; j < 32; ++j) s[j] = j / 4 * 8 + 2 * pair + (j & 1) >= role.num_keys ? -INFINITY : s[j];
    }
    float largest[2], alpha[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      largest[h] = fmaxf(s[2 * h], s[2 * h + 1]);
#pragma unroll
      for (int b = 1; b < 8; ++b) largest[h] = fmaxf(largest[h], fmaxf(s[b * 4 + 2 * h], s[b * 4 + 2 * h + 1]));
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) largest[h] = quad_max(largest[h]);
#pragma unroll
    for (int h = 0; h < 2; ++h) alpha[h] = rows[h].move(__fmul_rn(largest[h], launch.scale_log2), role.starts_leaf);
#pragma unroll
    for (int j = 0; j < 32; ++j) s[j] = exp2_approx(__fmaf_rn(s[j], launch.scale_log2, -rows[j / 2 % 2].maximum));
    add_sums();
    store_alpha(alpha, stage);
    store_probs(stage_at(stage) + kRopeBox);
  }

  // A thread's keys only; the four threads of a row add up when the leaf ends.
  __device__ __forceinline__ void add_sums() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum[4];
#pragma unroll
      for (int b = 0; b < 8; ++b) {
        const float two = __fadd_rn(s[b * 4 + 2 * h], s[b * 4 + 2 * h + 1]);
        sum[b % 4] = b < 4 ? two : __fadd_rn(sum[b % 4], two);
      }
      rows[h].sum = __fadd_rn(rows[h].sum, __fadd_rn(__fadd_rn(sum[0], sum[1]), __fadd_rn(sum[2], sum[3])));
    }
  }

  __device__ __forceinline__ void store_alpha(const float (&alpha)[2], int stage) const {
    const unsigned grows = __ballot_sync(0xffffffffu, alpha[0] != 1.0f || alpha[1] != 1.0f);
    float* const to = shared.alpha[stage] + row();
    if (thread % 4 == 0) to[0] = alpha[0], to[8] = alpha[1];
    if (lane() == 0) shared.grows[stage][thread / kWarp] = grows != 0;
  }

  __device__ __forceinline__ void store_probs(uint32_t to) const {
    const int at_row = row();
    to += thread % 4 * 4;
#pragma unroll
    for (int b = 0; b < 8; ++b)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(to + chunk_offset(at_row, b) + 8 * h * 128),
                     "r"(pack_bf16(s[b * 4 + 2 * h], s[b * 4 + 2 * h + 1])) : "memory");
    fence_for_async();
  }

  __device__ __forceinline__ void store_stats(const AttnItem& item, int i) const {
    const float sums[2] = {quad_sum(rows[0].sum), quad_sum(rows[1].sum)};
    if (thread % 4) return;
    float2* stats = launch.stats + leaf_of(item.begin + i * kTileRows);
    const int first = row();
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (first + 8 * h < item.num_queries)
        stats[(item.first_query + first + 8 * h) * launch.max_leaves] = make_float2(rows[h].maximum, sums[h]);
  }
};

}  // namespace kdtree
