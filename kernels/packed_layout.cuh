// Where a value of a weight lies in its 16 x 32 block of the packed CUDA layout, see PackLinearArgs.
#pragma once
#include "cuda_common.cuh"

namespace kdtree {

template <class Float>
struct PackedLayout {
  static constexpr int kOutTile = 16, kUnit = 32, kWidth = 16 / sizeof(Float);
  static constexpr int kVectors = kOutTile * kUnit / kWidth;  // of 16 bytes, in a block

  // Output and input, within the block, of value e of vector v.
  static __device__ __forceinline__ int out(int v, int e) {
    return sizeof(Float) == 4 ? v % 4 * 4 + e : v / 32 * 8 + v % 8;
  }
  static __device__ __forceinline__ int in(int v, int e) {
    return sizeof(Float) == 4 ? v / 4 : v / 8 % 4 * 8 + e;
  }
};

}  // namespace kdtree
