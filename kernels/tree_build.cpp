// The heaviest prefixes of per-depth marginals, best first: O(budget * log budget) steps of a binary heap per stream.
//
// A prefix waits in the heap from the moment its parent and its better sibling were taken. Both come before it in the
// best-first order, so the top of the heap is always the next of all prefixes, and trees are nested.
#include <algorithm>
#include <limits>
#include <vector>

#include "op_args.h"
#include "tree_walk.h"

namespace kdtree {
namespace {

constexpr double kNegInf = -std::numeric_limits<double>::infinity();

// Finds repeated token ids: a hash table of positions in the row at hand. The row's number is stored along, so that the
// next row needs no clearing.
class RepeatFinder {
 public:
  explicit RepeatFinder(int64_t num_ids) {
    while ((int64_t{1} << log2_size_) < 4 * num_ids) ++log2_size_;
    slots_.resize(size_t{1} << log2_size_);
  }

  bool has_repeats(const int64_t* ids, int64_t num_ids) {
    const size_t mask = slots_.size() - 1;
    const int shift = 64 - log2_size_;
    Slot* slots = slots_.data();
    const uint32_t row = ++row_;
    for (uint32_t k = 0; k < num_ids; ++k) {
      size_t i = size_t((uint64_t(ids[k]) * 0x9e3779b97f4a7c15u) >> shift);
      for (; slots[i].row == row; i = (i + 1) & mask)
        if (ids[slots[i].position] == ids[k]) return true;
      slots[i] = {row, k};
    }
    return false;
  }

 private:
  struct Slot {
    uint32_t row = 0, position = 0;
  };
  int log2_size_ = 4;
  std::vector<Slot> slots_;
  uint32_t row_ = 0;
};

bool row_is_valid(const float* log_probs, const int64_t* token_ids, int64_t num_candidates, RepeatFinder& finder) {
  int num_bad = num_candidates > 0 && !(log_probs[0] <= 0.0f);  // counts NaN too
  for (int64_t k = 1; k < num_candidates; ++k) num_bad += !(log_probs[k] <= log_probs[k - 1]);
  for (int64_t k = 0; k < num_candidates; ++k) num_bad += token_ids[k] < 0;
  return num_bad == 0 && !finder.has_repeats(token_ids, num_candidates);
}

// The arrays of one stream.
struct Tree {
  int64_t* token;
  int32_t *parent, *depth;
  double* log_prob;
  int64_t* ancestor_bits;
  int32_t num_nodes;
};

class Builder {
 public:
  Builder(const TreeBuildArgs& args, int64_t stream)
      : log_probs_(args.log_probs + stream * args.max_depth * args.num_candidates),
        token_ids_(args.token_ids + stream * args.max_depth * args.num_candidates),
        max_depth_(int32_t(args.max_depth)),
        num_candidates_(int32_t(args.num_candidates)),
        num_slots_(args.max_budget + 1),
        num_words_(num_bit_words(num_slots_)),
        tree_{args.token + stream * num_slots_,    args.parent + stream * num_slots_,
              args.depth + stream * num_slots_,    args.log_prob + stream * num_slots_,
              args.ancestor_bits + stream * num_slots_ * num_words_, 0} {}

  bool candidates_are_valid(RepeatFinder& finder) const {
    bool valid = true;
    for (int64_t d = 0; d < max_depth_; ++d)
      valid &= row_is_valid(log_probs_ + d * num_candidates_, token_ids_ + d * num_candidates_, num_candidates_,
                            finder);
    return valid;
  }

  int32_t grow(int64_t bonus, int32_t budget) {
    add_node({0.0, -1, 0, 0}, bonus);
    if (budget > 0) push_child(0);
    while (heap_size_ > 0 && tree_.num_nodes <= budget) {
      const Prefix best = heap_[0];
      const int32_t node = add_node(best, token_ids_[(best.depth - 1) * int64_t(num_candidates_) + best.rank]);
      Prefix sibling;
      if (make(best.parent, best.depth, best.rank + 1, &sibling))
        sift_down(sibling);  // takes the place of its better sibling, which saves a removal
      else if (--heap_size_ > 0)
        sift_down(heap_[heap_size_]);
      push_child(node);
    }
    return tree_.num_nodes;
  }

