// The items of verify_attn one by one: the ticket a block draws, the keys and queries behind it, the path of its node.
#pragma once
#include "verify_attn_plan.cuh"

namespace kdtree {

struct AttnWork {
  AttnItem item;
  uint32_t next_ticket;
  uint16_t path[kMaxPath];            // node at each depth, of a tail item
};

__device__ __forceinline__ void find_run(int end, int log2_unit, int run, AttnItem& item) {
#pragma unroll 1
  for (int r = 0; r < kNumLeafRegions; ++r) {
    const int begin = leaf_region_begin(r), last = r + 1 < kNumLeafRegions ? min(end, leaf_region_begin(r + 1)) : end;
    const int shift = max(log2_unit, kLog2FirstLeaf + r), runs = ceil_shift(last - begin, shift);
    if (run < runs || r + 1 == kNumLeafRegions) {
      item.begin = begin + (run << shift);
      item.end = min(last, item.begin + (1 << shift));
      return;
    }
    run -= runs;
  }
}

__device__ __forceinline__ void set_stream(const AttnLaunch& launch, int stream, AttnItem& item) {
  const VerifyAttnArgs& a = launch.a;
  const int64_t row_bytes = (a.latent_dim + a.rope_dim) * (a.dtype == kF32 ? 4 : 2);
  item.stream = stream;
  item.keys = static_cast<const char*>(a.cache) + stream * a.num_slots * row_bytes;
}

// One thread. An item without keys (end == begin) has nothing to do.
__device__ void find_tail_item(const AttnLaunch& launch, const AttnPlan& plan, int index, AttnItem& item) {
  const VerifyAttnArgs& a = launch.a;
  const int tiles = ceil_shift(int(a.num_heads), plan.tail_log2_rows), row = index / tiles;
  const int head = (index % tiles) << plan.tail_log2_rows;
  item.first_query = row * int(a.num_heads) + head;
  item.num_queries = min(1 << plan.tail_log2_rows, int(a.num_heads) - head);
  item.log2_rows = plan.tail_log2_rows;
  item.begin = item.end = 0;
  item.node = item.depth = 0;
  const int s = a.stream[launch.row_begin + row], node = a.node[launch.row_begin + row];
  bool valid = plan.ordered && s >= 0 && s < a.num_streams && node >= 0 && node < a.num_tree_slots;
  valid = valid && plan.streams[s].prefix >= 0 && plan.streams[s].prefix + node < a.num_slots;
  const int depth = valid ? a.depth[s * a.num_tree_slots + node] : -1;
  valid = valid && depth >= 0 && depth <= node;
  if (valid) {
    item.prefix = plan.streams[s].prefix;
    item.begin = plan.streams[s].shared_end;
    item.end = item.prefix + depth + 1;
    item.plain_end = depth == node ? item.end : item.prefix;  // only a chain is as deep as its index
    item.node = node;
    item.depth = depth;
    set_stream(launch, s, item);
  }
  if (head == 0) launch.num_leaves[row] = valid ? leaf_of(item.end - 1) + 1 : kInvalidRow;
}

__device__ void find_shared_item(const AttnLaunch& launch, const AttnPlan& plan, int index, AttnItem& item) {
  const VerifyAttnArgs& a = launch.a;
  int s = 0;
#pragma unroll 1
  while (s + 1 < a.num_streams && index >= plan.streams[s].items_end) ++s;
  const AttnPlan::Stream& stream = plan.streams[s];
  if (s > 0) index -= plan.streams[s - 1].items_end;
  const int queries = stream.num_rows * int(a.num_heads), tiles = ceil_shift(queries, plan.shared_log2_rows);
  const int first = (index % tiles) << plan.shared_log2_rows;
  find_run(stream.shared_end, plan.log2_unit, num_runs(stream.shared_end, plan.log2_unit) - 1 - index / tiles, item);
  item.first_query = stream.row_begin * int(a.num_heads) + first;
  item.num_queries = min(1 << plan.shared_log2_rows, queries - first);
  item.log2_rows = plan.shared_log2_rows;
  item.prefix = item.plain_end = item.end;
  item.node = item.depth = -1;
  set_stream(launch, s, item);
}

// One thread: the item of this ticket, which is below num_items.
__device__ void find_item(const AttnLaunch& launch, const AttnPlan& plan, uint32_t ticket, AttnItem& item) {
  if (ticket < uint32_t(plan.num_tail_items))
    find_tail_item(launch, plan, int(ticket), item);
  else
    find_shared_item(launch, plan, int(ticket) - plan.num_tail_items, item);
}

// Some warps: the nodes from the root to the item's node. `meet` makes them meet, `thread` counts them; `scratch` has room
// for kMaxPath nodes.
template <class Node, class Meet>
__device__ __forceinline__ void find_path(const AttnLaunch& launch, AttnWork& work, Node* scratch, int thread,
                                          int num_threads, Meet meet) {
  const int node = work.item.node, depth = work.item.depth;
  if (depth == node) {
    for (int k = thread; k <= depth; k += num_threads) work.path[k] = uint16_t(k);
    return;
  }
  const int32_t* parent = launch.a.parent + work.item.stream * launch.a.num_tree_slots;
  for (int i = thread; i <= node; i += num_threads) scratch[i] = Node(parent[i]);
  meet();
  if (thread > 0) return;
  int at = node;
  for (int k = depth; k >= 0; --k) {
    work.path[k] = uint16_t(at);
    at = int(scratch[at]);
    at = at < 0 || at > node ? 0 : at;  // a broken tree may give wrong sums, not wrong addresses
  }
}

// All threads, none of which still uses `work` or `scratch` (4 * N bytes): makes `work` the item of this ticket, unless it
// has been found; false when there is none left.
__device__ bool begin_item(const AttnLaunch& launch, const AttnPlan& plan, AttnWork& work, uint32_t ticket, bool is_found,
                           int* scratch) {
  if (ticket >= uint32_t(plan.num_items)) return false;
  if (!is_found) {
    if (threadIdx.x == 0) find_item(launch, plan, ticket, work.item);
    __syncthreads();
  }
  if (work.item.node < 0) return true;
  find_path(launch, work, scratch, int(threadIdx.x), int(blockDim.x), [] { __syncthreads(); });
  __syncthreads();
  return true;
}

// One thread: draws a ticket. What comes back need not be looked at at once.
__device__ __forceinline__ uint64_t draw(const AttnLaunch& launch, const AttnPlan& plan) {
  if (plan.num_items <= int(gridDim.x)) return kTicketMark | 0x7fffffffu;
  return atomicAdd(reinterpret_cast<unsigned long long*>(launch.tickets), 1ull);
}

// The ticket that was drawn; past the last one when there is none.
__device__ __forceinline__ uint32_t ticket_of(const AttnLaunch& launch, const AttnPlan& plan, uint64_t drawn) {
#pragma unroll 1
  for (int tries = 0; tries < 10000; ++tries) {
    if (drawn >> 32 == kTicketMark >> 32) return gridDim.x + uint32_t(drawn);
    __nanosleep(100);  // block 0 has not yet set the mark; without a ticket, other blocks do the work
    drawn = draw(launch, plan);
  }
  return 0xffffffffu;
}

__device__ __forceinline__ uint32_t draw_ticket(const AttnLaunch& launch, const AttnPlan& plan) {
  return ticket_of(launch, plan, draw(launch, plan));
}

}  // namespace kdtree
