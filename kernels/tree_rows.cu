// Flatten the trees of a batch into the rows of one forward pass: stream 0's nodes, then stream 1's, … One block a
// stream.
#include "cuda_rows.cuh"

namespace kdtree {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ int nodes_in_use(const TreeRowsArgs& a, int64_t stream) {
  const int32_t count = a.num_nodes[stream];
  return count < 0 ? 0 : int(min(int64_t(count), a.num_tree_slots));
}

__global__ void __launch_bounds__(kThreads) tree_rows_kernel(TreeRowsArgs a) {
  wait_for_previous_kernel();
  allow_next_kernel();
  __shared__ int before, total;  // rows of the streams before this one, rows of all
  const int64_t b = blockIdx.x, num_slots = a.num_tree_slots;
  if (threadIdx.x == 0) before = total = 0;
  __syncthreads();
  for (int64_t s = threadIdx.x; s < a.num_streams; s += kThreads) {
    const int count = nodes_in_use(a, s);
    atomicAdd(&total, count);
    if (s < b) atomicAdd(&before, count);
  }
  __syncthreads();
  const int count = nodes_in_use(a, b);
  const int32_t prefix_len = a.prefix_len[b];
  for (int node = threadIdx.x; node < count; node += kThreads) {
    const int64_t row = before + node, at = b * num_slots + node;
    a.row_stream[row] = int32_t(b);
    a.row_node[row] = node;
    a.row_position[row] = prefix_len + a.depth[at];
    a.row_slot[row] = prefix_len + node;
    a.row_token[row] = a.token[at];
  }
  if (threadIdx.x == 0 && a.row_begin) a.row_begin[b] = before;
  if (!a.num_rows_device) return;
  if (threadIdx.x == 0 && b == 0) *a.num_rows_device = total;
  const int64_t first_unused = total + b * num_slots - before;  // this stream's share of the rows behind the last
  for (int i = threadIdx.x; i < num_slots - count; i += kThreads) {
    const int64_t row = first_unused + i;
    a.row_stream[row] = a.row_node[row] = a.row_position[row] = a.row_slot[row] = -1;
    a.row_token[row] = -1;
  }
}

}  // namespace

int tree_rows_cuda(const TreeRowsArgs& a, void* stream) {
  if (a.num_streams == 0) return kOk;
  return launch(tree_rows_kernel, {dim3(a.num_streams), dim3(kThreads), 0, 1, Start::kEarly}, stream, a);
}

}  // namespace kdtree
