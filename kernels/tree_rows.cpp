// Flatten the trees of a batch into the rows of one forward pass: stream 0's nodes, then stream 1's, …
#include <limits>

#include "op_args.h"

namespace kdtree {

int tree_rows_cpu(const TreeRowsArgs& args) {
  const int64_t num_slots = args.num_tree_slots;
  int64_t row = 0;
  for (int64_t b = 0; b < args.num_streams; ++b) {
    const int32_t num_nodes = args.num_nodes[b], prefix_len = args.prefix_len[b];
    if (num_nodes < 0 || num_nodes > num_slots) return kOutOfRange;
    if (prefix_len < 0 || prefix_len > std::numeric_limits<int32_t>::max() - num_slots) return kOutOfRange;
    if (args.row_begin) args.row_begin[b] = int32_t(row);
    for (int32_t node = 0; node < num_nodes; ++node, ++row) {
      const int32_t depth = args.depth[b * num_slots + node];
      if (depth < 0 || depth > node) return kInvalidTree;  // a node is never deeper than its index
      args.row_stream[row] = int32_t(b);
      args.row_node[row] = node;
      args.row_position[row] = prefix_len + depth;
      args.row_slot[row] = prefix_len + node;
      args.row_token[row] = args.token[b * num_slots + node];
    }
  }
  if (!args.num_rows_device) return kOk;
  *args.num_rows_device = int32_t(row);
  for (; row < args.num_streams * num_slots; ++row) {
    args.row_stream[row] = args.row_node[row] = args.row_position[row] = args.row_slot[row] = -1;
    args.row_token[row] = -1;
  }
  return kOk;
}

}  // namespace kdtree
