// Growing a large tree level by level, all threads of the block at once. The pool takes every prefix that can still be
// among the best `budget`; what is left at the end is sorted, and its first `budget` are the tree.
//
// A child is taken into the pool only if its cost does not exceed the bound: at least `budget` prefixes in the pool
// cost no more than that. On the second level, whose parents are in order, also only ranks r of the i-th parent (both
// from 1) with i * r <= budget can matter, because the i * r children of better parents at better ranks cost no more.
// Costs may be equal, though: then the rank path decides, and a child left out by this second rule might have been in
// front. That is noticed (`left_out`), and the caller falls back to taking one prefix after the other; so it does where
// the pool overflows.
#pragma once
#include "tree_build_nodes.cuh"

namespace kdtree {

constexpr int kMaxPool = 4096, kMaxSorted = 2048, kNumBins = kBuildThreads, kMaxLevels = 255;
constexpr uint32_t kNoParent = 0xffff;
constexpr double kLargestCost = 1.7976931348623157e308;

struct Levels {
  double cost[kMaxPool];
  uint32_t place[kMaxPool];  // parent in the pool << 16 | rank
  uint8_t depth[kMaxPool];
  union {
    struct {
      double step[kMaxNodes];     // what the candidates of the level cost
      uint16_t offset[kMaxPool];  // of a parent: its children's place among the new ones
      int bins[kNumBins];
    };
    struct {
      double sorted_cost[kMaxSorted];
      uint16_t sorted[kMaxSorted];
    };
  };
  int warp_total[kBuildThreads / kWarp], pivot;
  unsigned long long left_out, bound;  // costs, as bits
  __device__ Levels() {}
};

struct LevelGrower {
  const Candidates& candidates;
  Levels& s;
  const int budget, num_columns;  // ranks that can matter at all
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  int size = 0, depth = 1;        // of the pool; of the prefixes last added
  double bound = kLargestCost;

  __device__ LevelGrower(const Candidates& candidates, Levels& levels, int budget)
      : candidates(candidates), s(levels), budget(budget), num_columns(min(budget, candidates.num_candidates)) {}

  // Whether the rank path of entry `a` of the pool is smaller than that of `b`; a prefix comes before its extension.
  __device__ __noinline__ bool path_before(int a, int b) const {
    const bool is_shorter = s.depth[a] < s.depth[b];
    while (s.depth[a] > s.depth[b]) a = int(s.place[a] >> 16);
    while (s.depth[b] > s.depth[a]) b = int(s.place[b] >> 16);
    while (s.place[a] >> 16 != s.place[b] >> 16) a = int(s.place[a] >> 16), b = int(s.place[b] >> 16);
    const uint32_t rank = s.place[a] & 0xffff, other = s.place[b] & 0xffff;
    return rank != other ? rank < other : is_shorter;
  }

  // Sum of `mine` over the threads before this one, and the total.
  __device__ int scan(int mine, int& total) {
    int sum = mine;
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const int other = __shfl_up_sync(kAllLanes, sum, offset);
      if (lane >= offset) sum += other;
    }
    if (lane == kWarp - 1) s.warp_total[warp] = sum;
    __syncthreads();
    int up_to = lane < kBuildThreads / kWarp ? s.warp_total[lane] : 0;
#pragma unroll
    for (int offset = 1; offset < kBuildThreads / kWarp; offset *= 2) {
      const int other = __shfl_up_sync(kAllLanes, up_to, offset);
      if (lane >= offset) up_to += other;
    }
    total = __shfl_sync(kAllLanes, up_to, kBuildThreads / kWarp - 1);
    const int before = __shfl_sync(kAllLanes, up_to, warp > 0 ? warp - 1 : 0);
    __syncthreads();
    return (warp > 0 ? before : 0) + sum - mine;
  }

  __device__ void add_first_level() {
    int mine = 0;
    for (int r = threadIdx.x; r < num_columns; r += kBuildThreads) {
      const double cost = __dadd_rn(0.0, candidates.cost(0, r));
      s.cost[r] = cost;
      s.place[r] = kNoParent << 16 | uint32_t(r);
      s.depth[r] = 1;
      mine += cost < kNeverTaken;
    }
    if (threadIdx.x == 0) s.left_out = cost_bits(kNeverTaken);
    scan(mine, size);
    if (size == budget) bound = s.cost[budget - 1];
  }

  // Which ranks of a parent to look at: of parent i those with from < (i + 1)(rank + 1) <= to if `ordered`, else from …
  // to - 1.
  struct Ranks {
    int from, to;
    bool ordered;

