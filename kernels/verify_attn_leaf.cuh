// verify_attn with mma.sync where there is one stream and a block for every item of 16 queries and one leaf of 128 keys, as
// in a step behind a short prefix. A block finds its item without a plan, the one that the plan would give it, and has all
// of a leaf's keys at once: a warp scores a tile, four tiles side by side, and their maxima meet in shared memory. Each
// addition is the one that MmaWorker makes, in its order.
//
// Before the previous kernel ends, a block looks at what its item follows from, and rehearses the arithmetic on whatever
// lies in shared memory, so that its instructions are at hand. Afterwards it asks for the keys and queries of that item,
// and looks again while they come; what differs makes it begin anew.
#pragma once
#include "verify_attn_mma_keys.cuh"
#include "verify_attn_softmax.cuh"

namespace kdtree {

constexpr int kLeafKeys = 1 << kLog2FirstLeaf, kLeafQueries = 16, kLeafNodes = kMmaThreads;

template <class S>
struct LeafShared {
  static constexpr int kTiles = kLeafKeys / S::kKeys, kProbsPitch = 2 * kLeafKeys + 16;
  alignas(16) unsigned char key[kLeafKeys][S::kPitch];
  alignas(16) unsigned char query[kLeafQueries][S::kPitch];
  alignas(16) unsigned char probs[kLeafQueries][kProbsPitch];
  float largest[kTiles][kLeafQueries], alpha[kTiles][kLeafQueries], sum[kTiles][kLeafQueries];  // of each tile
  int parent[kLeafNodes], depth[kLeafNodes], path[kLeafNodes];
  int4 look;  // prefix, number of rows, stream and node, as one thread found them
};

// What a block's item follows from; `parent` and `depth` are those of node `thread`.
struct LeafLook {
  int prefix, num_rows, stream, node, parent, depth;

  __device__ __forceinline__ bool operator!=(const LeafLook& b) const {
    return prefix != b.prefix || num_rows != b.num_rows || stream != b.stream || node != b.node || parent != b.parent ||
           depth != b.depth;
  }
};

// The block's item; without keys, if it has none. With 0 queries nothing is stored.
struct LeafItem {
  int begin = 0, end = 0, prefix = 0, plain_end = 0, first_query = 0, num_queries = 0;
  int row = -1;  // of a tail item that answers for its row
};

template <class S>
struct LeafBlock {
  static constexpr int kTiles = LeafShared<S>::kTiles, kBlocks = S::kKeyBlocks, kChunks = S::kRowBytes / 16;
  static constexpr int kTotals = kMmaThreads / kWarp - 1;  // the warp that adds up the sums
  static_assert(S::kKeys == 32 && kBlocks == 2 && S::kWarpColumns == 16 && S::kValueWarps <= kTotals);
  static_assert(kLeafKeys * kChunks % kMmaThreads == 0 && kLeafQueries * kChunks <= kMmaThreads);
  static_assert(sizeof(LeafShared<S>) <= S::kSharedBytes);

