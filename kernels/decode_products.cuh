// The products of decode_layers: a warp multiplies the weights that come through its ring with at most 8 rows in shared memory,
// in the order of linear_tile.cuh, so that the bits are those of linear.
#pragma once
#include "decode_jobs.cuh"
#include "int4_values.cuh"

namespace kdtree {

// Sums of 16 outputs x 8 rows, as mma leaves them: element e of a lane is of output out(lane, e) and row row(lane, e).
struct Sums {
  float value[4] = {};

  static __device__ __forceinline__ int out(int lane, int e) { return lane / 4 + e / 2 * 8; }
  static __device__ __forceinline__ int row(int lane, int e) { return lane % 4 * 2 + e % 2; }
};

// ((0+1)+(2+3))+((4+5)+(6+7)).
__device__ __forceinline__ Sums add_on_tree(Sums (&v)[kNumSegments]) {
#pragma unroll
  for (int width = 1; width < kNumSegments; width *= 2)
#pragma unroll
    for (int s = 0; s < kNumSegments; s += 2 * width)
#pragma unroll
      for (int e = 0; e < 4; ++e) v[s].value[e] = __fadd_rn(v[s].value[e], v[s + width].value[e]);
  return v[0];
}

// Where a lane reads the row lane / 4 of x: its words of a unit lie 16 bytes apart. A row that does not exist is zero.
struct RowPlace {
  uint32_t at;  // shared address, or 0

  // rows: shared address of the first one.
  __device__ __forceinline__ RowPlace(uint32_t rows, int pitch, int num_rows, int lane)
      : at(lane / 4 < num_rows ? rows + lane / 4 * pitch + lane % 4 * 4 : 0u) {}
  __device__ __forceinline__ explicit RowPlace(uint32_t at) : at(at) {}

  __device__ __forceinline__ uint4 unit(int u) const {
    uint4 v = {0, 0, 0, 0};
    if (at == 0) return v;
    const uint32_t from = at + u * (kUnitInputs * 2);
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v.x) : "r"(from));
    asm volatile("ld.shared.u32 %0, [%1+16];" : "=r"(v.y) : "r"(from));
    asm volatile("ld.shared.u32 %0, [%1+32];" : "=r"(v.z) : "r"(from));
    asm volatile("ld.shared.u32 %0, [%1+48];" : "=r"(v.w) : "r"(from));
    return v;
  }
};

// One unit: 32 inputs.
__device__ __forceinline__ void add_floats(Sums& sums, uint32_t weights, const uint4& x, int lane) {
  const uint32_t at = weights + lane / 8 % 2 * 512 + lane / 16 * 128 + lane % 8 * 16;
  const uint4 first = load_matrices(at), second = load_matrices(at + 256);
  mma_bf16(sums.value, first, x.x, x.y);
  mma_bf16(sums.value, second, x.z, x.w);
}
__device__ __forceinline__ void add_int4(Sums& sums, uint32_t block, const uint4& x, int lane) {
  const Int4Fragments weights(block + lane * 8, lane);
  mma_bf16(sums.value, weights.get(0), x.x, x.y);
  mma_bf16(sums.value, weights.get(1), x.z, x.w);
}

// The same of neighbouring units, at most kMost: `num_units` of them.
template <int kMost>
__device__ __forceinline__ void add_floats(Sums& sums, uint32_t weights, const RowPlace& x, int first, int num_units, int lane) {
  if (num_units == kMost) {
#pragma unroll
    for (int i = 0; i < kMost; ++i) add_floats(sums, weights + i * kBf16UnitBytes, x.unit(first + i), lane);
  } else {
#pragma unroll 1
    for (int i = 0; i < num_units; ++i) add_floats(sums, weights + i * kBf16UnitBytes, x.unit(first + i), lane);
  }
}

using WeightRing = Ring<Pieces>;

}  // namespace kdtree
