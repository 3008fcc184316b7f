// verify_attn: attention of tree nodes over the latent cache. One query is one head of one row.
//
// Order of additions, a constant of the project: keys lie in leaves of 64, aligned to absolute positions. A score is
// summed in 16 lanes (lane = i mod 16 over the row [latent, k_rope], closed by sum_lanes). In a leaf m = max score,
// p = exp(s - m), l sums p in 16 lanes (lane = key mod 16, closed by sum_lanes), acc sums p * latent in key order by
// fma. Leaves are folded in order of position: (m, l, acc) of two parts get the common maximum m', scaled by exp(m - m').
// Nothing of this depends on the other rows, on the heads, on the threads or on how keys are gathered. BF16: p is
// rounded for acc, not for l.
#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "op_args.h"
#include "parallel.h"
#include "vec16.h"

namespace kdtree {
namespace {

constexpr int64_t kLeaf = 64;
constexpr int64_t kMaxQueries = 32;  // queries that share the keys of a leaf while these are in cache
constexpr int kLeafVectors = kLeaf / kLanes;

int64_t round_up(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// The slots of one root-to-node path below the prefix; rows on the same path share it and use its first entries.
struct Path {
  std::vector<int32_t> node;  // by depth
};

// A row of a block: which path it lies on, and the number of keys it sees.
struct Row {
  int64_t path, num_keys;
};

// Up to kMaxQueries queries [first, first + count) of one stream, counted as row * H + head over the step.
struct Block {
  int64_t first, count;
};

// The keys of one leaf: pointers to FP32 rows of `row_size` values, zero past C + R.
struct Leaf {
  const float* key[kLeaf];
  int64_t count;
};

// Running softmax of one query: maximum, sum, and weighted latents (in Scratch).
struct State {
  float max, sum;
};

struct Scratch {
  std::unique_ptr<float[]> query, keys, acc;
  float p[kMaxQueries][kLeaf];
  State state[kMaxQueries];
  std::vector<Path> paths;
  std::vector<Row> rows;

  Scratch(int64_t row_size, int64_t latent_size)
      : query(new float[kMaxQueries * row_size]),
        keys(new float[kLeaf * row_size]),
        acc(new float[kMaxQueries * latent_size]) {}
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
    if (const int status = find_paths(first_row, num_rows, scratch)) return status;
    load_queries(block, scratch);
    const int64_t stream = a.stream[first_row];
    const int64_t prefix = a.prefix_len[stream];
    int64_t num_keys = 0;
    for (const Row& row : scratch.rows) num_keys = std::max(num_keys, row.num_keys);

    Leaf leaf;
    for (int64_t begin = 0; begin < num_keys; begin += kLeaf) {
      if (begin + kLeaf <= prefix) {  // the same keys for every row
        gather(stream, begin, begin + kLeaf, nullptr, scratch, leaf);
        attend(leaf, begin, 0, block.count, block, scratch);
        continue;
      }
      for (int64_t row = 0, next; row < num_rows; row = next) {  // neighbouring rows on one path share its keys
        int64_t end = 0;
        for (next = row; next < num_rows && scratch.rows[next].path == scratch.rows[row].path; ++next)
          end = std::max(end, scratch.rows[next].num_keys);
        if (end <= begin) continue;
        gather(stream, begin, std::min(end, begin + kLeaf), &scratch.paths[scratch.rows[row].path], scratch, leaf);
        const int64_t first = std::max<int64_t>(0, (first_row + row) * a.num_heads - block.first);
        const int64_t last = std::min(block.count, (first_row + next) * a.num_heads - block.first);
        attend(leaf, begin, first, last, block, scratch);
      }
    }
    write(block, scratch);
    return kOk;
  }

 private:
  const VerifyAttnArgs& a;
  const int64_t width, row_size, latent_size;

  // Walks from each row's node to the root. A row whose node continues the previous row's path shares it.
  int find_paths(int64_t first_row, int64_t num_rows, Scratch& scratch) const {
    scratch.paths.clear();
    scratch.rows.clear();
    for (int64_t t = first_row; t < first_row + num_rows; ++t) {
      const int64_t stream = a.stream[t], prefix = a.prefix_len[stream];
      const int32_t* parent = a.parent + stream * a.num_tree_slots;
      int32_t node = a.node[t];
      const int64_t depth = a.depth[stream * a.num_tree_slots + node];
      if (depth < 0 || depth > node) return kInvalidTree;
      if (prefix + node >= a.num_slots) return kOutOfRange;
      std::vector<int32_t> above;  // this row's nodes from its own upwards, down to where the known path has them
      int64_t d = depth;
      const std::vector<int32_t>* known = scratch.paths.empty() ? nullptr : &scratch.paths.back().node;
      for (; d >= 0; --d) {
        if (known && d < int64_t(known->size()) && (*known)[d] == node) break;
        above.push_back(node);
        const int32_t next = parent[node];
        if (d == 0 ? next != -1 : next < 0 || next >= node) return kInvalidTree;
        node = next;
      }
      const int64_t shared = d + 1;
      if (!known || shared < int64_t(known->size())) {
        if (known && above.empty()) {  // an earlier node of the known path: nothing to add
          scratch.rows.push_back({int64_t(scratch.paths.size()) - 1, prefix + depth + 1});
          continue;
        }
        Path branch;
        if (known) branch.node.assign(known->begin(), known->begin() + shared);
        scratch.paths.push_back(std::move(branch));
      }
      std::vector<int32_t>& path = scratch.paths.back().node;
      path.insert(path.end(), above.rbegin(), above.rend());
      scratch.rows.push_back({int64_t(scratch.paths.size()) - 1, prefix + depth + 1});
    }
    return kOk;
  }

  void load_queries(const Block& block, Scratch& scratch) const {
    for (int64_t q = 0; q < block.count; ++q) {
      float* out = scratch.query.get() + q * row_size;
      const Float* latent = static_cast<const Float*>(a.q_latent) + (block.first + q) * a.latent_dim;
      const Float* rope = static_cast<const Float*>(a.q_rope) + (block.first + q) * a.rope_dim;
      for (int64_t i = 0; i < a.latent_dim; ++i) out[i] = widen(latent[i]);
      for (int64_t i = 0; i < a.rope_dim; ++i) out[a.latent_dim + i] = widen(rope[i]);
      for (int64_t i = width; i < row_size; ++i) out[i] = 0.0f;
    }
  }

  // Keys at positions [begin, end) of a stream: prefix slots, then the path's.
  void gather(int64_t stream, int64_t begin, int64_t end, const Path* path, Scratch& scratch, Leaf& leaf) const {
    const Float* slots = static_cast<const Float*>(a.cache) + stream * a.num_slots * width;
    const int64_t prefix = a.prefix_len[stream];
    leaf.count = end - begin;
    for (int64_t j = 0; j < leaf.count; ++j) {
      const int64_t position = begin + j;
      const int64_t slot = position < prefix ? position : prefix + path->node[position - prefix];
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

  int64_t visible(const Leaf& leaf, int64_t begin, const Block& block, const Scratch& scratch, int64_t q) const {
    const int64_t row = (block.first + q) / a.num_heads - block.first / a.num_heads;
    return std::max<int64_t>(0, std::min(leaf.count, scratch.rows[row].num_keys - begin));
  }

  // Queries [first, last) of the block over one leaf.
  void attend(const Leaf& leaf, int64_t begin, int64_t first, int64_t last, const Block& block,
              Scratch& scratch) const {
    int64_t limit[kMaxQueries], visible_to_any = 0;
    for (int64_t q = first; q < last; ++q) {
      limit[q] = visible(leaf, begin, block, scratch, q);
      visible_to_any = std::max(visible_to_any, limit[q]);
    }
    while (first < last && limit[first] == 0) ++first;
    score(leaf, visible_to_any, first, last, scratch);
    float keep[kMaxQueries], take[kMaxQueries];
    for (int64_t q = first; q < last; ++q)
      if (limit[q]) soften(scratch.p[q], limit[q], begin == 0, scratch.state[q], keep[q], take[q]);
    for (int64_t q = first; q < last;) {
      if (limit[q] == 0) {
        ++q;
        continue;
      }
      int64_t height = 1;
      while (height < kTileQueries && q + height < last && limit[q + height]) ++height;
      weigh(leaf, limit, q, int(height), begin == 0, keep, take, scratch);
      q += height;
    }
  }

  static constexpr int kTileQueries = 4;

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
    Vec16 acc[kQueries][kKeys];
    for (auto& row : acc)
      for (Vec16& sum : row) sum = Vec16::all(0.0f);
    const float* query = scratch.query.get() + q * row_size;
    for (int64_t i = 0; i < row_size; i += kLanes)
      for (int r = 0; r < kQueries; ++r) {
        const Vec16 value = Vec16::load(query + r * row_size + i);
        for (int k = 0; k < kKeys; ++k) acc[r][k] = fma(value, Vec16::load(keys[k] + i), acc[r][k]);
      }
    float scores[kLanes];
    (sum_lanes_of_16(&acc[0][0]) * Vec16::all(a.scale)).store(scores);
    for (int r = 0; r < kQueries; ++r) std::memcpy(&scratch.p[q + r][j], scores + r * kKeys, kKeys * sizeof(float));
  }

  // Scores to weights p (rounded to the storage type), and the factors that join this leaf to the state.
  static void soften(float* p, int64_t limit, bool is_first, State& state, float& keep, float& take) {
    const Vec16 lowest = Vec16::all(-std::numeric_limits<float>::infinity());
    Vec16 value[kLeafVectors], largest = lowest, sum = Vec16::all(0.0f);
    for (int v = 0; v < kLeafVectors; ++v) {
      value[v] = first_lanes(limit - v * kLanes, Vec16::load(p + v * kLanes), lowest);
      largest = max(value[v], largest);
    }
    const float leaf_max = max_lanes(largest);
    for (int v = 0; v < kLeafVectors; ++v) {
      const Vec16 weight = exp(value[v] - Vec16::all(leaf_max));
      sum = sum + weight;
      rounded(weight, static_cast<const Float*>(nullptr)).store(p + v * kLanes);
    }
    const float leaf_sum = sum_lanes(sum);
    if (is_first) {
      state = {leaf_max, leaf_sum};
      return;
    }
    const float new_max = std::max(state.max, leaf_max);
    float factors[kLanes] = {state.max - new_max, leaf_max - new_max};
    exp(Vec16::load(factors)).store(factors);
    keep = factors[0];
    take = factors[1];
    state = {new_max, std::fma(state.sum, keep, leaf_sum * take)};
  }

  void weigh(const Leaf& leaf, const int64_t* limit, int64_t q, int height, bool is_first, const float* keep,
             const float* take, Scratch& scratch) const {
    for (int64_t c = 0; c < latent_size;) {
      const int64_t vectors = std::min<int64_t>(4, (latent_size - c) / kLanes);
      const auto tile = [&](auto rows, auto blocks) {
        weigh_tile<rows, blocks>(leaf, limit + q, q, c, is_first, keep + q, take + q, scratch);
      };
      const auto of_height = [&](auto blocks) {
        if (height == 4) tile(std::integral_constant<int, 4>(), blocks);
        else if (height == 3) tile(std::integral_constant<int, 3>(), blocks);
        else if (height == 2) tile(std::integral_constant<int, 2>(), blocks);
        else tile(std::integral_constant<int, 1>(), blocks);
      };
      if (vectors == 4) of_height(std::integral_constant<int, 4>());
      else if (vectors == 3) of_height(std::integral_constant<int, 3>());
      else if (vectors == 2) of_height(std::integral_constant<int, 2>());
      else of_height(std::integral_constant<int, 1>());
      c += vectors * kLanes;
    }
  }

  // acc of kRows queries, latents [c, c + 16 * kBlocks): keys that all of them see together, then each one's others.
  template <int kRows, int kBlocks>
  void weigh_tile(const Leaf& leaf, const int64_t* limit, int64_t q, int64_t c, bool is_first, const float* keep,
                  const float* take, Scratch& scratch) const {
    Vec16 acc[kRows][kBlocks];
    for (auto& row : acc)
      for (Vec16& sum : row) sum = Vec16::all(0.0f);
    int64_t common = limit[0];
    for (int r = 1; r < kRows; ++r) common = std::min(common, limit[r]);
    for (int64_t j = 0; j < common; ++j) {
      Vec16 latent[kBlocks];
      for (int b = 0; b < kBlocks; ++b) latent[b] = Vec16::load(leaf.key[j] + c + b * kLanes);
      for (int r = 0; r < kRows; ++r) {
        const Vec16 weight = Vec16::all(scratch.p[q + r][j]);
        for (int b = 0; b < kBlocks; ++b) acc[r][b] = fma(weight, latent[b], acc[r][b]);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int64_t j = common; j < limit[r]; ++j)
        for (int b = 0; b < kBlocks; ++b)
          acc[r][b] = fma(Vec16::all(scratch.p[q + r][j]), Vec16::load(leaf.key[j] + c + b * kLanes), acc[r][b]);
      float* state = scratch.acc.get() + (q + r) * latent_size + c;
      for (int b = 0; b < kBlocks; ++b) {
        if (!is_first)
          acc[r][b] = fma(Vec16::load(state + b * kLanes), Vec16::all(keep[r]), acc[r][b] * Vec16::all(take[r]));
        acc[r][b].store(state + b * kLanes);
      }
    }
  }

  void write(const Block& block, const Scratch& scratch) const {
    for (int64_t q = 0; q < block.count; ++q) {
      const Vec16 sum = Vec16::all(scratch.state[q].sum);
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
    num_keys += a.prefix_len[a.stream[t]] + std::max(0, a.depth[a.stream[t] * a.num_tree_slots + a.node[t]]) + 1;
  return num_keys * a.num_heads * (2 * a.latent_dim + a.rope_dim);
}

// Cuts the queries into blocks of one stream each, small enough that every thread has some.
std::vector<Block> make_blocks(const VerifyAttnArgs& a, int num_threads) {
  const int64_t num_queries = a.num_rows * a.num_heads;
  const int64_t size = std::min(kMaxQueries, (num_queries + num_threads - 1) / num_threads);
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
  std::vector<std::unique_ptr<Scratch>> scratch;
  for (int i = 0; i < num_threads; ++i)
    scratch.emplace_back(new Scratch(round_up(a.latent_dim + a.rope_dim), round_up(a.latent_dim)));
  std::atomic<int> failure{kOk};
  run_tasks(num_threads, blocks.size(), [&](int64_t i, int thread) {
    const int status = attention.run(blocks[i], *scratch[thread]);
    if (status != kOk) failure = status;
  });
  return failure;
}

}  // namespace

int verify_attn_cpu(const VerifyAttnArgs& a) {
  if (const int status = check(a)) return status;
  return a.dtype == kF32 ? verify_attn<float>(a) : verify_attn<Bf16>(a);
}

}  // namespace kdtree
