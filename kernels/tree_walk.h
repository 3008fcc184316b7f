// Steps through a draft tree, the same on host and device. A node's parent always has a smaller index than the node, so
// every walk towards the root is bounded.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define KDTREE_HD __host__ __device__
#else
#define KDTREE_HD
#endif

namespace kdtree {

constexpr int64_t kMaxBudget = 1023;  // nodes besides the root; Python: config.MAX_BUDGET

// 64-bit words that hold one bit for each of `num_tree_slots` nodes.
KDTREE_HD constexpr int64_t num_bit_words(int64_t num_tree_slots) { return (num_tree_slots + 63) / 64; }

// A prefix that waits to be taken: the child of `parent` that has `rank` among the candidates of its depth.
struct Prefix {
  double score;  // score(parent) + log_probs[depth - 1, rank]
  int32_t parent, depth, rank;
};

// Whether the rank path of `a` is lexicographically smaller than that of `b`. `parent` and `rank` describe the nodes
// taken so far. Neither may extend the other, and waiting prefixes never do: a prefix is taken before its extensions wait.
KDTREE_HD inline bool path_less(Prefix a, Prefix b, const int32_t* parent, const int32_t* rank) {
  for (; a.depth > b.depth; --a.depth) a.rank = rank[a.parent], a.parent = parent[a.parent];
  for (; b.depth > a.depth; --b.depth) b.rank = rank[b.parent], b.parent = parent[b.parent];
  while (a.parent != b.parent) {
    a.rank = rank[a.parent], a.parent = parent[a.parent];
    b.rank = rank[b.parent], b.parent = parent[b.parent];
  }
  return a.rank < b.rank;
}

// The best-first order: higher score, then the smaller rank path.
KDTREE_HD inline bool comes_before(const Prefix& a, const Prefix& b, const int32_t* parent, const int32_t* rank) {
  return a.score != b.score ? a.score > b.score : path_less(a, b, parent, rank);
}

// The child of `node` that holds `token`, or -1. Children lie behind their parent.
KDTREE_HD inline int32_t find_child(const int64_t* token, const int32_t* parent, int32_t num_nodes, int32_t node,
                                    int64_t wanted) {
  for (int32_t i = node + 1; i < num_nodes; ++i)
    if (parent[i] == node && token[i] == wanted) return i;
  return -1;
}

// Whether node 0 is a root and every other node has a parent in front of it.
KDTREE_HD inline bool parents_are_valid(const int32_t* parent, int32_t num_nodes) {
  bool valid = num_nodes == 0 || parent[0] == -1;
  for (int32_t i = 1; i < num_nodes; ++i) valid = valid && parent[i] >= 0 && parent[i] < i;
  return valid;
}

}  // namespace kdtree
