// Growing a large tree level by level, all threads of the block at once. The pool holds the best `budget` prefixes of the
// levels so far, best first; a level's children of pool members are found, sorted and merged into it. What is left at the
// end is the tree, in order.
//
// A child is looked at only if it can still be among the best: its cost must not exceed that of the pool's last member once
// the pool is full; and of the i-th best parent of a level (from 1) only ranks r with i * r <= budget can matter, because
// the i * r children of better parents at better ranks cost no more. Costs may be equal, though: then the rank path decides,
// and a child left out by the second rule might have been in front. That is noticed (`left_out`), and the caller falls back
// to taking one prefix after the other. It does so too where too many children stay within the bounds.
#pragma once
#include "tree_build_nodes.cuh"

namespace kdtree {

constexpr int kMaxNew = 2048, kSmallSort = 256;
constexpr uint16_t kNoParent = 0xffff;
constexpr double kLargestCost = 1.7976931348623157e308;

struct Pool {
  double cost[kMaxNodes];
  uint16_t parent[kMaxNodes], rank[kMaxNodes], depth[kMaxNodes];  // parent: place in the pool
};

struct Levels {
  Pool pools[2];
  double new_cost[kMaxNew];
  uint32_t new_place[kMaxNew];  // parent << 16 | rank
  double step[kMaxNodes];       // costs of the level's candidates
  int offset[kMaxNodes];        // first child of the level's i-th parent among the new
  uint16_t parents[kMaxNodes], moved[kMaxNodes];
  int warp_total[kBuildThreads / kWarp];
  unsigned long long left_out;  // smallest cost (bits) left out
};

struct Entry {
  double cost;
  int parent, rank, depth;
};

// Whether the rank path of `a` is smaller; a prefix comes before its extension.
__device__ __noinline__ bool path_before(const Pool& pool, Entry a, Entry b) {
  const bool a_is_shorter = a.depth < b.depth;
  const auto rise = [&](Entry& e) { e.rank = pool.rank[e.parent], e.parent = pool.parent[e.parent], --e.depth; };
  while (a.depth > b.depth) rise(a);
  while (b.depth > a.depth) rise(b);
  while (a.parent != b.parent) rise(a), rise(b);  // ends: at depth 1 both have kNoParent
  return a.rank != b.rank ? a.rank < b.rank : a_is_shorter;
}

struct LevelGrower {
  const Candidates& candidates;
  Levels& s;
  const int budget, num_columns;  // ranks that can matter at all
  int current = 0, size = 0, depth = 1;

  __device__ LevelGrower(const Candidates& candidates, Levels& levels, int budget)
      : candidates(candidates), s(levels), budget(budget), num_columns(min(budget, candidates.num_candidates)) {}

  __device__ __forceinline__ const Pool& pool() const { return s.pools[current]; }
  __device__ __forceinline__ double bound() const { return size == budget ? pool().cost[budget - 1] : kLargestCost; }
  __device__ __forceinline__ Entry member(int i) const {
    return {pool().cost[i], pool().parent[i], pool().rank[i], pool().depth[i]};
  }
  __device__ __forceinline__ Entry child(int i) const {
    return {s.new_cost[i], int(s.new_place[i] >> 16), int(s.new_place[i] & 0xffff), depth};
  }

