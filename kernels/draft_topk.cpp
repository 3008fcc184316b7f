// Log-softmax over the vocabulary and its K largest, two passes over each row: the first finds the maximum of every
// block of 64 logits, the second sums the exponentials; only blocks that can hold a candidate are looked into.
//
// Order of additions: the vocabulary is cut into 8 segments (segments.h); in a segment lane i % 16 adds its terms in
// ascending i, then the lanes (sum_lanes), then the segments ((0+1)+(2+3))+((4+5)+(6+7)). Nothing depends on threads.
#include <algorithm>
#include <atomic>
#include <limits>

#include "op_args.h"
#include "parallel.h"
#include "segments.h"
#include "topk.h"

namespace kdtree {
namespace {

constexpr int64_t kExpWork = 4;  // a logit in units of parallel.h

// ln(x) for finite x >= 1, and never below 0: x = m 2^e with m in [1/sqrt 2, sqrt 2); ln m = 2 artanh((m-1)/(m+1)).
inline float log_from_one(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const int32_t exponent = int32_t(bits - 0x3f3504f3u) >> 23;
  bits -= uint32_t(exponent) << 23;
  float m;
  std::memcpy(&m, &bits, sizeof m);
  const double z = (double(m) - 1.0) / (double(m) + 1.0), z2 = z * z;
  double series = 1.0 / 15;
  for (int k = 13; k > 0; k -= 2) series = __builtin_fma(series, z2, 1.0 / k);
  return float(__builtin_fma(double(exponent), 0.69314718055994531, 2.0 * z * series));
}

template <class Float>
float log_sum_exp(const Float* logits, int64_t vocab_size, float row_max) {
  const Segments segments(vocab_size);
  float sum[kNumSegments];
  for (int s = 0; s < kNumSegments; ++s) {
    Vec16 lanes = Vec16::all(0.0f);
    const int64_t end = segments.bounds[s + 1];
    for (int64_t i = segments.bounds[s]; i < end; i += kLanes)
      lanes = lanes + exp(load_padded(logits + i, end - i) - Vec16::all(row_max));
    sum[s] = sum_lanes(lanes);
  }
  return log_from_one(((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7])));
}

// One row; false if it holds a NaN or +inf.
template <class Float>
bool topk_row(const Float* logits, const DraftTopkArgs& args, float* log_probs, int64_t* token_ids, TopkScratch& scratch) {
  const float row_max = find_maxima(logits, args.vocab_size, scratch.block_max);
  if (!(row_max < kInfinity)) {
    std::fill(log_probs, log_probs + args.num_candidates, std::numeric_limits<float>::quiet_NaN());
    std::fill(token_ids, token_ids + args.num_candidates, -1);
    return false;
  }
  find_largest(logits, args.vocab_size, args.num_candidates, scratch);
  const bool empty = row_max == -kInfinity;  // then x - max would be NaN
  const float log_sum = empty ? 0.0f : log_sum_exp(logits, args.vocab_size, row_max);
  for (int64_t k = 0; k < args.num_candidates; ++k) {
    log_probs[k] = empty ? -kInfinity : (logit_of(scratch.keys[k]) - row_max) - log_sum;
    token_ids[k] = int64_t(uint32_t(scratch.keys[k]));
  }
  return true;
}

template <class Float>
int topk(const DraftTopkArgs& args) {
  const auto* logits = static_cast<const Float*>(args.logits);
  std::atomic<bool> finite{true};
  run_shares(threads_for(args.num_rows * args.vocab_size * kExpWork, args.num_threads), args.num_rows,
             [&](int64_t begin, int64_t end, int) {
               TopkScratch scratch;
               for (int64_t row = begin; row < end; ++row)
                 if (!topk_row(logits + row * args.vocab_size, args, args.log_probs + row * args.num_candidates,
                               args.token_ids + row * args.num_candidates, scratch))
                   finite = false;
             });
  return finite ? kOk : kNonFinite;
}

}  // namespace

int draft_topk_cpu(const DraftTopkArgs& args) {
  if (args.num_candidates < 1 || args.num_candidates > args.vocab_size) return kOutOfRange;
  if (args.vocab_size > int64_t(std::numeric_limits<uint32_t>::max())) return kUnsupported;
  return args.dtype == kBF16 ? topk<Bf16>(args) : topk<float>(args);
}

}  // namespace kdtree