    __device__ __forceinline__ int begin(int i, int num_columns) const {
      return min(ordered ? from / (i + 1) : from, num_columns);
    }
    __device__ __forceinline__ int end(int i, int num_columns) const {
      return min(ordered ? to / (i + 1) : to, num_columns);
    }
  };

  // Of these ranks, how many cost at most the bound.
  __device__ int count_children(int parent, int i, const Ranks& ranks) {
    const double above = s.cost[parent];
    if (above > bound) return 0;
    const int begin = ranks.begin(i, num_columns), end = ranks.end(i, num_columns);
    int low = begin, high = end;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (__dadd_rn(above, s.step[middle]) <= bound)
        low = middle + 1;
      else
        high = middle;
    }
    if (ranks.ordered && ranks.to == budget && end < num_columns) {
      const double next = __dadd_rn(above, s.step[end]);
      if (next <= bound) atomicMin(&s.left_out, static_cast<unsigned long long>(cost_bits(next)));
    }
    return low - begin;
  }

  // Adds these children of the pool's entries [begin, end); false, and nothing done, where the pool would overflow.
  __device__ bool add_children(int begin, int end, const Ranks& ranks) {
    const int num_parents = end - begin, each = (num_parents + kBuildThreads - 1) / kBuildThreads;
    const int mine_begin = min(int(threadIdx.x) * each, num_parents), mine_end = min(mine_begin + each, num_parents);
    int mine = 0, total;
    for (int i = mine_begin; i < mine_end; ++i) {
      s.offset[i] = uint16_t(mine);
      mine += count_children(begin + i, i, ranks);
    }
    const int before = scan(mine, total);
    if (size + total > kMaxPool) return false;
    for (int i = mine_begin; i < mine_end; ++i) s.offset[i] += uint16_t(before);
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
      const int rank = ranks.begin(low, num_columns) + at - s.offset[low];
      s.cost[size + at] = __dadd_rn(s.cost[begin + low], s.step[rank]);
      s.place[size + at] = uint32_t(begin + low) << 16 | uint32_t(rank);
      s.depth[size + at] = uint8_t(depth);
    }
    __syncthreads();
    size += total;
    return true;
  }

  // Lowers the bound to a cost that at least `budget` entries do not exceed: that of the fullest prefix of bins needed.
  __device__ void tighten() {
    if (size < budget) return;
    float most = 0.0f;
    for (int i = threadIdx.x; i < size; i += kBuildThreads)
      if (s.cost[i] <= bound) most = fmaxf(most, float(s.cost[i]));
    if (threadIdx.x == 0) s.bound = 0, s.pivot = 0;
    s.bins[threadIdx.x] = 0;
    const uint32_t warp_most = __reduce_max_sync(kAllLanes, __float_as_uint(most));
    if (lane == 0) s.warp_total[warp] = int(warp_most);
    __syncthreads();
    for (int w = 0; w < kBuildThreads / kWarp; ++w) most = fmaxf(most, __uint_as_float(uint32_t(s.warp_total[w])));
    const float least = float(s.cost[0]), range = most - least;  // entry 0 is the best of all
    const float scale = range > 0.0f ? float(kNumBins - 1) / range : 0.0f;
    const auto bin_of = [&](double cost) { return min(kNumBins - 1, int((float(cost) - least) * scale)); };
    for (int i = threadIdx.x; i < size; i += kBuildThreads)
      if (s.cost[i] <= bound) atomicAdd(&s.bins[bin_of(s.cost[i])], 1);
    __syncthreads();
    int total;
    const int in_bin = s.bins[threadIdx.x], before = scan(in_bin, total);
    if (before < budget && before + in_bin >= budget) s.pivot = int(threadIdx.x);
    __syncthreads();
    double largest = 0.0;
    for (int i = threadIdx.x; i < size; i += kBuildThreads)
      if (s.cost[i] <= bound && bin_of(s.cost[i]) <= s.pivot) largest = fmax(largest, s.cost[i]);
    const uint32_t high = high_bits(largest), warp_high = __reduce_max_sync(kAllLanes, high);
    const uint32_t low = __reduce_max_sync(kAllLanes, high == warp_high ? uint32_t(cost_bits(largest)) : 0);
    if (lane == 0) atomicMax(&s.bound, static_cast<unsigned long long>(uint64_t(warp_high) << 32 | low));
    __syncthreads();
    if (total >= budget) bound = __longlong_as_double(int64_t(s.bound));
    __syncthreads();
  }

  // Drops the entries above the bound, whose children are above it too; `begin` stays with its entry.
  __device__ void compact(int& begin) {
    int kept = 0;
    for (int first = 0; first < size; first += kBuildThreads) {
      const int i = first + threadIdx.x;
      const bool exists = i < size;
      const double cost = exists ? s.cost[i] : kNeverTaken;
      const uint32_t place = exists ? s.place[i] : 0, parent = place >> 16;
      const uint8_t level = exists ? s.depth[i] : 0;
      int total;
      const int to = kept + scan(cost <= bound, total);
      if (exists) s.offset[i] = uint16_t(to);
      if (i == begin) s.pivot = to;
      __syncthreads();
      if (cost <= bound) {
        s.cost[to] = cost;
        s.place[to] = (parent == kNoParent ? kNoParent : uint32_t(s.offset[parent])) << 16 | (place & 0xffff);
        s.depth[to] = level;
      }
      kept += total;
      __syncthreads();
    }
    begin = s.pivot;
    size = kept;
    __syncthreads();
  }

  // The children of the pool's entries [begin, size); false to give up.
  __device__ bool add_level(int begin) {
    const int end = size;
    const bool ordered = depth == 2;  // the first level is in order
    const int all = ordered ? budget : num_columns, some = ordered ? budget / 4 : 4;
    if (!ordered && add_children(begin, end, {0, all, false})) return true;
    if (!add_children(begin, end, {0, some, ordered})) return false;  // first those that surely tighten the bound
    tighten();
    return add_children(begin, end, {some, all, ordered});
  }

  // The entries within the bound, in best-first order: how many there are, or one above kMaxSorted.
  __device__ int sort() {
    int mine = 0, total;
    for (int i = threadIdx.x; i < size; i += kBuildThreads) mine += s.cost[i] <= bound;
    int at = scan(mine, total);
    if (total > kMaxSorted) return kMaxSorted + 1;
    for (int i = threadIdx.x; i < size; i += kBuildThreads)
      if (s.cost[i] <= bound) s.sorted_cost[at] = s.cost[i], s.sorted[at++] = uint16_t(i);
    int padded = 2;
    while (padded < total) padded *= 2;
    for (int i = total + threadIdx.x; i < padded; i += kBuildThreads) s.sorted_cost[i] = kNeverTaken, s.sorted[i] = 0;
    for (int width = 2; width <= padded; width *= 2)
      for (int stride = width / 2; stride > 0; stride /= 2) {
        __syncthreads();
        for (int pair = threadIdx.x; pair < padded / 2; pair += kBuildThreads) {
          const int low = pair / stride * 2 * stride + pair % stride, high = low + stride;
          const double x = s.sorted_cost[low], y = s.sorted_cost[high];
          const bool in_order = x != y ? x < y : x == kNeverTaken || path_before(s.sorted[low], s.sorted[high]);
          if (in_order == ((low & width) == 0)) continue;
          const uint16_t entry = s.sorted[low];
          s.sorted_cost[low] = y, s.sorted_cost[high] = x;
          s.sorted[low] = s.sorted[high], s.sorted[high] = entry;
        }
      }
    __syncthreads();
    return total;
  }

  __device__ void write(Nodes& nodes, int count) {
    uint16_t* place = reinterpret_cast<uint16_t*>(s.cost);  // of a pool entry among the nodes; the costs were copied
    for (int i = threadIdx.x; i < count; i += kBuildThreads) place[s.sorted[i]] = uint16_t(i + 1);
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += kBuildThreads) {
      const int entry = s.sorted[i];
      const uint32_t parent = s.place[entry] >> 16;
      nodes.cost[i + 1] = s.sorted_cost[i];
      nodes.parent[i + 1] = parent == kNoParent ? 0 : place[parent];
      nodes.rank[i + 1] = int(s.place[entry] & 0xffff);
      nodes.depth[i + 1] = s.depth[entry];
    }
  }

  // The number of nodes, root included, or -1 to give up.
  __device__ int grow(Nodes& nodes) {
    if (candidates.max_depth > kMaxLevels) return -1;
    add_first_level();
    int begin = 0, since_tightened = 0;
    for (depth = 2; depth <= candidates.max_depth && begin < size; ++depth) {
      if (size > kMaxPool / 2) compact(begin);
      const int end = size;
      for (int r = threadIdx.x; r < num_columns; r += kBuildThreads) s.step[r] = candidates.cost(depth - 1, r);
      __syncthreads();
      if (!add_level(begin)) return -1;
      begin = end;
      since_tightened += size - end;
      if (since_tightened < budget / 8) continue;
      tighten();
      since_tightened = 0;
    }
    tighten();
    const int total = sort(), count = min(total, budget);
    if (total > kMaxSorted) return -1;
    const double last = total >= budget ? s.sorted_cost[budget - 1] : kLargestCost;
    if (s.left_out <= cost_bits(last)) return -1;
    write(nodes, count);
    return count + 1;
  }
};

}  // namespace kdtree
