// Two products in one launch, which share nothing but the time: the first blocks do tiles of one, the rest of the other. Where
// neither fills the device, both take little longer than one, and a launch is saved. Their bits are those of two launches. The
// blocks of the first start first: what takes a block longer, or is cut into fewer blocks than there are multiprocessors.
#pragma once
#include "linear_tile.cuh"

namespace kdtree {

struct PairArgs {
  TileArgs first, second;
  int num_first, num_second, second_begin;  // blocks of each; the second product's first block
};

// A product whose blocks share no tile may stand beside one of clusters.
template <class First, class Second>
struct PairShape {
  template <class S>
  static constexpr int cluster_of() { return S::kPartials ? 1 : S::kCluster; }
  static constexpr int kCluster = std::max(cluster_of<First>(), cluster_of<Second>());
  static constexpr int kThreads = std::max(First::kThreads, Second::kThreads);
  static constexpr int kMinBlocks = std::min(First::kMinBlocks, Second::kMinBlocks);
  static constexpr int kSharedBytes = std::max(First::kSharedBytes, Second::kSharedBytes);
  static_assert((cluster_of<First>() == 1 || cluster_of<First>() == kCluster) &&
                (cluster_of<Second>() == 1 || cluster_of<Second>() == kCluster), "one size of clusters");
};

template <class First, class Second>
__global__ void __launch_bounds__(PairShape<First, Second>::kThreads, PairShape<First, Second>::kMinBlocks)
    linear_pair_kernel(const __grid_constant__ PairArgs a) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int block = blockIdx.x, thread = threadIdx.x, beyond = block - a.second_begin;
  if (block < a.num_first) {
    if (thread < First::kThreads) do_tile<First>(a.first, block, shared);
  } else if (beyond >= 0 && beyond < a.num_second) {
    if (thread < Second::kThreads) do_tile<Second>(a.second, beyond, shared);
  }
}

// Products without groups, or of experts. Clusters are whole, so a few blocks may have nothing to do.
template <class First, class Second>
int launch_pair(TileArgs first, TileArgs second, void* stream) {
  using S = PairShape<First, Second>;
  const int64_t num_first = count_blocks<First>(&first), num_second = count_blocks<Second>(&second);
  if (num_first == 0) return launch_tile<Second>(second, 1, stream);
  if (num_second == 0) return launch_tile<First>(first, 1, stream);
  const int64_t second_begin = ceil_div(num_first, S::kCluster) * S::kCluster;
  const int64_t num_blocks = second_begin + ceil_div(num_second, S::kCluster) * S::kCluster;
  if (num_blocks > INT32_MAX) return kUnsupported;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(num_blocks)), shape.block = dim3(S::kThreads);
  shape.shared_bytes = S::kSharedBytes, shape.cluster = S::kCluster, shape.start = Start::kEarly;
  const PairArgs a = {first, second, static_cast<int>(num_first), static_cast<int>(num_second), static_cast<int>(second_begin)};
  return launch(linear_pair_kernel<First, Second>, shape, stream, a);
}

}  // namespace kdtree
