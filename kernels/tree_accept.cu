// tree_accept: from the root, follow the child whose token is the target's choice. One block a stream: all nodes look
// at once whether they are the choice of their parent, then one thread walks from choice to choice.
#include "cuda_rows.cuh"
#include "tree_walk.h"

namespace kdtree {
namespace {

constexpr int kThreads = 256, kNone = 0x7fffffff;

__global__ void __launch_bounds__(kThreads) tree_accept_kernel(TreeAcceptArgs a) {
  wait_for_previous_kernel();
  allow_next_kernel();
  __shared__ int chosen[kMaxBudget + 1];  // the first child that holds the target's choice
  const int64_t b = blockIdx.x;
  const int64_t* token = a.token + b * a.num_tree_slots;
  const int32_t* parent = a.parent + b * a.num_tree_slots;
  const int64_t* target_token = a.target_token + (a.row_begin ? a.row_begin[b] : b * a.num_tree_slots);
  int32_t* path = a.accepted_path + b * a.max_depth;
  int num_nodes = a.num_nodes[b];
  if (num_nodes < 0 || num_nodes > a.num_tree_slots) num_nodes = 0;
  for (int i = threadIdx.x; i < num_nodes; i += kThreads) chosen[i] = kNone;
  for (int64_t j = threadIdx.x; j < a.max_depth; j += kThreads) path[j] = -1;
  __syncthreads();
  for (int i = 1 + threadIdx.x; i < num_nodes; i += kThreads) {
    const int32_t above = parent[i];
    if (above >= 0 && above < i && token[i] == target_token[above]) atomicMin(&chosen[above], i);
  }
  __syncthreads();
  if (threadIdx.x > 0) return;
  int node = 0, num_accepted = 0;
  while (num_accepted < a.max_depth && num_nodes > 0 && chosen[node] != kNone) {  // ends: chosen[node] > node
    node = chosen[node];
    path[num_accepted++] = node;
  }
  a.num_accepted[b] = num_accepted;
  a.next_token[b] = num_nodes > 0 ? target_token[node] : -1;
}

}  // namespace

int tree_accept_cuda(const TreeAcceptArgs& a, void* stream) {
  if (a.num_tree_slots > kMaxBudget + 1) return kUnsupported;
  if (a.num_streams == 0) return kOk;
  return launch(tree_accept_kernel, {dim3(a.num_streams), dim3(kThreads), 0, 1, Start::kEarly}, stream, a);
}

}  // namespace kdtree
