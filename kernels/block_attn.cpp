// block_attn: attention of a drafter's block. A task is one key-value head of one block: its queries, g heads of b tokens.
//
// Order of additions: a score is summed by fma in order of the head's elements; p = exp(s - m) with m the largest score a
// token sees; l sums p in 16 lanes (lane = position mod 16, closed by sum_lanes); p * value is added by fma in order of
// position, and divided by l. All in FP32. Queries are taken four at a time over what they see together: p is 0 where one
// of them does not look. Nothing depends on other blocks or on threads.
#include <cmath>
#include <limits>
#include <vector>

#include "block_sees.h"
#include "constant.h"
#include "head_norm.h"
#include "parallel.h"
#include "scratch.h"

namespace kdtree {
namespace {

// Register tiles: queries by vectors of 16 keys, and queries by vectors of 16 elements of a value.
constexpr int kScoreQueries = 8, kScoreVectors = 2, kMixQueries = 4, kMixVectors = 4;
constexpr int64_t kTileKeys = kScoreVectors * kLanes;

int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

template <class Float>
class Task {
 public:
  Task(const BlockAttnArgs& args, int64_t block, int64_t kv_head)
      : a_(args),
        kv_head_(kv_head),
        block_(block),
        prefix_(a_.prefix_len[block]),
        groups_(a_.num_heads / a_.num_kv_heads),
        num_queries_(groups_ * a_.block_size),
        seen_(keys_seen(a_, prefix_, 0, a_.block_size - 1)),
        begin_(seen_.begin / kLanes * kLanes),
        num_keys_(round_up(seen_.end - begin_, kTileKeys)),
        value_size_(round_up(a_.dim, kLanes)),
        query_(new_floats(num_queries_ * a_.dim)),
        own_keys_(a_.block_size * a_.dim),
        score_(new_floats(num_queries_ * num_keys_)),
        values_(new_floats((seen_.end - seen_.begin) * value_size_)) {}

  void run() {
    turn_heads();
    for (int64_t j = 0; j < num_keys_; j += kTileKeys) add_scores(j);
    widen_values();
    for (int64_t r = 0; r < num_queries_; r += kMixQueries) mix(r, std::min<int64_t>(kMixQueries, num_queries_ - r));
  }

 private:
  // Head `head` of token i of the block, counted over queries, keys and values.
  const Float* head_of(int64_t i, int64_t head) const {
    const int64_t num_heads = a_.num_heads + 2 * a_.num_kv_heads;
    return static_cast<const Float*>(a_.qkv) + ((block_ * a_.block_size + i) * num_heads + head) * a_.dim;
  }

  // Key or value of the position in the cache.
  const Float* cached(const void* cache, int64_t position) const {
    const int64_t slot = a_.stream[block_] * a_.num_slots + position;
    return static_cast<const Float*>(cache) + ((slot * a_.num_layers + a_.layer) * a_.num_kv_heads + kv_head_) * a_.dim;
  }

  const Float* key(int64_t position) const {
    return position < prefix_ ? cached(a_.keys, position) : own_keys_.data() + (position - prefix_) * a_.dim;
  }

  const Float* value(int64_t position) const {
    return position < prefix_ ? cached(a_.values, position)
                              : head_of(position - prefix_, a_.num_heads + a_.num_kv_heads + kv_head_);
  }

  // Queries in order of tokens, then heads, and the block's own keys.
  void turn_heads() {
    std::vector<Float> turned(a_.dim);
    for (int64_t i = 0; i < a_.block_size; ++i) {
      const float* cos_sin = a_.cos_sin + (prefix_ + i) * a_.dim;
      for (int64_t h = 0; h < groups_; ++h) {
        norm_and_turn(head_of(i, kv_head_ * groups_ + h), static_cast<const Float*>(a_.query_norm), a_.eps, cos_sin,
                      a_.dim, turned.data());
        float* query = query_.get() + (i * groups_ + h) * a_.dim;
        for (int64_t e = 0; e < a_.dim; ++e) query[e] = widen(turned[e]);
      }
      norm_and_turn(head_of(i, a_.num_heads + kv_head_), static_cast<const Float*>(a_.key_norm), a_.eps, cos_sin, a_.dim,
                    own_keys_.data() + i * a_.dim);
    }
  }

