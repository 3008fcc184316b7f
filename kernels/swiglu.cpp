// swiglu and residual_add: element by element, FP32 inside, one rounding.
#include "swiglu.h"

#include "op_args.h"
#include "parallel.h"
#include "rows_in_use.h"

namespace kdtree {
namespace {

constexpr int64_t kExpWork = 8;  // an exp and a division, in units of parallel.h

template <class Float>
void swiglu(const SwigluArgs& a) {
  const int num_threads = threads_for(a.num_rows * a.dim * kExpWork, a.num_threads);
  run_shares(num_threads, a.num_rows, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      const Float* gate = static_cast<const Float*>(a.gate_up) + t * 2 * a.dim;
      Float* out = static_cast<Float*>(a.out) + t * a.dim;
      for (int64_t i = 0; i < a.dim; i += kLanes) {
        const int64_t count = a.dim - i;
        store_first(swiglu16(load_first(gate + i, count), load_first(gate + a.dim + i, count)), out + i, count);
      }
    }
  });
}

template <class Float>
void residual_add(const ResidualAddArgs& a) {
  const Float* x = static_cast<const Float*>(a.x);
  const Float* y = static_cast<const Float*>(a.y);
  Float* out = static_cast<Float*>(a.out);
  const int64_t count = a.num_rows * a.dim;
  const int num_threads = threads_for(count, a.num_threads);
  run_shares(num_threads, count, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i)
      out[i] = narrow<Float>(widen(x[i]) + widen(y[i]));
  });
}

}  // namespace

int swiglu_cpu(const SwigluArgs& args) {
  const SwigluArgs a = with_rows_in_use(args);
  a.dtype == kF32 ? swiglu<float>(a) : swiglu<Bf16>(a);
  return kOk;
}

int residual_add_cpu(const ResidualAddArgs& args) {
  const ResidualAddArgs a = with_rows_in_use(args);
  a.dtype == kF32 ? residual_add<float>(a) : residual_add<Bf16>(a);
  return kOk;
}

}  // namespace kdtree