  const AttnLaunch& launch;
  LeafShared<S>& shared;
  const int num_heads = int(launch.a.num_heads), num_slots = int(launch.a.num_slots);
  const int thread = int(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp, group = lane / 4, pair = lane % 4;
  const int head_tiles = ceil_shift(num_heads, 4);
  const bool may_be_tail = int(blockIdx.x) < int(launch.num_rows) * head_tiles;
  LeafItem item;

  __device__ LeafBlock(const AttnLaunch& launch, unsigned char* memory)
      : launch(launch), shared(*reinterpret_cast<LeafShared<S>*>(memory)) {}

  // All threads of the block. False if the items are none of one leaf, or too many: then nothing has been done. Where many
  // rows may be in use it does not even look.
  __device__ __forceinline__ bool run() {
    const VerifyAttnArgs& a = launch.a;
    if (a.num_tree_slots > kLeafNodes || 4 * launch.num_rows * head_tiles > gridDim.x) return false;
    LeafLook seen = look();  // on its way during the rehearsal
    int begin = 0;
#pragma unroll 1
    for (bool is_real = false;; is_real = true) {
      const int num_tiles = is_real ? (min(item.end - begin, kLeafKeys) + S::kKeys - 1) / S::kKeys : kTiles;
      if (warp < kTiles) score(begin, num_tiles);
      __syncthreads();
      if (warp < S::kValueWarps) add_values(begin, num_tiles);
      if (warp == kTotals) store_stats(begin, num_tiles);
      begin = is_real ? begin + kLeafKeys : 0;
      if (is_real && begin >= item.end) return true;
      if (!is_real && !find_item(seen)) return false;
      __syncthreads();
      if (!is_real) {
        prefetch();
        wait_for_previous_kernel();
        allow_next_kernel();
        begin = item.begin;
      }
      ask(begin);
      bool changed = false;
      if (!is_real) {
        const LeafLook now = look();
        changed = now != seen;
        seen = now;
      }
      cp_async_wait<0>();
      if (__syncthreads_or(changed)) {
        if (!find_item(seen)) return false;
        __syncthreads();
        begin = item.begin;
        ask(begin);
        cp_async_wait<0>();
        __syncthreads();
      }
      if (!is_real) store_leaves(clipped_rows(seen));
      if (begin >= item.end) return true;
    }
  }

  // --- the item ----------------------------------------------------------------------------------------------------

  __device__ __forceinline__ LeafLook look() const {
    const VerifyAttnArgs& a = launch.a;
    LeafLook l{load_now(a.prefix_len), int(launch.row_begin + launch.num_rows), 0, 0, 0, 0};
    if (a.num_rows_device != nullptr) l.num_rows = load_now(a.num_rows_device);
    if (!may_be_tail) return l;
    const int64_t row = launch.row_begin + int(blockIdx.x) / head_tiles;
    l.stream = load_now(a.stream + row);
    l.node = load_now(a.node + row);
    if (thread < int(a.num_tree_slots)) l.parent = load_now(a.parent + thread), l.depth = load_now(a.depth + thread);
    return l;
  }

  __device__ __forceinline__ int clipped_rows(const LeafLook& l) const {
    const int64_t used = int64_t(l.num_rows) - launch.row_begin;
    return int(used < 0 ? 0 : used < launch.num_rows ? used : launch.num_rows);
  }

  // The item that AttnPlan has for this block; false if its items are others than those meant here. While the previous kernel
  // runs threads may have seen different numbers: they all take those of one.
  __device__ __forceinline__ bool find_item(LeafLook& l) {
    shared.parent[thread] = l.parent;
    shared.depth[thread] = l.depth;
    if (thread == 0) shared.look = make_int4(l.prefix, l.num_rows, l.stream, l.node);
    __syncthreads();
    const int4 look = shared.look;
    l = {look.x, look.y, look.z, look.w, l.parent, l.depth};
    const int num_rows = clipped_rows(l), tails = num_rows * head_tiles, num_nodes = int(launch.a.num_tree_slots);
    if (l.prefix < 0 || l.prefix > num_slots || l.prefix + num_nodes > leaf_region_begin(1)) return false;
    const int leaves = l.prefix / kLeafKeys, tiles = ceil_shift(num_rows * num_heads, 4);
    if (tails > int(gridDim.x) / 2 || tails + tiles * leaves > int(gridDim.x)) return false;
    item = LeafItem();
    const int index = int(blockIdx.x) - tails;
    if (index < 0)
      find_tail(l, leaves * kLeafKeys);
    else if (index < tiles * leaves)
      find_shared(index, leaves, tiles, num_rows * num_heads);
    return true;
  }

  __device__ __forceinline__ void find_shared(int index, int leaves, int tiles, int num_queries) {
    item.first_query = index % tiles * kLeafQueries;
    item.num_queries = min(kLeafQueries, num_queries - item.first_query);
    item.begin = (leaves - 1 - index / tiles) * kLeafKeys;
    item.end = item.prefix = item.plain_end = item.begin + kLeafKeys;
  }

  __device__ __forceinline__ void find_tail(const LeafLook& l, int begin) {
    const int row = int(blockIdx.x) / head_tiles, head = int(blockIdx.x) % head_tiles * kLeafQueries;
    if (head == 0) item.row = row;
    bool valid = l.stream == 0 && l.node >= 0 && l.node < int(launch.a.num_tree_slots) && l.prefix + l.node < num_slots;
    const int depth = valid ? shared.depth[l.node] : -1;
    valid = valid && depth >= 0 && depth <= l.node;
    if (!valid) return;
    item.first_query = row * num_heads + head;
    item.num_queries = min(kLeafQueries, num_heads - head);
    item.prefix = l.prefix;
    item.begin = begin;
    item.end = l.prefix + depth + 1;
    item.plain_end = depth == l.node ? item.end : l.prefix;  // only a chain is as deep as its index
    if (thread == 0 && depth < l.node) find_path(l.node, depth);
  }

  // One thread: the nodes from the root to the item's node.
  __device__ __forceinline__ void find_path(int node, int depth) {
    int at = node;
#pragma unroll 1
    for (int k = depth; k >= 0; --k) {
      shared.path[k] = at;
      at = shared.parent[at];
      at = at < 0 || at > node ? 0 : at;  // a broken tree may give wrong sums, not wrong addresses
    }
  }

  // How many leaves the rows have, for the fold.
  __device__ __forceinline__ void store_leaves(int num_rows) const {
    if (item.row >= 0 && thread == 0)
      launch.num_leaves[item.row] = item.end > item.begin ? leaf_of(item.end - 1) + 1 : kInvalidRow;
    if (blockIdx.x + 1 < gridDim.x) return;  // the last block has the least to do
#pragma unroll 1
    for (int t = num_rows + thread; t < int(launch.num_rows); t += kMmaThreads) launch.num_leaves[t] = kUnusedRow;
  }

  // --- loads -------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ const char* key_address(int slot) const {
    return static_cast<const char*>(launch.a.cache) + int64_t(slot) * S::kRowBytes;
  }

