// verify_attn: attention of tree nodes over the latent cache. One query is one head of one row.
//
// Order of additions, a constant of the project: keys lie in leaves of 64, aligned to absolute positions. A score is
// summed in 16 lanes (lane = i mod 16 over the row [latent, k_rope], closed by sum_lanes). In a leaf m = max score,
// p = exp(s - m), l sums p in 16 lanes (lane = key mod 16, closed by sum_lanes), acc sums p * latent in key order by
// fma. Leaves are folded in order of position: (m, l, acc) of two parts get the common maximum m' and are scaled by
// exp(m - m'). Nothing of this depends on the other rows, on the heads, on the threads or on how keys are gathered.
// BF16: p is rounded for acc, not for l.
#include <atomic>
#include <cmath>
#include <limits>

#include "constant.h"
#include "op_args.h"
#include "parallel.h"
#include "rows_in_use.h"
#include "scratch.h"
#include "tree_paths.h"
#include "vec16.h"

namespace kdtree {
namespace {

constexpr int64_t kLeaf = 64;
constexpr int64_t kMaxQueries = 48;  // queries that share the keys of a leaf while these are in cache
constexpr int kLeafVectors = kLeaf / kLanes;
constexpr int kTileQueries = 4, kTileVectors = 4;  // register tile of the weighted sum of latents

int64_t round_up(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// Up to kMaxQueries queries [first, first + count) of one stream, counted as row * H + head over the step.
struct Block {
  int64_t first, count;
};

// The keys of one leaf, from position `begin` on: pointers to FP32 rows of `row_size` values, zero past C + R.
struct Leaf {
  int64_t begin, count;
  const float* key[kLeaf];
};

// What one thread needs for a block. Running softmax of a query: maximum, sum and the weighted sum of latents.
struct Scratch {
  Floats query, keys, acc;
  float p[kMaxQueries][kLeaf];
  float max[kMaxQueries], sum[kMaxQueries];
  float keep[kMaxQueries], take[kMaxQueries];  // factors that join the state so far and a leaf
  int64_t row[kMaxQueries], limit[kMaxQueries];  // of a query: its row in the block, the keys of the leaf it sees
  TreePaths paths;

  Scratch(int64_t row_size, int64_t latent_size)
      : query(new_floats(kMaxQueries * row_size)),
        keys(new_floats(kLeaf * row_size)),
        acc(new_floats(kMaxQueries * latent_size)) {}
};

template <class Float>
class Attention {
 public:
  explicit Attention(const VerifyAttnArgs& args)
      : a(args),
        width(args.latent_dim + args.rope_dim),
        row_size(round_up(width)),
        latent_size(round_up(args.latent_dim)) {}

  // All leaves of one block of queries. Returns a Status.
  int run(const Block& block, Scratch& scratch) const {
    const int64_t first_row = block.first / a.num_heads;
    const int64_t num_rows = (block.first + block.count - 1) / a.num_heads - first_row + 1;
    if (const int status = find_paths(first_row, num_rows, scratch.paths)) return status;
    load_queries(block, scratch);
    const int64_t stream = a.stream[first_row], prefix = a.prefix_len[stream];
    const std::vector<TreePaths::Row>& rows = scratch.paths.rows();
    int64_t num_keys = 0;
    for (const TreePaths::Row& row : rows) num_keys = std::max(num_keys, prefix + row.num_nodes);

    Leaf leaf{};
    for (leaf.begin = 0; leaf.begin < num_keys; leaf.begin += kLeaf) {
      if (leaf.begin + kLeaf <= prefix) {  // the same keys for every row
        leaf.count = 0;
        gather(stream, leaf.begin + kLeaf, nullptr, scratch, leaf);
        attend(leaf, 0, block.count, prefix, scratch);
        continue;
      }
      leaf.count = 0;
      gather(stream, prefix, nullptr, scratch, leaf);
      for (int64_t row = 0, next; row < num_rows; row = next) {  // neighbouring rows on one path share its keys
        int64_t end = 0;
        for (next = row; next < num_rows && rows[next].first == rows[row].first; ++next)
          end = std::max(end, prefix + rows[next].num_nodes);
        if (end <= leaf.begin) continue;
        leaf.count = std::max<int64_t>(0, prefix - leaf.begin);  // of the prefix, gathered once for all rows
        gather(stream, std::min(end, leaf.begin + kLeaf), scratch.paths.nodes() + rows[row].first, scratch, leaf);
        const int64_t first = std::max<int64_t>(0, (first_row + row) * a.num_heads - block.first);
        const int64_t last = std::min(block.count, (first_row + next) * a.num_heads - block.first);
        attend(leaf, first, last, prefix, scratch);
      }
    }
    write(block, scratch);
    return kOk;
  }

 private:
  const VerifyAttnArgs& a;
  const int64_t width, row_size, latent_size;

  int find_paths(int64_t first_row, int64_t num_rows, TreePaths& paths) const {
    paths.clear();
    for (int64_t t = first_row; t < first_row + num_rows; ++t) {
      const int64_t tree = a.stream[t] * a.num_tree_slots;
      const int32_t node = a.node[t];
      if (a.prefix_len[a.stream[t]] + int64_t(node) >= a.num_slots) return kOutOfRange;
      if (const int status = paths.append(a.parent + tree, node, a.depth[tree + node])) return status;
    }
    return kOk;
  }

  void load_queries(const Block& block, Scratch& scratch) const {
    for (int64_t q = 0; q < block.count; ++q) {
      scratch.row[q] = (block.first + q) / a.num_heads - block.first / a.num_heads;
      float* out = scratch.query.get() + q * row_size;
      const Float* latent = static_cast<const Float*>(a.q_latent) + (block.first + q) * a.latent_dim;
      const Float* rope = static_cast<const Float*>(a.q_rope) + (block.first + q) * a.rope_dim;
      for (int64_t i = 0; i < a.latent_dim; ++i) out[i] = widen(latent[i]);
      for (int64_t i = 0; i < a.rope_dim; ++i) out[a.latent_dim + i] = widen(rope[i]);
      for (int64_t i = width; i < row_size; ++i) out[i] = 0.0f;
    }
  }

  // Extends a leaf by the keys at positions [leaf.begin + leaf.count, end) of a stream: prefix slots, then a path's.
  void gather(int64_t stream, int64_t end, const int32_t* path, Scratch& scratch, Leaf& leaf) const {
    const Float* slots = static_cast<const Float*>(a.cache) + stream * a.num_slots * width;
    const int64_t prefix = a.prefix_len[stream];
    for (; leaf.begin + leaf.count < end; ++leaf.count) {
      const int64_t j = leaf.count, position = leaf.begin + j;
      const int64_t slot = position < prefix ? position : prefix + path[position - prefix];
      leaf.key[j] = key_row(slots + slot * width, scratch.keys.get() + j * row_size);
    }
    for (int64_t j = leaf.count; j < kLeaf; ++j) leaf.key[j] = leaf.key[0];  // scored in vain by the last tile
  }

  // FP32 rows that fill their vectors are used in place, others are copied.
  const float* key_row(const float* row, float* copy) const {
    return width == row_size ? row : copy_row(row, copy);
  }
  const float* key_row(const Bf16* row, float* copy) const { return copy_row(row, copy); }

  template <class Stored>
  const float* copy_row(const Stored* row, float* copy) const {
    for (int64_t i = 0; i < row_size; i += kLanes) load_first(row + i, width - i).store(copy + i);
    return copy;
  }

  // Queries [first, last) of the block over one leaf.
  void attend(const Leaf& leaf, int64_t first, int64_t last, int64_t prefix, Scratch& scratch) const {
    int64_t most = 0;
    for (int64_t q = first; q < last; ++q) {
      const int64_t num_keys = prefix + scratch.paths.rows()[scratch.row[q]].num_nodes;
      scratch.limit[q] = std::max<int64_t>(0, std::min(leaf.count, num_keys - leaf.begin));
      most = std::max(most, scratch.limit[q]);
    }
    score(leaf, most, first, last, scratch);
    for (int64_t q = first; q < last; ++q)
      if (scratch.limit[q]) soften(leaf.begin == 0, q, scratch);
    for (int64_t q = first, next; q < last; q = next) {
      next = q + 1;
      if (scratch.limit[q] == 0) continue;
      while (next < last && next - q < kTileQueries && scratch.limit[next]) ++next;
      weigh(leaf, q, int(next - q), scratch);
    }
  }

  void score(const Leaf& leaf, int64_t num_keys, int64_t first, int64_t last, Scratch& scratch) const {
    for (int64_t j = 0; j < num_keys; j += kLanes) {
      int64_t q = first;
      for (; q + 2 <= last; q += 2) {
        score_tile<2>(leaf.key + j, q, j, scratch);
        score_tile<2>(leaf.key + j + 8, q, j + 8, scratch);
      }
      if (q < last) score_tile<1>(leaf.key + j, q, j, scratch);
    }
  }

  // kQueries x (16 / kQueries) scores.
  template <int kQueries>
  void score_tile(const float* const* keys, int64_t q, int64_t j, Scratch& scratch) const {
    constexpr int kKeys = kLanes / kQueries;
    Vec16 acc[kLanes];  // query r, key k at r * kKeys + k
    for (Vec16& sum : acc) sum = Vec16::all(0.0f);
    const float* query = scratch.query.get() + q * row_size;
    for (int64_t i = 0; i < row_size; i += kLanes) {
      Vec16 value[kQueries];
      for (int r = 0; r < kQueries; ++r) value[r] = Vec16::load(query + r * row_size + i);
      for (int k = 0; k < kKeys; ++k) {
        const Vec16 key = Vec16::load(keys[k] + i);
        for (int r = 0; r < kQueries; ++r) acc[r * kKeys + k] = fma(value[r], key, acc[r * kKeys + k]);
      }
    }
    float scores[kLanes];
    (sum_lanes_of_16(acc) * Vec16::all(a.scale)).store(scores);
    for (int r = 0; r < kQueries; ++r) std::memcpy(&scratch.p[q + r][j], scores + r * kKeys, kKeys * sizeof(float));
  }

  // Scores to weights p (rounded to the storage type), and the factors that join this leaf to the state.
  static void soften(bool is_first, int64_t q, Scratch& scratch) {
    const Vec16 lowest = Vec16::all(-std::numeric_limits<float>::infinity());
    float* p = scratch.p[q];
    Vec16 value[kLeafVectors], largest = lowest, sum = Vec16::all(0.0f);
    const int num_vectors = int((scratch.limit[q] + kLanes - 1) / kLanes);  // the others would add zeros
    for (int v = 0; v < num_vectors; ++v) {
      value[v] = first_lanes(scratch.limit[q] - v * kLanes, Vec16::load(p + v * kLanes), lowest);
      largest = max(value[v], largest);
    }
    const float leaf_max = max_lanes(largest);
    for (int v = 0; v < num_vectors; ++v) {
      const Vec16 weight = exp(value[v] - Vec16::all(leaf_max));
      sum = sum + weight;
      rounded(weight, static_cast<const Float*>(nullptr)).store(p + v * kLanes);
    }
    const float leaf_sum = sum_lanes(sum);
    if (is_first) {
      scratch.max[q] = leaf_max;
      scratch.sum[q] = leaf_sum;
      return;
    }
    const float new_max = std::max(scratch.max[q], leaf_max);
    float factors[kLanes] = {scratch.max[q] - new_max, leaf_max - new_max};
    exp(Vec16::load(factors)).store(factors);
    scratch.keep[q] = factors[0];
    scratch.take[q] = factors[1];
    scratch.max[q] = new_max;
    scratch.sum[q] = std::fma(scratch.sum[q], factors[0], leaf_sum * factors[1]);
  }

  // Adds the weighted latents of a leaf to the states of queries [q, q + height).
  void weigh(const Leaf& leaf, int64_t q, int height, Scratch& scratch) const {
    for (int64_t c = 0; c < latent_size; c += kTileVectors * kLanes) {
      const int num_vectors = int(std::min<int64_t>(kTileVectors, (latent_size - c) / kLanes));
      with_constant<kTileQueries>(height, [&](auto rows) {
        with_constant<kTileVectors>(num_vectors, [&](auto vectors) { weigh_tile<rows, vectors>(leaf, q, c, scratch); });
      });
    }
  }

  // Latents [c, c + 16 * kVectors): first the keys that all queries of the tile see, then each one's others.
  template <int kQueries, int kVectors>
  void weigh_tile(const Leaf& leaf, int64_t q, int64_t c, Scratch& scratch) const {
    Vec16 acc[kQueries][kVectors];
    for (auto& row : acc)
      for (Vec16& sum : row) sum = Vec16::all(0.0f);
    int64_t common = scratch.limit[q];
    for (int r = 1; r < kQueries; ++r) common = std::min(common, scratch.limit[q + r]);
    for (int64_t j = 0; j < common; ++j) {
      Vec16 latent[kVectors];
      for (int v = 0; v < kVectors; ++v) latent[v] = Vec16::load(leaf.key[j] + c + v * kLanes);
      for (int r = 0; r < kQueries; ++r) {
        const Vec16 weight = Vec16::all(scratch.p[q + r][j]);
        for (int v = 0; v < kVectors; ++v) acc[r][v] = fma(weight, latent[v], acc[r][v]);
      }
    }
    for (int r = 0; r < kQueries; ++r) {
      for (int64_t j = common; j < scratch.limit[q + r]; ++j) {
        const Vec16 weight = Vec16::all(scratch.p[q + r][j]);
        for (int v = 0; v < kVectors; ++v)
          acc[r][v] = fma(weight, Vec16::load(leaf.key[j] + c + v * kLanes), acc[r][v]);
      }
      float* state = scratch.acc.get() + (q + r) * latent_size + c;
      const Vec16 keep = Vec16::all(scratch.keep[q + r]), take = Vec16::all(scratch.take[q + r]);
      for (int v = 0; v < kVectors; ++v, state += kLanes)
        (leaf.begin == 0 ? acc[r][v] : fma(Vec16::load(state), keep, acc[r][v] * take)).store(state);
    }
  }

  void write(const Block& block, const Scratch& scratch) const {
    for (int64_t q = 0; q < block.count; ++q) {
      const Vec16 sum = Vec16::all(scratch.sum[q]);
      Float* out = static_cast<Float*>(a.out) + (block.first + q) * a.latent_dim;
      const float* acc = scratch.acc.get() + q * latent_size;
      for (int64_t i = 0; i < a.latent_dim; i += kLanes)
        store_first(Vec16::load(acc + i) / sum, out + i, a.latent_dim - i);
    }
  }
};

int check(const VerifyAttnArgs& a) {
  for (int64_t s = 0; s < a.num_streams; ++s)
    if (a.prefix_len[s] < 0 || a.prefix_len[s] > a.num_slots) return kOutOfRange;
  for (int64_t t = 0; t < a.num_rows; ++t)
    if (a.stream[t] < 0 || a.stream[t] >= a.num_streams || a.node[t] < 0 || a.node[t] >= a.num_tree_slots)
      return kOutOfRange;
  return kOk;
}

// Work of all rows in multiply-adds, about.
int64_t total_work(const VerifyAttnArgs& a) {
  int64_t num_keys = 0;
  for (int64_t t = 0; t < a.num_rows; ++t)
    num_keys += int64_t(a.prefix_len[a.stream[t]]) +
                std::clamp<int64_t>(a.depth[a.stream[t] * a.num_tree_slots + a.node[t]], 0, a.num_tree_slots) + 1;
  return num_keys * a.num_heads * (2 * a.latent_dim + a.rope_dim);
}

// Cuts the queries into blocks of one stream each, as even as whole rows allow, and at least one per thread.
std::vector<Block> make_blocks(const VerifyAttnArgs& a, int num_threads) {
  const int64_t num_queries = a.num_rows * a.num_heads;
  const int64_t shares = (num_queries + num_threads * kMaxQueries - 1) / (num_threads * kMaxQueries) * num_threads;
  int64_t size = std::min(kMaxQueries, (num_queries + shares - 1) / shares);
  if (size > a.num_heads) size = std::min(kMaxQueries, (size + a.num_heads - 1) / a.num_heads * a.num_heads);
  std::vector<Block> blocks;
  for (int64_t row = 0, next; row < a.num_rows; row = next) {
    next = row + 1;
    while (next < a.num_rows && a.stream[next] == a.stream[row]) ++next;
    const int64_t first = row * a.num_heads, last = next * a.num_heads;
    for (int64_t q = first; q < last; q += size) blocks.push_back({q, std::min(size, last - q)});
  }
  return blocks;
}

template <class Float>
int verify_attn(const VerifyAttnArgs& a) {
  const int num_threads = threads_for(total_work(a), a.num_threads);
  const std::vector<Block> blocks = make_blocks(a, num_threads);
  const Attention<Float> attention(a);
  std::vector<std::unique_ptr<Scratch>> scratch(num_threads);
  for (auto& own : scratch) own.reset(new Scratch(round_up(a.latent_dim + a.rope_dim), round_up(a.latent_dim)));
  std::atomic<int> failure{kOk};
  run_tasks(num_threads, blocks.size(), [&](int64_t i, int thread) {
    const int status = attention.run(blocks[i], *scratch[thread]);
    if (status != kOk) failure = status;
  });
  return failure;
}

}  // namespace

int verify_attn_cpu(const VerifyAttnArgs& args) {
  const VerifyAttnArgs a = with_rows_in_use(args);
  if (const int status = check(a)) return status;
  if (a.num_rows == 0) return kOk;
  return a.dtype == kF32 ? verify_attn<float>(a) : verify_attn<Bf16>(a);
}

}  // namespace kdtree
