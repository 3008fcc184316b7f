// The longest path from the root that the target itself would have chosen. Children lie behind their parent, so one
// pass over the nodes finds the whole path.
#include <algorithm>

#include "op_args.h"
#include "tree_walk.h"

namespace kdtree {

int tree_accept_cpu(const TreeAcceptArgs& args) {
  for (int64_t b = 0; b < args.num_streams; ++b) {
    const int64_t* token = args.token + b * args.num_tree_slots;
    const int32_t* parent = args.parent + b * args.num_tree_slots;
    int32_t* path = args.accepted_path + b * args.max_depth;
    const int32_t num_nodes = args.num_nodes[b];
    std::fill(path, path + args.max_depth, -1);
    args.num_accepted[b] = 0;
    args.next_token[b] = -1;
    if (num_nodes < 0 || num_nodes > args.num_tree_slots) return kOutOfRange;
    if (!parents_are_valid(parent, num_nodes)) return kInvalidTree;
    if (num_nodes == 0) continue;
    const int64_t* target_token = args.target_token + (args.row_begin ? args.row_begin[b] : b * args.num_tree_slots);
    int32_t node = 0, num_accepted = 0;
    for (int32_t child; (child = find_child(token, parent, num_nodes, node, target_token[node])) >= 0; node = child) {
      if (num_accepted == args.max_depth) return kOutOfRange;
      path[num_accepted++] = child;
    }
    args.num_accepted[b] = num_accepted;
    args.next_token[b] = target_token[node];
  }
  return kOk;
}

}  // namespace kdtree
