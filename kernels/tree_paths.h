// Root-to-node paths of some rows of a step. Neighbouring rows whose nodes lie on one path share its array, so a chain
// of n nodes costs n entries, not n^2.
#pragma once
#include <cstdint>
#include <vector>

#include "op_args.h"

namespace kdtree {

class TreePaths {
 public:
  // A row's path: nodes()[first … first + num_nodes), root first. Rows on one path have the same `first`.
  struct Row {
    int64_t first, num_nodes;
  };

  const std::vector<Row>& rows() const { return rows_; }
  const int32_t* nodes() const { return nodes_.data(); }

  void clear() {
    rows_.clear();
    nodes_.clear();
  }

  // Walks from `node` up to the root, or to where the previous row's path is known. Bounded by the depth, whatever the
  // arrays hold. Returns kInvalidTree if a parent is not below its node, or depths do not count the nodes above.
  int append(const int32_t* parent, int32_t node, int32_t depth) {
    if (depth < 0 || depth > node) return kInvalidTree;
    const int64_t first = rows_.empty() ? 0 : rows_.back().first, known = int64_t(nodes_.size()) - first;
    int64_t d = depth;
    above_.clear();
    for (; d >= 0 && (d >= known || nodes_[first + d] != node); --d) {
      above_.push_back(node);
      const int32_t next = parent[node];
      if (d == 0 ? next != -1 : next < 0 || next >= node) return kInvalidTree;
      node = next;
    }
    const bool branches = d + 1 < known && !above_.empty();
    rows_.push_back({branches ? first + known : first, depth + 1});
    if (branches)
      for (int64_t i = 0; i <= d; ++i) nodes_.push_back(nodes_[first + i]);
    nodes_.insert(nodes_.end(), above_.rbegin(), above_.rend());
    return kOk;
  }

 private:
  std::vector<Row> rows_;
  std::vector<int32_t> nodes_, above_;
};

}  // namespace kdtree
