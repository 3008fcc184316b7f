// sample_among: sample (sample.cpp) among words instead of all logits of a row.
#include <algorithm>
#include <functional>
#include <vector>

#include "op_args.h"
#include "parallel.h"
#include "rows_in_use.h"
#include "sampling.h"
#include "vocabulary.h"

namespace kdtree {
namespace {

constexpr int64_t kNoiseWork = 32;  // a word in units of parallel.h
constexpr float kInfinity = __builtin_huge_valf();

float scaled_of(const RowSampling& r, int64_t word, float largest) {
  return scaled_logit(r, logit_of_word(word), largest);
}

// Leaves of words, best first, those that top_k and top_p keep.
void keep(const RowSampling& r, float largest, std::vector<int64_t>& words) {
  const int64_t count = std::min<int64_t>(r.top_k, int64_t(words.size()));
  std::partial_sort(words.begin(), words.begin() + count, words.end(), std::greater<int64_t>());
  words.resize(count);
  if (r.top_p == 1.0f) return;
  uint64_t total = 0, reached = 0;
  for (const int64_t word : words) total += probability_mass(scaled_of(r, word, largest));
  const uint64_t wanted = wanted_mass(r, total);
  size_t num_kept = 0;
  while (reached < wanted && num_kept < words.size())
    reached += probability_mass(scaled_of(r, words[num_kept++], largest));
  words.resize(num_kept);
}

int64_t sample_row(const SampleAmongArgs& a, int64_t row, std::vector<int64_t>& words) {
  const RowSampling r = row_sampling(a, row);
  const float largest = a.largest[row];
  if (largest != largest) return kNanWord;
  words.clear();
  for (int64_t i = 0; i < a.num_words; ++i)
    if (a.words[row * a.num_words + i] != kNoWord) words.push_back(a.words[row * a.num_words + i]);
  if (words.empty()) return kNoWord;
  const int64_t best = *std::max_element(words.begin(), words.end());
  if (best == kNanWord || r.inverse_temperature == 0.0f || largest == -kInfinity) return best;
  if (r.top_k > 0) keep(r, largest, words);
  int64_t chosen = kNoWord;
  float best_score = -kInfinity;
  for (const int64_t word : words) {
    const float scaled = scaled_of(r, word, largest);
    if (scaled + kMaxGumbel < best_score) continue;
    const float score = scaled + gumbel_of_token(r, id_of_word(word));
    const bool first = chosen == kNoWord || id_of_word(word) < id_of_word(chosen);
    if (score > best_score || (score == best_score && first)) chosen = word, best_score = score;
  }
  return chosen;
}

}  // namespace

int sample_among_cpu(const SampleAmongArgs& args) {
  const SampleAmongArgs a = with_rows_in_use(args);
  for (int64_t t = 0; t < a.num_rows; ++t)
    if (!row_sampling(a, t).valid) return kOutOfRange;
  run_shares(threads_for(a.num_rows * a.num_words * kNoiseWork, a.num_threads), a.num_rows,
             [&](int64_t begin, int64_t end, int) {
               std::vector<int64_t> words;
               for (int64_t t = begin; t < end; ++t) a.word[t] = sample_row(a, t, words);
             });
  return kOk;
}

}  // namespace kdtree