  // Sum of `mine` over the threads before this one, and the total.
  __device__ int scan(int mine, int& total) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    int sum = mine;
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const int other = __shfl_up_sync(kAllLanes, sum, offset);
      if (lane >= offset) sum += other;
    }
    if (lane == kWarp - 1) s.warp_total[warp] = sum;
    __syncthreads();
    int before = 0;
    total = 0;
#pragma unroll
    for (int w = 0; w < kBuildThreads / kWarp; ++w) {
      before += w < warp ? s.warp_total[w] : 0;
      total += s.warp_total[w];
    }
    __syncthreads();
    return before + sum - mine;
  }

  __device__ void take_first_level() {
    for (int r = threadIdx.x; r < num_columns; r += kBuildThreads) {
      Pool& to = s.pools[0];
      to.cost[r] = __dadd_rn(0.0, candidates.cost(0, r));
      to.parent[r] = kNoParent;
      to.rank[r] = uint16_t(r);
      to.depth[r] = 1;
      s.moved[r] = to.cost[r] < kNeverTaken;
    }
    if (threadIdx.x == 0) s.left_out = cost_bits(kNeverTaken);
    __syncthreads();
    int mine = 0;
    for (int r = threadIdx.x; r < num_columns; r += kBuildThreads) mine += s.moved[r];
    scan(mine, size);
  }

  // The pool's members of the level above, in order: their number.
  __device__ int find_parents() {
    const int first = 2 * threadIdx.x;
    const bool is_parent[2] = {first < size && pool().depth[first] == depth - 1,
                               first + 1 < size && pool().depth[first + 1] == depth - 1};
    int total, at = scan(is_parent[0] + is_parent[1], total);
    for (int j = 0; j < 2; ++j)
      if (is_parent[j]) s.parents[at++] = uint16_t(first + j);
    __syncthreads();
    return total;
  }

  // Children of parent i with done < (i + 1)(rank + 1) <= limit and a cost within the bound: [begin, end) of their ranks.
  __device__ int count_children(int i, double most, int done, int limit, int& begin) {
    const double above = pool().cost[s.parents[i]];
    const int all = min(limit / (i + 1), num_columns);
    begin = min(done / (i + 1), all);
    int low = begin, high = all;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (__dadd_rn(above, s.step[middle]) <= most)
        low = middle + 1;
      else
        high = middle;
    }
    if (limit == budget && all < num_columns) {
      const double next = __dadd_rn(above, s.step[all]);
      if (next <= most) atomicMin(&s.left_out, static_cast<unsigned long long>(cost_bits(next)));
    }
    return low - begin;
  }

  // The new children, unsorted: their number, or one above kMaxNew.
  __device__ int find_children(int num_parents, int done, int limit) {
    const double most = bound();
    int count[2] = {0, 0}, begin[2] = {0, 0}, total;
    for (int j = 0; j < 2; ++j)
      if (2 * int(threadIdx.x) + j < num_parents)
        count[j] = count_children(2 * threadIdx.x + j, most, done, limit, begin[j]);
    const int before = scan(count[0] + count[1], total);
    if (total > kMaxNew) return kMaxNew + 1;
    for (int j = 0; j < 2; ++j)
      if (2 * int(threadIdx.x) + j < num_parents) s.offset[2 * threadIdx.x + j] = before + (j ? count[0] : 0);
    __syncthreads();
    for (int at = threadIdx.x; at < total; at += kBuildThreads) {
      int low = 0, high = num_parents - 1;  // the last parent whose offset is at most `at`
      while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (s.offset[middle] <= at)
          low = middle;
        else
          high = middle - 1;
      }
      const int rank = min(done / (low + 1), num_columns) + at - s.offset[low], parent = s.parents[low];
      s.new_cost[at] = __dadd_rn(pool().cost[parent], s.step[rank]);
      s.new_place[at] = uint32_t(parent) << 16 | uint32_t(rank);
    }
    __syncthreads();
    return total;
  }

  // Few children: each counts those in front of it, with 2 to 32 threads.
  __device__ void sort_few(int total) {
    int threads_each = kBuildThreads / kSmallSort;
    while (threads_each < kWarp && 2 * threads_each * total <= kBuildThreads) threads_each *= 2;
    const int i = threadIdx.x / threads_each;
    int before = 0;
    Entry mine{};
    if (i < total) {
      mine = child(i);
      for (int j = threadIdx.x % threads_each; j < total; j += threads_each) {
        const double other = s.new_cost[j];
        before += other < mine.cost || (other == mine.cost && j != i && path_before(pool(), child(j), mine));
      }
    }
    for (int offset = 1; offset < threads_each; offset *= 2) before += __shfl_xor_sync(kAllLanes, before, offset);
    __syncthreads();
    if (i < total && threadIdx.x % threads_each == 0) {
      s.new_cost[before] = mine.cost;
      s.new_place[before] = uint32_t(mine.parent) << 16 | uint32_t(mine.rank);
    }
    __syncthreads();
  }

  __device__ void sort_many(int total) {
    int padded = 2 * kSmallSort;
    while (padded < total) padded *= 2;
    for (int i = total + threadIdx.x; i < padded; i += kBuildThreads) s.new_cost[i] = kNeverTaken, s.new_place[i] = 0;
    for (int width = 2; width <= padded; width *= 2)
      for (int stride = width / 2; stride > 0; stride /= 2) {
        __syncthreads();
        for (int pair = threadIdx.x; pair < padded / 2; pair += kBuildThreads) {
          const int low = pair / stride * 2 * stride + pair % stride, high = low + stride;
          const double x = s.new_cost[low], y = s.new_cost[high];
          const bool in_order = x != y ? x < y : x == kNeverTaken || path_before(pool(), child(low), child(high));
          if (in_order == ((low & width) == 0)) continue;
          const uint32_t place = s.new_place[low];
          s.new_cost[low] = y, s.new_cost[high] = x;
          s.new_place[low] = s.new_place[high], s.new_place[high] = place;
        }
      }
    __syncthreads();
  }

  // How many of `count` sorted entries come before `mine`: costs[i] and, of equal ones, entry(i).
  template <class EntryAt>
  __device__ int num_before(const Entry& mine, const double* costs, int count, EntryAt&& entry) {
    int low = 0, high = count;
    while (low < high) {
      const int middle = (low + high) / 2;
      const double cost = costs[middle];
      if (cost < mine.cost || (cost == mine.cost && path_before(pool(), entry(middle), mine)))
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  }

  __device__ void write(Pool& to, int at, const Entry& entry) {
    if (at >= budget) return;
    to.cost[at] = entry.cost;
    to.parent[at] = entry.parent == kNoParent ? kNoParent : s.moved[entry.parent];
    to.rank[at] = uint16_t(entry.rank);
    to.depth[at] = uint16_t(entry.depth);
  }

  // Merges the sorted children into the pool and cuts it to the budget.
  __device__ void merge(int total) {
    Pool& to = s.pools[1 - current];
    const auto member_at = [&](int i) { return member(i); };
    const auto child_at = [&](int i) { return child(i); };
    for (int i = threadIdx.x; i < size; i += kBuildThreads) s.moved[i] = uint16_t(i + num_before(member(i), s.new_cost, total, child_at));
    __syncthreads();
    for (int i = threadIdx.x; i < size; i += kBuildThreads) write(to, s.moved[i], member(i));
    for (int i = threadIdx.x; i < total && i < budget; i += kBuildThreads)
      write(to, i + num_before(child(i), pool().cost, size, member_at), child(i));
    __syncthreads();
    current = 1 - current;
    size = min(budget, size + total);
  }

  // The children of one level: the number of parents they had, or -1 to give up.
  __device__ int grow_level() {
    for (int r = threadIdx.x; r < num_columns; r += kBuildThreads) s.step[r] = candidates.cost(depth - 1, r);
    int num_parents = find_parents();
    for (int done = 0, limit; num_parents > 0 && done < budget; done = limit) {
      if (done > 0) num_parents = find_parents();
      limit = budget;
      int total = find_children(num_parents, done, limit);
      if (total > kMaxNew && done == 0) {  // first those that surely tighten the bound
        limit = budget / 4;
        total = find_children(num_parents, done, limit);
      }
      if (total > kMaxNew) return -1;
      if (total == 0) continue;
      if (total <= kSmallSort)
        sort_few(total);
      else
        sort_many(total);
      merge(total);
    }
    return num_parents;
  }

  // The number of nodes, root included, or -1 to give up.
  __device__ int grow(Nodes& nodes) {
    take_first_level();
    for (depth = 2; depth <= candidates.max_depth; ++depth) {
      const int num_parents = grow_level();
      if (num_parents < 0) return -1;
      if (num_parents == 0) break;
    }
    if (s.left_out <= cost_bits(bound())) return -1;
    for (int i = threadIdx.x; i < size; i += kBuildThreads) {
      nodes.cost[i + 1] = pool().cost[i];
      nodes.parent[i + 1] = pool().parent[i] == kNoParent ? 0 : pool().parent[i] + 1;
      nodes.rank[i + 1] = pool().rank[i];
      nodes.depth[i + 1] = pool().depth[i];
    }
    return size + 1;
  }
};

}  // namespace kdtree