  // Asks the L2 cache for the item's share of the prefix. No value comes of it, so it does not matter who still writes there.
  __device__ __forceinline__ void prefetch() const {
    constexpr int kPieceBytes = 4096;
    const int num_bytes = (min(item.end, item.prefix) - item.begin) * S::kRowBytes, begin = thread * kPieceBytes;
    if (begin < num_bytes) prefetch_to_l2(key_address(item.begin) + begin, min(kPieceBytes, num_bytes - begin));
  }

  // Asks for the queries and for the keys of the leaf from `begin`; zeros fill up the 16 queries and the last tile.
  __device__ __forceinline__ void ask(int begin) const {
    const int num_keys = min(item.end - begin, kLeafKeys), num_plain = max(0, min(item.plain_end - begin, num_keys));
    const uint32_t to = shared_address(shared.key);
    const char* from = key_address(begin);
#pragma unroll
    for (int i = 0; i < kLeafKeys * kChunks / kMmaThreads; ++i) {
      const int c = thread + i * kMmaThreads;
      if (c < num_plain * kChunks) cp_async16(to + c / kChunks * S::kPitch + c % kChunks * 16, from + c * 16);
    }
    ask_queries();
    const int padded = (num_keys + S::kKeys - 1) / S::kKeys * S::kKeys;
#pragma unroll 1
    for (int c = num_plain * kChunks + thread; c < padded * kChunks; c += kMmaThreads) {
      const int key = c / kChunks, piece = c % kChunks * 16;
      const bool used = key < num_keys;
      const int slot = used ? item.prefix + shared.path[begin + key - item.prefix] : 0;
      cp_async16(to + key * S::kPitch + piece, key_address(slot) + piece, used ? 16 : 0);
    }
  }

  __device__ __forceinline__ void ask_queries() const {
    constexpr int kLatentChunks = S::kLatent / 8;
    const int row = thread / kChunks, chunk = thread % kChunks;
    if (row >= kLeafQueries) return;
    const bool used = row < item.num_queries;
    const int64_t q = used ? launch.query_begin + item.first_query + row : 0;
    const char* from = chunk < kLatentChunks
                           ? static_cast<const char*>(launch.a.q_latent) + q * (S::kLatent * 2) + chunk * 16
                           : static_cast<const char*>(launch.a.q_rope) + q * (S::kRope * 2) + (chunk - kLatentChunks) * 16;
    cp_async16(shared_address(shared.query) + row * S::kPitch + chunk * 16, from, used ? 16 : 0);
  }

  // --- scores ------------------------------------------------------------------------------------------------------

  // Warp t: P of tile t, if there is one. A thread has 8 keys of two queries, group + 8 h.
  __device__ __forceinline__ void score(int begin, int num_tiles) const {
    float v[2][4 * kBlocks];
    if (warp < num_tiles) {
      multiply(v);
      const int num_left = item.end - begin - warp * S::kKeys - 2 * pair;  // keys from here on that count
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float largest = -INFINITY;
#pragma unroll
        for (int j = 0; j < 4 * kBlocks; ++j) {
          v[h][j] = (j >> 1) * 8 + (j & 1) >= num_left ? -INFINITY : v[h][j];
          largest = fmaxf(largest, v[h][j]);
        }
        largest = __fmul_rn(quad_max(largest), launch.scale_log2);
        if (pair == 0) shared.largest[warp][group + 8 * h] = largest;
      }
    }
    block_meet<1>(kTiles * kWarp);
    if (warp < num_tiles) {
      softmax(v[0], group);
      softmax(v[1], group + 8);
    }
  }

