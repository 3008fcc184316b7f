// accepted_features: the hidden states of what a step has accepted, side by side. Checks everything before it writes.
#include <cstring>

#include "accepted_token.h"

namespace kdtree {
namespace {

int check_stream(const AcceptedFeaturesArgs& a, int64_t s) {
  if (a.active[s] == 0) return kOk;
  if (a.num_accepted[s] < 0 || a.num_accepted[s] > a.max_depth) return kOutOfRange;
  for (int64_t j = 0; j <= a.num_accepted[s]; ++j)
    if (!is_inside(a, accepted_token(a, s, j))) return kOutOfRange;
  return kOk;
}

}  // namespace

int accepted_features_cpu(const AcceptedFeaturesArgs& a) {
  if (a.num_layers < 1 || a.num_layers > kMaxFeatureLayers) return kUnsupported;
  for (int64_t s = 0; s < a.num_streams; ++s)
    if (const int status = check_stream(a, s)) return status;
  const int64_t row_bytes = a.dim * (a.dtype == kF32 ? 4 : 2);
  char* out = static_cast<char*>(a.features);
  for (int64_t i = 0; i < a.num_streams * (a.max_depth + 1); ++i) {
    const int64_t s = i / (a.max_depth + 1);
    const AcceptedToken token = accepted_token(a, s, i % (a.max_depth + 1));
    a.stream[i] = token.is_token ? int32_t(s) : -1;
    a.position[i] = int32_t(token.position);
    for (int64_t layer = 0; row_bytes > 0 && layer < a.num_layers; ++layer, out += row_bytes) {
      if (token.is_token) std::memcpy(out, static_cast<const char*>(hidden_of(a, layer)) + token.row * row_bytes, row_bytes);
      else std::memset(out, 0, row_bytes);
    }
  }
  return kOk;
}

}  // namespace kdtree