  void fill(int64_t first) {
    std::fill(tree_.token + first, tree_.token + num_slots_, -1);
    std::fill(tree_.parent + first, tree_.parent + num_slots_, -1);
    std::fill(tree_.depth + first, tree_.depth + num_slots_, -1);
    std::fill(tree_.log_prob + first, tree_.log_prob + num_slots_, kNegInf);
    std::fill(tree_.ancestor_bits + first * num_words_, tree_.ancestor_bits + num_slots_ * num_words_, 0);
  }

 private:
  int32_t add_node(const Prefix& prefix, int64_t token) {
    const int32_t node = tree_.num_nodes++;
    tree_.token[node] = token;
    tree_.parent[node] = prefix.parent;
    tree_.depth[node] = prefix.depth;
    tree_.log_prob[node] = prefix.score;
    rank_[node] = prefix.rank;
    int64_t* bits = tree_.ancestor_bits + node * num_words_;
    if (node == 0)
      std::fill(bits, bits + num_words_, 0);
    else
      std::copy_n(tree_.ancestor_bits + prefix.parent * num_words_, num_words_, bits);
    bits[node / 64] |= int64_t(uint64_t{1} << (node % 64));
    return node;
  }

  // False where there is no such candidate. -inf is never taken; what follows it in its row is -inf too.
  bool make(int32_t parent, int32_t depth, int32_t rank, Prefix* out) const {
    if (depth > max_depth_ || rank >= num_candidates_) return false;
    const double log_prob = log_probs_[(depth - 1) * int64_t(num_candidates_) + rank];
    *out = {tree_.log_prob[parent] + log_prob, parent, depth, rank};
    return log_prob != kNegInf;
  }

  void push_child(int32_t node) {
    Prefix child;
    if (make(node, tree_.depth[node] + 1, 0, &child)) sift_up(child);
  }

  bool before(const Prefix& a, const Prefix& b) const { return comes_before(a, b, tree_.parent, rank_); }

  void sift_up(const Prefix& entry) {
    int32_t hole = heap_size_++;
    for (int32_t above; hole > 0 && before(entry, heap_[above = (hole - 1) / 2]); hole = above)
      heap_[hole] = heap_[above];
    heap_[hole] = entry;
  }

  void sift_down(Prefix entry) {  // by value: it may lie in the heap itself
    int32_t hole = 0;
    for (int32_t below; (below = 2 * hole + 1) < heap_size_; hole = below) {
      if (below + 1 < heap_size_ && before(heap_[below + 1], heap_[below])) ++below;
      if (!before(heap_[below], entry)) break;
      heap_[hole] = heap_[below];
    }
    heap_[hole] = entry;
  }

  const float* log_probs_;
  const int64_t* token_ids_;
  const int32_t max_depth_, num_candidates_;
  const int64_t num_slots_, num_words_;
  Tree tree_;
  int32_t heap_size_ = 0;
  int32_t rank_[kMaxBudget + 1];
  Prefix heap_[kMaxBudget + 2];  // each node taken leaves the heap and adds at most two
};

}  // namespace

int tree_build_cpu(const TreeBuildArgs& args) {
  if (args.max_budget < 0 || args.max_budget > kMaxBudget) return kUnsupported;
  RepeatFinder finder(args.num_candidates);
  int worst = kOk;
  for (int64_t b = 0; b < args.num_streams; ++b) {
    Builder builder(args, b);
    int status = kOk;
    if (args.budget[b] < 0 || args.budget[b] > args.max_budget || args.bonus[b] < 0)
      status = kOutOfRange;
    else if (!builder.candidates_are_valid(finder))
      status = kInvalidCandidates;
    args.num_nodes[b] = status == kOk ? builder.grow(args.bonus[b], args.budget[b]) : 0;
    builder.fill(args.num_nodes[b]);
    args.status[b] = status;
    worst = std::max(worst, status);
  }
  return worst;
}

}  // namespace kdtree