  // Scores of the warp's tile, from partial ones over quarters of the columns.
  __device__ __forceinline__ void multiply(float (&v)[2][4 * kBlocks]) const {
    const uint32_t query_at = shared_address(shared.query) + (lane & 15) * S::kPitch + (lane >> 4) * 16;
    const uint32_t key_at = shared_address(shared.key) + (warp * S::kKeys + (lane & 7) + ((lane >> 4) << 3)) * S::kPitch +
                            ((lane >> 3) & 1) * 16;
    float p[kQuarters][kBlocks][2][4] = {};
#pragma unroll
    for (int step = 0; step < S::kSteps; ++step) {
      uint32_t query[4], key[4];
      load_matrix4(query, query_at + step * 32);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        load_matrix4(key, key_at + b * 16 * S::kPitch + step * 32);
        mma_bf16(p[step / S::kQuarterSteps][b][0], query, key[0], key[1]);
        mma_bf16(p[step / S::kQuarterSteps][b][1], query, key[2], key[3]);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int j = 0; j < 4 * kBlocks; ++j) {
        const int b = j / 4, n = j / 2 % 2, c = 2 * h + j % 2;
        v[h][j] = __fadd_rn(__fadd_rn(p[0][b][n][c], p[1][b][n][c]), __fadd_rn(p[2][b][n][c], p[3][b][n][c]));
      }
  }

  // The maximum moves from tile to tile up to this one.
  __device__ __forceinline__ void softmax(float (&v)[4 * kBlocks], int query) const {
    RowMaximum row;
    float alpha = 1.0f;
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
      if (t <= warp) alpha = row.move(shared.largest[t][query], t == 0);
    const uint32_t to = shared_address(shared.probs) + query * LeafShared<S>::kProbsPitch + warp * S::kKeys * 2 + pair * 4;
#pragma unroll
    for (int j = 0; j < 4 * kBlocks; ++j) v[j] = exp2_approx(__fmaf_rn(v[j], launch.scale_log2, -row.maximum));
#pragma unroll
    for (int j = 0; j < 2 * kBlocks; ++j)
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(to + j * 16), "r"(pack_bf16(v[2 * j], v[2 * j + 1])) : "memory");
    float sum = v[0];
#pragma unroll
    for (int j = 1; j < 4 * kBlocks; ++j) sum = __fadd_rn(sum, v[j]);
    sum = quad_sum(sum);
    if (pair > 0) return;
    shared.alpha[warp][query] = alpha;
    shared.sum[warp][query] = sum;
  }

  // Maxima and sums of the leaf, a query a lane.
  __device__ __forceinline__ void store_stats(int begin, int num_tiles) const {
    if (lane >= kLeafQueries) return;
    RowMaximum row;
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
      if (t < num_tiles) {
        row.move(shared.largest[t][lane], t == 0);
        row.sum = __fadd_rn(row.sum, shared.sum[t][lane]);
      }
    if (lane < item.num_queries)
      launch.stats[(item.first_query + lane) * launch.max_leaves + leaf_of(begin)] = make_float2(row.maximum, row.sum);
  }

  // --- values ------------------------------------------------------------------------------------------------------

  // A warp: its 16 columns of P V go to the workspace.
  __device__ __forceinline__ void add_values(int begin, int num_tiles) const {
    const uint32_t probs_at = shared_address(shared.probs) + (lane & 15) * LeafShared<S>::kProbsPitch + (lane >> 4) * 16;
    const uint32_t value_at = shared_address(shared.key) + (lane & 15) * S::kPitch + (lane >> 4) * 16 + warp * 32;
    float acc[2][4] = {};
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      if (t >= num_tiles) break;
      uint32_t probs[kBlocks][4], value[kBlocks][4];
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        load_matrix4(probs[b], probs_at + (t * kBlocks + b) * 32);
        load_matrix4_transposed(value[b], value_at + (t * S::kKeys + b * 16) * S::kPitch);
      }
      if (t > 0) rescale(acc, shared.alpha[t]);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        mma_bf16(acc[0], probs[b], value[b][0], value[b][1]);
        mma_bf16(acc[1], probs[b], value[b][2], value[b][3]);
      }
    }
    float* to = launch.partials + (int64_t(leaf_of(begin)) * launch.num_queries + item.first_query + group) * S::kLatent;
    to += warp * 16 + 2 * pair;
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (group + 8 * h < item.num_queries)
#pragma unroll
        for (int n = 0; n < 2; ++n)
          *reinterpret_cast<float2*>(to + 8 * h * S::kLatent + n * 8) = make_float2(acc[n][2 * h], acc[n][2 * h + 1]);
  }

  __device__ __forceinline__ void rescale(float (&acc)[2][4], const float (&alpha)[kLeafQueries]) const {
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) acc[n][c] = __fmul_rn(acc[n][c], alpha[group + c / 2 * 8]);
  }
};

}  // namespace kdtree
