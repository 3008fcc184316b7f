// accepted_features: a block copies one token's hidden states of one layer. A token whose row lies outside has features of
// NaN, and none behind a path that is longer than it can be.
#include "accepted_token.h"
#include "cuda_rows.cuh"

namespace kdtree {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads) accepted_features_kernel(AcceptedFeaturesArgs a, int64_t row_bytes) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const int64_t i = blockIdx.x, s = i / (a.max_depth + 1), layer = blockIdx.y;
  const AcceptedToken token = accepted_token(a, s, i % (a.max_depth + 1));
  char* out = static_cast<char*>(a.features) + (i * a.num_layers + layer) * row_bytes;
  if (layer == 0 && threadIdx.x == 0) {
    a.stream[i] = token.is_token ? int32_t(s) : -1;
    a.position[i] = token.is_token && is_inside(a, token) ? int32_t(token.position) : -1;
  }
  if (!token.is_token) {
    for (int64_t k = threadIdx.x; k < row_bytes / 2; k += kThreads) reinterpret_cast<uint16_t*>(out)[k] = 0;
  } else if (!is_inside(a, token)) {
    poison_row(out, row_bytes);
  } else {
    copy_row(out, static_cast<const char*>(hidden_of(a, layer)) + token.row * row_bytes, row_bytes);
  }
}

}  // namespace

int accepted_features_cuda(const AcceptedFeaturesArgs& a, void* stream) {
  if (a.num_layers < 1 || a.num_layers > kMaxFeatureLayers) return kUnsupported;
  const int64_t num_tokens = a.num_streams * (a.max_depth + 1);
  if (num_tokens == 0) return kOk;
  const LaunchShape shape{dim3(num_tokens, a.num_layers), dim3(kThreads), 0, 1, Start::kEarly};
  return launch(accepted_features_kernel, shape, stream, a, a.dim * element_bytes(a.dtype));
}

}  // namespace kdtree
