// block_attn: attention of a drafter's block. A task is one key-value head of one block: its queries, g heads of b tokens.
//
// Order of additions: a score is summed by fma in order of the head's elements; p = exp(s - m) with m the largest score a
// token sees; l sums p in 16 lanes (lane = position mod 16, closed by sum_lanes); p * value is added by fma in order of
// position, and divided by l. All in FP32. Nothing depends on other blocks or on threads.
#include <cmath>
#include <limits>
#include <vector>

#include "block_sees.h"
#include "head_norm.h"
#include "parallel.h"
#include "scratch.h"

namespace kdtree {
namespace {

constexpr int kTileQueries = 4;

int64_t round_up(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

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
        num_keys_(round_up(seen_.end - begin_)),
        value_size_(round_up(a_.dim)),
        query_(new_floats(round_up(num_queries_ * a_.dim))),
        own_keys_(a_.block_size * a_.dim),
        score_(new_floats(num_queries_ * num_keys_)),
        values_(new_floats((seen_.end - seen_.begin) * value_size_)) {}

  void run() {
    turn_heads();
    for (int64_t j = 0; j < num_keys_; j += kLanes) add_scores(j);
    widen_values();
    for (int64_t i = 0; i < a_.block_size; ++i)
      for (int64_t h = 0; h < groups_; h += kTileQueries) mix(i, h, std::min<int64_t>(kTileQueries, groups_ - h));
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

  // Scores of all queries with 16 keys from begin_ + first on, side by side in the lanes; zeros stand for what nobody sees.
  void add_scores(int64_t first) {
    alignas(64) float column[kLanes * kMaxHeadDim];
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const int64_t position = begin_ + first + lane;
      const Float* from = position >= seen_.begin && position < seen_.end ? key(position) : nullptr;
      for (int64_t e = 0; e < a_.dim; ++e) column[e * kLanes + lane] = from ? widen(from[e]) : 0.0f;
    }
    int64_t r = 0;
    for (; r + kTileQueries <= num_queries_; r += kTileQueries) score_queries<kTileQueries>(column, first, r);
    for (; r < num_queries_; ++r) score_queries<1>(column, first, r);
  }

  template <int kCount>
  void score_queries(const float* column, int64_t first, int64_t r) {
    const float* query = query_.get() + r * a_.dim;
    Vec16 sum[kCount];
    for (int q = 0; q < kCount; ++q) sum[q] = Vec16::all(0.0f);
    for (int64_t e = 0; e < a_.dim; ++e) {
      const Vec16 keys = Vec16::load(column + e * kLanes);
#pragma GCC unroll 4
      for (int q = 0; q < kCount; ++q) sum[q] = fma(Vec16::all(query[q * a_.dim + e]), keys, sum[q]);
    }
    for (int q = 0; q < kCount; ++q) (sum[q] * Vec16::all(a_.scale)).store(score_.get() + (r + q) * num_keys_ + first);
  }

  void widen_values() {
    for (int64_t position = seen_.begin; position < seen_.end; ++position) {
      const Float* from = value(position);
      float* to = values_.get() + (position - seen_.begin) * value_size_;
      for (int64_t e = 0; e < a_.dim; e += kLanes) load_first(from + e, a_.dim - e).store(to + e);
    }
  }

  // Scores of one query become its p, at the positions that its token sees; returns their sum.
  float soften(float* score, KeyRange seen) const {
    const int64_t begin = seen.begin - begin_, end = seen.end - begin_;
    float largest = -std::numeric_limits<float>::infinity();
    for (int64_t j = begin; j < end; ++j) largest = score[j] > largest ? score[j] : largest;  // exp gives NaN for a NaN
    Vec16 sum = Vec16::all(0.0f);
    const Vec16 zero = Vec16::all(0.0f);
    for (int64_t j = begin / kLanes * kLanes; j < end; j += kLanes) {
      Vec16 p = exp(Vec16::load(score + j) - Vec16::all(largest));
      p = first_lanes(begin - j, zero, first_lanes(end - j, p, zero));
      p.store(score + j);
      sum = sum + p;
    }
    return sum_lanes(sum);
  }

  // The results of up to kTileQueries heads of token i.
  void mix(int64_t i, int64_t first_head, int64_t count) {
    const KeyRange seen = keys_seen(a_, prefix_, i);
    float* p[kTileQueries];
    float sum[kTileQueries];
    for (int64_t q = 0; q < count; ++q) {
      p[q] = score_.get() + (i * groups_ + first_head + q) * num_keys_;
      sum[q] = soften(p[q], seen);
    }
    for (int64_t q = count; q < kTileQueries; ++q) p[q] = p[0];
    for (int64_t e = 0; e < a_.dim; e += kLanes) {
      Vec16 total[kTileQueries];
      for (auto& t : total) t = Vec16::all(0.0f);
      for (int64_t position = seen.begin; position < seen.end; ++position) {
        const Vec16 value = Vec16::load(values_.get() + (position - seen_.begin) * value_size_ + e);
#pragma GCC unroll 4
        for (int q = 0; q < kTileQueries; ++q) total[q] = fma(Vec16::all(p[q][position - begin_]), value, total[q]);
      }
      for (int64_t q = 0; q < count; ++q)
        store_first(total[q] / Vec16::all(sum[q]), out(i, first_head + q) + e, a_.dim - e);
    }
  }

  Float* out(int64_t i, int64_t head) const {
    const int64_t row = (block_ * a_.block_size + i) * a_.num_heads + kv_head_ * groups_ + head;
    return static_cast<Float*>(a_.out) + row * a_.dim;
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
