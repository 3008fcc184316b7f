// Which positions a token of a block sees, on host and device; see BlockAttnArgs.
#pragma once
#include "op_args.h"

#ifdef __CUDACC__
#define KDTREE_SEES __host__ __device__ __forceinline__
#else
#define KDTREE_SEES inline
#endif

namespace kdtree {

constexpr int64_t kMaxHeadDim = 256, kMaxBlockSize = 64;  // of the operations of block drafters

struct KeyRange {
  int64_t begin, end;
};

// Of token i of a block behind prefix_len positions.
KDTREE_SEES KeyRange keys_seen(const BlockAttnArgs& a, int64_t prefix_len, int64_t i) {
  const int64_t position = prefix_len + i;
  KeyRange seen = {0, a.causal ? position + 1 : prefix_len + a.block_size};
  if (a.window > 0 && position - a.window + 1 > 0) seen.begin = position - a.window + 1;
  if (a.window > 0 && position + a.window < seen.end) seen.end = position + a.window;
  return seen;
}

// What tokens first … last see together: a token further on never sees less at the end, nor more at the beginning.
KDTREE_SEES KeyRange keys_seen(const BlockAttnArgs& a, int64_t prefix_len, int64_t first, int64_t last) {
  return {keys_seen(a, prefix_len, first).begin, keys_seen(a, prefix_len, last).end};
}

// Whether a block of stream `stream` can stand behind prefix_len positions.
KDTREE_SEES bool block_is_valid(const BlockAttnArgs& a, int64_t stream, int64_t prefix_len) {
  return stream >= 0 && stream < a.num_streams && prefix_len >= 0 && prefix_len <= a.num_slots &&
         prefix_len + a.block_size <= a.num_positions;
}

}  // namespace kdtree
