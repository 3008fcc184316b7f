// argmax: the lowest id of the largest logit. One pass finds the maximum and any NaN, a second one the id.
#include <limits>

#include "op_args.h"
#include "parallel.h"
#include "rows_in_use.h"
#include "vec16.h"

namespace kdtree {
namespace {

int64_t argmax_row(const float* logits, int64_t vocab_size) {
  const Vec16 lowest = Vec16::all(-std::numeric_limits<float>::infinity());
  Vec16 largest = lowest;
  for (int64_t v = 0; v < vocab_size; v += kLanes) {
    const Vec16 block = first_lanes(vocab_size - v, load_first(logits + v, vocab_size - v), lowest);
    if (any_nan(block)) return -1;
    largest = max(block, largest);
  }
  const float maximum = max_lanes(largest);
  int64_t id = 0;
  while (logits[id] != maximum) ++id;
  return id;
}

}  // namespace

int argmax_cpu(const ArgmaxArgs& args) {
  const ArgmaxArgs a = with_rows_in_use(args);
  if (a.vocab_size < 1) return kUnsupported;
  const int num_threads = threads_for(a.num_rows * a.vocab_size, a.num_threads);
  run_shares(num_threads, a.num_rows, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t)
      a.token[t] = argmax_row(a.logits + t * a.vocab_size, a.vocab_size);
  });
  return kOk;
}

}  // namespace kdtree
