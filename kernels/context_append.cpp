// context_append: keys and values of committed tokens, for all layers of a drafter. Checks everything before it writes.
#include <cstring>

#include "block_sees.h"
#include "head_norm.h"
#include "op_args.h"
#include "parallel.h"

namespace kdtree {
namespace {

template <class Float>
void append_row(const ContextAppendArgs& a, int64_t t) {
  const int64_t num_heads = a.num_layers * a.num_heads, width = num_heads * a.dim;
  const Float* kv = static_cast<const Float*>(a.kv) + t * 2 * width;
  const int64_t slot = (a.stream[t] * a.num_slots + a.position[t]) * width;
  Float* key = static_cast<Float*>(a.keys) + slot;
  for (int64_t h = 0; h < num_heads; ++h)
    norm_and_turn(kv + h * a.dim, static_cast<const Float*>(a.key_norm) + h / a.num_heads * a.dim, a.eps,
                  a.cos_sin + a.position[t] * a.dim, a.dim, key + h * a.dim);
  std::memcpy(static_cast<Float*>(a.values) + slot, kv + width, width * sizeof(Float));
}

template <class Float>
void context_append(const ContextAppendArgs& a) {
  const int num_threads = threads_for(4 * a.num_rows * a.num_layers * a.num_heads * a.dim, a.num_threads);
  run_shares(num_threads, a.num_rows, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t)
      if (a.position[t] >= 0) append_row<Float>(a, t);
  });
}

}  // namespace

int context_append_cpu(const ContextAppendArgs& a) {
  if (a.dim % 2 || a.dim > kMaxHeadDim) return kUnsupported;
  for (int64_t t = 0; t < a.num_rows; ++t) {
    const int64_t stream = a.stream[t], position = a.position[t];
    if (position == -1) continue;
    if (stream < 0 || stream >= a.num_streams || position < 0 || position >= a.num_slots || position >= a.num_positions)
      return kOutOfRange;
  }
  a.dtype == kF32 ? context_append<float>(a) : context_append<Bf16>(a);
  return kOk;
}

}  // namespace kdtree
