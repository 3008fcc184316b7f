// rope: NeoX rotation of pairs (i, i + R/2) by the angle of the row's absolute position.
#include "op_args.h"
#include "parallel.h"
#include "rotate.h"
#include "rows_in_use.h"

namespace kdtree {
namespace {

template <class Float>
void rope(const RopeArgs& a) {
  const int num_threads = threads_for(a.num_rows * a.num_heads * a.dim, a.num_threads);
  run_shares(num_threads, a.num_rows, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      const float* cos_sin = a.cos_sin + a.position[t] * a.dim;
      for (int64_t h = 0; h < a.num_heads; ++h)
        rotate(static_cast<const Float*>(a.x) + t * a.x_row_stride + h * a.x_head_stride, cos_sin,
               static_cast<Float*>(a.out) + (t * a.num_heads + h) * a.dim, a.dim / 2);
    }
  });
}

}  // namespace

int rope_cpu(const RopeArgs& args) {
  const RopeArgs a = with_rows_in_use(args);
  if (a.dim % 2) return kUnsupported;
  for (int64_t t = 0; t < a.num_rows; ++t)
    if (a.position[t] < 0 || a.position[t] >= a.num_positions) return kOutOfRange;
  a.dtype == kF32 ? rope<float>(a) : rope<Bf16>(a);
  return kOk;
}

}  // namespace kdtree
