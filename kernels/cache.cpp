// cache_append and cache_compact: rows of the latent cache, written and moved. Both check everything before they write.
#include <cstring>

#include "op_args.h"
#include "rows_in_use.h"

namespace kdtree {
namespace {

int64_t element_bytes(Dtype dtype) { return dtype == kF32 ? 4 : 2; }

int check_compact(const CacheCompactArgs& a) {
  for (int64_t s = 0; s < a.num_streams; ++s) {
    const int64_t accepted = a.num_accepted[s], prefix = a.prefix_len[s];
    if (accepted < 0 || accepted > a.max_depth || prefix < 0) return kOutOfRange;
    int64_t previous = 0;
    for (int64_t j = 0; j < accepted; ++j) {
      const int64_t node = a.accepted_path[s * a.max_depth + j];
      if (node <= previous) return kInvalidTree;
      if (prefix + node >= a.num_slots) return kOutOfRange;
      previous = node;
    }
  }
  return kOk;
}

}  // namespace

int cache_append_cpu(const CacheAppendArgs& args) {
  const CacheAppendArgs a = with_rows_in_use(args);
  for (int64_t t = 0; t < a.num_rows; ++t) {
    const int64_t stream = a.stream[t], slot = a.slot[t];
    if (stream < 0 || stream >= a.num_streams || slot < 0 || slot >= a.num_slots) return kOutOfRange;
  }
  const int64_t latent_bytes = a.latent_dim * element_bytes(a.dtype), rope_bytes = a.rope_dim * element_bytes(a.dtype);
  for (int64_t t = 0; t < a.num_rows; ++t) {
    char* row = static_cast<char*>(a.cache) + (a.stream[t] * a.num_slots + a.slot[t]) * (latent_bytes + rope_bytes);
    std::memcpy(row, static_cast<const char*>(a.latent) + t * latent_bytes, latent_bytes);
    std::memcpy(row + latent_bytes, static_cast<const char*>(a.k_rope) + t * rope_bytes, rope_bytes);
  }
  return kOk;
}

int cache_compact_cpu(const CacheCompactArgs& a) {
  if (const int status = check_compact(a)) return status;
  const int64_t row_bytes = a.width * element_bytes(a.dtype);
  for (int64_t layer = 0; layer < a.num_layers; ++layer)
    for (int64_t s = 0; s < a.num_streams; ++s) {
      char* slots = static_cast<char*>(a.cache) + (layer * a.num_streams + s) * a.num_slots * row_bytes;
      char* root = slots + a.prefix_len[s] * row_bytes;
      for (int64_t j = 0; j < a.num_accepted[s]; ++j) {
        const int64_t node = a.accepted_path[s * a.max_depth + j];
        if (node != j + 1) std::memcpy(root + (j + 1) * row_bytes, root + node * row_bytes, row_bytes);
      }
    }
  return kOk;
}

}  // namespace kdtree
