// latent_append: joint rows to normed query latents, and to normed latents and turned keys in the cache. The bits are those
// of rms_norm, rope and cache_append. Everything is checked before anything is written.
#include "norm_row.h"
#include "op_args.h"
#include "parallel.h"
#include "rotate.h"
#include "rows_in_use.h"

namespace kdtree {
namespace {

bool is_inside(int32_t index, int64_t size) { return index >= 0 && index < size; }

template <class Float>
void append_row(const LatentAppendArgs& a, int64_t t) {
  const Float* x = static_cast<const Float*>(a.q_kv) + t * a.q_kv_stride;
  if (a.query_dim > 0)
    norm_row(x, static_cast<const Float*>(a.q_norm), static_cast<Float*>(a.q) + t * a.query_dim, a.query_dim, a.eps);
  x += a.query_dim;
  const int64_t slot = a.stream[t] * a.num_slots + a.slot[t];
  Float* out = static_cast<Float*>(a.cache) + slot * (a.latent_dim + a.rope_dim);
  norm_row(x, static_cast<const Float*>(a.kv_norm), out, a.latent_dim, a.eps);
  rotate(x + a.latent_dim, a.cos_sin + a.position[t] * a.rope_dim, out + a.latent_dim, a.rope_dim / 2);
}

template <class Float>
void latent_append(const LatentAppendArgs& a) {
  const int64_t width = a.query_dim + a.latent_dim + a.rope_dim;
  run_shares(threads_for(a.num_rows * width, a.num_threads), a.num_rows, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) append_row<Float>(a, t);
  });
}

}  // namespace

int latent_append_cpu(const LatentAppendArgs& args) {
  const LatentAppendArgs a = with_rows_in_use(args);
  if (a.rope_dim % 2) return kUnsupported;
  for (int64_t t = 0; t < a.num_rows; ++t)
    if (!is_inside(a.position[t], a.num_positions) || !is_inside(a.stream[t], a.num_streams) ||
        !is_inside(a.slot[t], a.num_slots))
      return kOutOfRange;
  a.dtype == kF32 ? latent_append<float>(a) : latent_append<Bf16>(a);
  return kOk;
}

}  // namespace kdtree