  // Scores of all queries with the keys of a tile, from begin_ + first on; zeros stand for what nobody sees.
  void add_scores(int64_t first) {
    alignas(64) float column[kTileKeys * kMaxHeadDim];
    for (int64_t j = 0; j < kTileKeys; ++j) {
      const int64_t position = begin_ + first + j;
      const Float* from = position >= seen_.begin && position < seen_.end ? key(position) : nullptr;
      for (int64_t e = 0; e < a_.dim; ++e) column[e * kTileKeys + j] = from ? widen(from[e]) : 0.0f;
    }
    int64_t r = 0;
    for (; r + kScoreQueries <= num_queries_; r += kScoreQueries) score_queries<kScoreQueries>(column, first, r);
    for (; r < num_queries_; ++r) score_queries<1>(column, first, r);
  }

  template <int kCount>
  void score_queries(const float* column, int64_t first, int64_t r) {
    const float* query = query_.get() + r * a_.dim;
    Vec16 sum[kCount][kScoreVectors];
    for (auto& row : sum)
      for (auto& s : row) s = Vec16::all(0.0f);
    for (int64_t e = 0; e < a_.dim; ++e) {
      Vec16 keys[kScoreVectors];
      for (int v = 0; v < kScoreVectors; ++v) keys[v] = Vec16::load(column + e * kTileKeys + v * kLanes);
#pragma GCC unroll 8
      for (int q = 0; q < kCount; ++q) {
        const Vec16 x = Vec16::all(query[q * a_.dim + e]);
#pragma GCC unroll 2
        for (int v = 0; v < kScoreVectors; ++v) sum[q][v] = fma(x, keys[v], sum[q][v]);
      }
    }
    for (int q = 0; q < kCount; ++q)
      for (int v = 0; v < kScoreVectors; ++v)
        (sum[q][v] * Vec16::all(a_.scale)).store(score_.get() + (r + q) * num_keys_ + first + v * kLanes);
  }

  void widen_values() {
    for (int64_t position = seen_.begin; position < seen_.end; ++position) {
      const Float* from = value(position);
      float* to = values_.get() + (position - seen_.begin) * value_size_;
      for (int64_t e = 0; e < a_.dim; e += kLanes) load_first(from + e, a_.dim - e).store(to + e);
    }
  }

  // Scores of query r become its p, zeros where its token does not look; returns their sum.
  float soften(int64_t r) {
    float* score = score_.get() + r * num_keys_;
    const KeyRange seen = keys_seen(a_, prefix_, r / groups_);
    const int64_t begin = seen.begin - begin_, end = seen.end - begin_;
    const Vec16 none = Vec16::all(-std::numeric_limits<float>::infinity()), zero = Vec16::all(0.0f);
    const auto within = [&](int64_t j, Vec16 x, Vec16 outside) {
      return first_lanes(begin - j, outside, first_lanes(end - j, x, outside));
    };
    Vec16 largest = none;  // passes over a NaN, of which exp makes one
    for (int64_t j = 0; j < num_keys_; j += kLanes) largest = max(within(j, Vec16::load(score + j), none), largest);
    const Vec16 base = Vec16::all(max_lanes(largest));
    Vec16 sum = zero;
    for (int64_t j = 0; j < num_keys_; j += kLanes) {
      const Vec16 p = within(j, exp(Vec16::load(score + j) - base), zero);
      p.store(score + j);
      sum = sum + p;
    }
    return sum_lanes(sum);
  }

