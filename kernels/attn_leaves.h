// How verify_attn cuts the positions of the text into leaves: a leaf is summed alone, from nothing, and leaves are then
// folded in an order of their index. A leaf's borders depend on absolute positions alone, so a query has the same bits
// whatever it is computed beside. Leaves grow with the position: short ones give parallel work at short prefixes, long
// ones keep the partial results of long prefixes few (184 at 128 k positions).
//   positions from 0: 128 keys a leaf, 2048: 256, 8192: 512, 32768: 1024, 131072: 2048
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define KDTREE_LEAF_HD __host__ __device__
#else
#define KDTREE_LEAF_HD
#endif

namespace kdtree {

constexpr int kNumLeafRegions = 5, kLog2FirstLeaf = 7;

// Region r holds leaves of 2^(7 + r) keys and begins at this position …
KDTREE_LEAF_HD constexpr int leaf_region_begin(int r) { return r == 0 ? 0 : 2048 << 2 * (r - 1); }
// … with this leaf.
KDTREE_LEAF_HD constexpr int leaf_region_first(int r) { return r == 0 ? 0 : (24 << (r - 1)) - 8; }

KDTREE_LEAF_HD constexpr int leaf_region(int position) {
  return (position >= leaf_region_begin(1)) + (position >= leaf_region_begin(2)) + (position >= leaf_region_begin(3)) +
         (position >= leaf_region_begin(4));
}

KDTREE_LEAF_HD constexpr int leaf_of(int position) {
  const int r = leaf_region(position);
  return leaf_region_first(r) + ((position - leaf_region_begin(r)) >> (kLog2FirstLeaf + r));
}

// First position of the leaf that holds `position`.
KDTREE_LEAF_HD constexpr int leaf_begin(int position) {
  return position & ~((1 << (kLog2FirstLeaf + leaf_region(position))) - 1);
}

static_assert(leaf_of(2047) == 15 && leaf_of(2048) == 16 && leaf_of(8191) == 39 && leaf_of(8192) == 40);
static_assert(leaf_of(32767) == 87 && leaf_of(32768) == 88 && leaf_of(131071) == 183 && leaf_of(131072) == 184);
static_assert(leaf_begin(2047) == 1920 && leaf_begin(2303) == 2048 && leaf_begin(131072 + 2047) == 131072);

}  // namespace kdtree
