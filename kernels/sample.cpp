// sample: the kept token of largest logit / temperature + noise (sampling.h). All tokens: blocks of 64, left out where no
// noise could make one win. Few tokens: those of topk.h, best first.
#include "op_args.h"
#include "parallel.h"
#include "rows_in_use.h"
#include "sampling.h"
#include "topk.h"

namespace kdtree {
namespace {

constexpr int64_t kNoiseWork = 32;  // a logit in units of parallel.h

struct Best {
  float score;
  int64_t id;
};

// scores[k] = scaled logit + noise of token `begin` + k; `begin` is a multiple of 64. A compiler makes vectors of the loops.
void score_block(const RowSampling& r, const float* logits, int64_t begin, float largest, float (&scores)[kTopkBlock]) {
  constexpr int kWords = 4, kBlocks = kTopkBlock / kWords;
  uint32_t words[kWords][kBlocks];
  for (int i = 0; i < kBlocks; ++i) {
    uint32_t word[kWords];
    philox(r, uint32_t(begin / kWords + i), word);
    words[0][i] = word[0], words[1][i] = word[1], words[2][i] = word[2], words[3][i] = word[3];
  }
  float noise[kWords][kBlocks];
  for (int j = 0; j < kWords; ++j)
    for (int i = 0; i < kBlocks; ++i) noise[j][i] = gumbel(words[j][i]);
  for (int k = 0; k < kTopkBlock; ++k) scores[k] = scaled_logit(r, logits[k], largest);
  for (int i = 0; i < kBlocks; ++i) {
    float* score = scores + kWords * i;
    score[0] += noise[0][i], score[1] += noise[1][i], score[2] += noise[2][i], score[3] += noise[3][i];
  }
}

int64_t best_of_all(const RowSampling& r, const float* logits, int64_t vocab_size, float largest,
                    const std::vector<float>& block_max) {
  Best best{-kInfinity, 0};
  for (int64_t begin = 0; begin < vocab_size; begin += kTopkBlock) {
    if (scaled_logit(r, block_max[begin / kTopkBlock], largest) + kMaxGumbel < best.score) continue;
    float padded[kTopkBlock], scores[kTopkBlock];
    const int64_t count = std::min(kTopkBlock, vocab_size - begin);
    if (count < kTopkBlock) {
      std::fill(padded, padded + kTopkBlock, -kInfinity);
      std::copy(logits + begin, logits + vocab_size, padded);
    }
    score_block(r, count < kTopkBlock ? padded : logits + begin, begin, largest, scores);
    Vec16 highest = Vec16::load(scores);
    for (int k = kLanes; k < kTopkBlock; k += kLanes) highest = max(Vec16::load(scores + k), highest);
    const float score = max_lanes(highest);
    if (score > best.score) best = {score, begin + (std::find(scores, scores + kTopkBlock, score) - scores)};
  }
  return best.id;
}

// How many of the keys, best first, top_p keeps.
int64_t num_within_top_p(const RowSampling& r, const std::vector<uint64_t>& keys, float largest) {
  if (r.top_p == 1.0f) return int64_t(keys.size());
  const auto mass = [&](uint64_t key) { return probability_mass(scaled_logit(r, logit_of(key), largest)); };
  uint64_t total = 0, reached = 0;
  for (const uint64_t key : keys) total += mass(key);
  const uint64_t wanted = wanted_mass(r, total);
  int64_t count = 0;
  while (reached < wanted) reached += mass(keys[count++]);
  return count;
}

int64_t best_of_few(const RowSampling& r, const float* logits, int64_t vocab_size, float largest,
                    TopkScratch& scratch) {
  find_largest(logits, vocab_size, r.top_k, scratch);
  const int64_t count = num_within_top_p(r, scratch.keys, largest);
  Best best{-kInfinity, 0};
  for (int64_t k = 0; k < count; ++k) {
    const auto id = uint32_t(scratch.keys[k]);
    const float score = scaled_logit(r, logit_of(scratch.keys[k]), largest) + gumbel_of_token(r, id);
    if (score > best.score || (score == best.score && id < best.id)) best = {score, id};
  }
  return best.id;
}

int64_t sample_row(const RowSampling& r, const float* logits, int64_t vocab_size, TopkScratch& scratch) {
  const float largest = find_maxima(logits, vocab_size, scratch.block_max);
  if (largest != largest) return -1;
  if (r.inverse_temperature == 0.0f || largest == -kInfinity)
    return std::find(logits, logits + vocab_size, largest) - logits;
  if (r.top_k > 0) return best_of_few(r, logits, vocab_size, largest, scratch);
  return best_of_all(r, logits, vocab_size, largest, scratch.block_max);
}

}  // namespace

int sample_cpu(const SampleArgs& args) {
  const SampleArgs a = with_rows_in_use(args);
  if (a.vocab_size < 1 || a.vocab_size > int64_t(std::numeric_limits<uint32_t>::max())) return kUnsupported;
  for (int64_t t = 0; t < a.num_rows; ++t)
    if (!row_sampling(a, t).valid) return kOutOfRange;
  const int num_threads = threads_for(a.num_rows * a.vocab_size * kNoiseWork, a.num_threads);
  run_shares(num_threads, a.num_rows, [&](int64_t begin, int64_t end, int) {
    TopkScratch scratch;
    for (int64_t t = begin; t < end; ++t)
      a.token[t] = sample_row(row_sampling(a, t), a.logits + t * a.vocab_size, a.vocab_size, scratch);
  });
  return kOk;
}

}  // namespace kdtree
