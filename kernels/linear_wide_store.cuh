// The results of linear_wide.cuh: the blocks of a cluster add their segment sums; outputs are rounded and written.
#pragma once
#include "linear_wide_shape.cuh"

namespace kdtree {

// Where a thread's results go. Of column group j of its warpgroup it has two neighbouring columns of two rows.
template <class S>
struct WideStore {
  const TileArgs& a;
  const bool in_eights;
  int num_rows, first_row, first_column, num_columns;  // columns count from the block's first
  int64_t block;

  __device__ WideStore(const TileArgs& a, const WideArgs& w, const WideTile<S>& tile, int num_rows)
      : a(a), in_eights(w.out_in_eights), num_rows(min(num_rows, (tile.row_tile + 1) * S::kBlockRows)) {
    const int warpgroup = threadIdx.x / 128, t = threadIdx.x % 128;
    first_row = tile.row_tile * S::kBlockRows + warpgroup % S::kRowGroups * 64 + t / 32 * 16 + t % 32 / 4;
    first_column = warpgroup / S::kRowGroups * S::kGroups * 8;
    num_columns = a.num_out - tile.first_out_tile * kOutTile;
    block = tile.group * a.out_group_stride + tile.first_out_tile * kOutTile;
  }

  template <int kWidth>
  __device__ __forceinline__ void write(int row, int column, const float* sum) const {
    const int64_t at = row * a.out_row_stride + block + column;
    if (row >= num_rows || column >= num_columns) return;
    if (a.out_f32) store_outputs<float, kWidth>(a, at, sum);
    else store_outputs<__nv_bfloat16, kWidth>(a, at, sum);
  }
  // Column group j, each thread its own.
  __device__ __forceinline__ void one(int j, const float (&v)[4]) const {
    const int column = first_column + j * 8 + threadIdx.x % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + half * 8;
      if (a.out_aligned) write<2>(row, column, v + 2 * half);
      else write<1>(row, column, v + 2 * half), write<1>(row, column + 1, v + 2 * half + 1);
    }
  }
  // Column groups j to j + 3: the four threads of a row swap columns, so that each writes one group.
  __device__ __forceinline__ void four(int j, float (*v)[4]) const {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float even[4], odd[4], sum[8];
#pragma unroll
      for (int i = 0; i < 4; ++i) even[i] = v[i][2 * half], odd[i] = v[i][2 * half + 1];
      transpose_quad<1>(even, lane);
      transpose_quad<1>(odd, lane);
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[2 * i] = even[i], sum[2 * i + 1] = odd[i];
      write<8>(first_row + half * 8, first_column + (j + lane % 4) * 8, sum);
    }
  }
  __device__ __forceinline__ void all(float (&v)[S::kGroups][4]) const {
    constexpr int kInFours = S::kGroups / 4 * 4;
    if (in_eights) {
#pragma unroll
      for (int j = 0; j < kInFours; j += 4) four(j, v + j);
    }
#pragma unroll
    for (int j = 0; j < S::kGroups; ++j)
      if (j >= kInFours || !in_eights) one(j, v[j]);
  }
};

// Column group j is combined and written by block j / kShare of the Split: hands it this block's sum.
template <class S>
__device__ __forceinline__ void send_columns(const WideTile<S>& tile, float (&sums)[S::kGroups][4], uint32_t area,
                                             uint32_t arrived) {
#pragma unroll
  for (int j = 0; j < S::kGroups; ++j) {
    const uint32_t to = area + ((j % S::kShare * S::kSplit + tile.split) * S::kConsumerThreads + threadIdx.x) * 16;
    store_async(address_in_block(to, j / S::kShare), sums[j], address_in_block(arrived, j / S::kShare));
  }
}

template <class S>
__device__ __forceinline__ void combine_columns(const WideStore<S>& store, int split, uint32_t area) {
#pragma unroll
  for (int i = 0; i < S::kShare; ++i) {
    if (split * S::kShare + i >= S::kGroups) break;
    float v[S::kSplit][4];
#pragma unroll
    for (int s = 0; s < S::kSplit; ++s)
      as_floats(load_shared(area + ((i * S::kSplit + s) * S::kConsumerThreads + threadIdx.x) * 16), v[s]);
#pragma unroll
    for (int width = 1; width < S::kSplit; width *= 2)
#pragma unroll
      for (int s = 0; s < S::kSplit; s += 2 * width)
#pragma unroll
        for (int e = 0; e < 4; ++e) v[s][e] += v[s + width][e];
    store.one(split * S::kShare + i, v[0]);
  }
}

}  // namespace kdtree
