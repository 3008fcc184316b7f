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

using WeightRing = Ring<Jobs>;

// Units begin … begin + num_units - 1 of a tile of BF16 weights, one segment or a part of it.
__device__ __forceinline__ void add_segment(WeightRing& ring, Sums& sums, const RowPlace& x, int begin, int num_units) {
  constexpr int kUnits = units_of_slot(Weights::kFloats);
#pragma unroll 1
  for (int u = 0; u < num_units; u += kUnits) {
    const uint32_t slot = ring.take();
#pragma unroll
    for (int i = 0; i < kUnits; ++i)
      if (u + i < num_units) add_floats(sums, slot + i * kBf16UnitBytes, x.unit(begin + u + i), ring.lane);
    ring.give_back();
  }
}

// The same of a tile of gates and the tile of its ups.
__device__ __forceinline__ void add_pair_segment(WeightRing& ring, Sums (&sums)[2], const RowPlace& x, int begin, int num_units) {
  constexpr int kUnits = units_of_slot(Weights::kPair);
#pragma unroll 1
  for (int u = 0; u < num_units; u += kUnits) {
    const uint32_t slot = ring.take();
#pragma unroll
    for (int i = 0; i < kUnits; ++i)
      if (u + i < num_units) {
        const uint4 row = x.unit(begin + u + i);
#pragma unroll
        for (int half = 0; half < 2; ++half) add_int4(sums[half], slot + (2 * i + half) * kInt4BlockBytes, row, ring.lane);
      }
    ring.give_back();
  }
}

// A whole tile: the sums of its segments, those that are empty +0.
template <Weights kind>
__device__ __forceinline__ void add_tile(WeightRing& ring, Sums (&sums)[kNumSegments], const RowPlace& x, int num_units) {
  constexpr int kUnits = units_of_slot(kind), kBytes = kind == Weights::kFloats ? kBf16UnitBytes : kInt4BlockBytes;
  uint32_t slot = 0;
#pragma unroll
  for (int s = 0; s < kNumSegments; ++s) {
    sums[s] = Sums();
    const DecodeSpan span = segment_units(num_units, s);
#pragma unroll 1
    for (int u = span.begin; u < span.end; ++u) {
      if (u % kUnits == 0) slot = ring.take();
      const uint32_t weights = slot + u % kUnits * kBytes;
      if constexpr (kind == Weights::kFloats) add_floats(sums[s], weights, x.unit(u), ring.lane);
      else add_int4(sums[s], weights, x.unit(u), ring.lane);
      if (u % kUnits == kUnits - 1 || u + 1 == num_units) ring.give_back();
    }
  }
}

}  // namespace kdtree
