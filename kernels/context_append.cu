// context_append: keys and values of committed tokens, for all layers of a drafter. Nothing is written outside the cache.
#include "block_sees.h"
#include "cuda_rows.cuh"
#include "head_norm.cuh"

namespace kdtree {
namespace {

constexpr int kThreads = 128, kHeadsAtOnce = kThreads / kHeadLanes;

template <class Float, int kPairs>
__global__ void __launch_bounds__(kThreads, 1) context_append_kernel(ContextAppendArgs a) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const int64_t row = blockIdx.x;
  const int64_t position = a.position[row], stream = a.stream[row];
  if (position < 0 || position >= a.num_slots || position >= a.num_positions || stream < 0 || stream >= a.num_streams)
    return;
  const int num_heads = int(a.num_layers * a.num_heads), dim = int(a.dim);
  const int64_t width = int64_t(num_heads) * dim, slot = (stream * a.num_slots + position) * width;
  const Float* kv = static_cast<const Float*>(a.kv) + row * 2 * width;
  Float* keys = static_cast<Float*>(a.keys) + slot;
  for (int first = 0; first < num_heads; first += kHeadsAtOnce) {
    const int head = first + threadIdx.x / kHeadLanes;
    const Float* x = head < num_heads ? kv + int64_t(head) * dim : nullptr;
    norm_and_turn<kPairs>(x, static_cast<const Float*>(a.key_norm) + head / a.num_heads * dim, a.eps, a.cos_sin + position * dim,
                  dim, keys + int64_t(head) * dim);
  }
  copy_row(reinterpret_cast<char*>(static_cast<Float*>(a.values) + slot), reinterpret_cast<const char*>(kv + width),
           width * int64_t(sizeof(Float)));
}

template <class Float>
int launch_append(const ContextAppendArgs& a, void* stream) {
  const auto kernel = a.dim <= 64    ? context_append_kernel<Float, 4>
                      : a.dim <= 128 ? context_append_kernel<Float, 8>
                                     : context_append_kernel<Float, kMaxHeadDim / 2 / kHeadLanes>;
  return launch(kernel, {dim3(a.num_rows), dim3(kThreads), 0, 1, Start::kEarly}, stream, a);
}

}  // namespace

int context_append_cuda(const ContextAppendArgs& a, void* stream) {
  if (a.dim % 2 || a.dim > kMaxHeadDim) return kUnsupported;
  if (a.num_rows == 0 || a.num_layers == 0 || a.num_heads == 0 || a.dim == 0) return kOk;
  return with_dtype(a.dtype, [&](auto element) { return launch_append<decltype(element)>(a, stream); });
}

}  // namespace kdtree