  // The results of queries r … r + count - 1, over what their tokens see together.
  void mix(int64_t r, int64_t count) {
    const float* p[kMixQueries];
    float sum[kMixQueries];
    for (int64_t q = 0; q < kMixQueries; ++q) {
      p[q] = score_.get() + (r + std::min(q, count - 1)) * num_keys_;
      if (q < count) sum[q] = soften(r + q);
    }
    const KeyRange seen = keys_seen(a_, prefix_, r / groups_, (r + count - 1) / groups_);
    for (int64_t e = 0; e < value_size_; e += kMixVectors * kLanes) {
      const int num_vectors = int(std::min<int64_t>(kMixVectors, (value_size_ - e) / kLanes));
      with_constant<kMixVectors>(num_vectors, [&](auto n) { mix_vectors<n>(r, count, p, sum, seen, e); });
    }
  }

  template <int kCount>
  void mix_vectors(int64_t r, int64_t count, const float* const (&p)[kMixQueries], const float (&sum)[kMixQueries],
                   KeyRange seen, int64_t e) {
    Vec16 total[kMixQueries][kCount];
    for (auto& row : total)
      for (auto& t : row) t = Vec16::all(0.0f);
    for (int64_t position = seen.begin; position < seen.end; ++position) {
      const float* value = values_.get() + (position - seen_.begin) * value_size_ + e;
      Vec16 x[kCount];
      for (int v = 0; v < kCount; ++v) x[v] = Vec16::load(value + v * kLanes);
#pragma GCC unroll 4
      for (int q = 0; q < kMixQueries; ++q) {
        const Vec16 weight = Vec16::all(p[q][position - begin_]);
#pragma GCC unroll 4
        for (int v = 0; v < kCount; ++v) total[q][v] = fma(weight, x[v], total[q][v]);
      }
    }
    for (int64_t q = 0; q < count; ++q)
      for (int v = 0; v < kCount; ++v) {
        const int64_t at = e + v * kLanes;
        store_first(total[q][v] / Vec16::all(sum[q]), out(r + q) + at, a_.dim - at);
      }
  }

  // Of query r: token by token, of each its heads.
  Float* out(int64_t r) const {
    const int64_t head = (block_ * a_.block_size + r / groups_) * a_.num_heads + kv_head_ * groups_ + r % groups_;
    return static_cast<Float*>(a_.out) + head * a_.dim;
  }

  const BlockAttnArgs& a_;
  const int64_t kv_head_, block_, prefix_, groups_, num_queries_;
  const KeyRange seen_;  // of all tokens together; scores begin at begin_, a multiple of 16
  const int64_t begin_, num_keys_, value_size_;
  Floats query_;
  std::vector<Float> own_keys_;
  Floats score_, values_;
};

template <class Float>
void block_attn(const BlockAttnArgs& a) {
  int64_t num_keys = 0;
  for (int64_t block = 0; block < a.num_blocks; ++block) num_keys += a.prefix_len[block] + a.block_size;
  const int num_threads = threads_for(2 * num_keys * a.block_size * a.num_heads * a.dim / kLanes, a.num_threads);
  run_tasks(num_threads, a.num_blocks * a.num_kv_heads, [&](int64_t task, int) {
    Task<Float>(a, task / a.num_kv_heads, task % a.num_kv_heads).run();
  });
}

}  // namespace

int block_attn_cpu(const BlockAttnArgs& a) {
  if (a.dim % 2 || a.dim > kMaxHeadDim) return kUnsupported;
  for (int64_t block = 0; block < a.num_blocks; ++block)
    if (!block_is_valid(a, a.stream[block], a.prefix_len[block])) return kOutOfRange;
  if (a.block_size == 0 || a.num_heads == 0 || a.dim == 0) return kOk;
  a.dtype == kF32 ? block_attn<float>(a) : block_attn<Bf16>(a);
  return kOk;
}

}  // namespace kdtree
