// add_partials: the partial sums of the ranks, added on the tree that the segment sums of one rank take.
#include "op_args.h"
#include "parallel.h"
#include "partials.h"
#include "rows_in_use.h"
#include "vec16.h"

namespace kdtree {
namespace {

// Elements [begin, end) of the result; a rank's partial sums lie `stride` apart.
template <class Float>
void add_share(const AddPartialsArgs& a, int64_t stride, int64_t begin, int64_t end) {
  const Float* residual = static_cast<const Float*>(a.residual);
  for (int64_t i = begin; i < end; i += kLanes) {
    Vec16 sum[kMaxPartials];
    for (int64_t p = 0; p < a.num_partials; ++p) sum[p] = load_first(a.partials + p * stride + i, end - i);
    for (int64_t width = 1; width < a.num_partials; width *= 2)
      for (int64_t p = 0; p < a.num_partials; p += 2 * width) sum[p] = sum[p] + sum[p + width];
    if (residual) sum[0] = rounded(sum[0], residual) + load_first(residual + i, end - i);
    store_first(sum[0], static_cast<Float*>(a.out) + i, end - i);
  }
}

template <class Float>
void add_partials(const AddPartialsArgs& a, int64_t stride) {
  const int64_t count = a.num_rows * a.dim;
  const int num_threads = threads_for(count * a.num_partials, a.num_threads);
  run_shares(num_threads, count,
             [&](int64_t begin, int64_t end, int) { add_share<Float>(a, stride, begin, end); });
}

}  // namespace

int add_partials_cpu(const AddPartialsArgs& args) {
  if (!is_num_partials(args.num_partials)) return kUnsupported;
  const AddPartialsArgs a = with_rows_in_use(args);
  const int64_t stride = args.num_rows * args.dim;
  a.dtype == kF32 ? add_partials<float>(a, stride) : add_partials<Bf16>(a, stride);
  return kOk;
}

}  // namespace kdtree
