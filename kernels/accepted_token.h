// Where the tokens stand that a verified step has accepted, on host and device; see AcceptedFeaturesArgs.
#pragma once
#include "op_args.h"

#ifdef __CUDACC__
#define KDTREE_TOKEN __host__ __device__ __forceinline__
#else
#define KDTREE_TOKEN inline
#endif

namespace kdtree {

constexpr int64_t kMaxFeatureLayers = 8;

// Row of its hidden states and position; is_token is false behind the accepted path and where a stream is not active.
struct AcceptedToken {
  bool is_token;
  int64_t row, position;
};

// Token j of stream s: 0 is the root, j the j-th accepted node.
KDTREE_TOKEN AcceptedToken accepted_token(const AcceptedFeaturesArgs& a, int64_t s, int64_t j) {
  if (a.active[s] == 0 || j > a.num_accepted[s]) return {false, -1, -1};
  const int64_t node = j == 0 ? 0 : a.accepted_path[s * a.max_depth + j - 1];
  return {true, node < 0 ? -1 : a.first_row[s] + node, int64_t{a.prefix_len[s]} + j};
}

KDTREE_TOKEN bool is_inside(const AcceptedFeaturesArgs& a, const AcceptedToken& token) {
  return token.row >= 0 && token.row < a.num_rows && token.position >= 0 && token.position <= INT32_MAX;
}

KDTREE_TOKEN const void* hidden_of(const AcceptedFeaturesArgs& a, int64_t layer) {
  switch (layer) {
    case 0: return a.hidden_0;
    case 1: return a.hidden_1;
    case 2: return a.hidden_2;
    case 3: return a.hidden_3;
    case 4: return a.hidden_4;
    case 5: return a.hidden_5;
    case 6: return a.hidden_6;
    default: return a.hidden_7;
  }
}

}  // namespace kdtree
