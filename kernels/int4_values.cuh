// INT4 values as the tensor cores want them: BF16, the bits that dequantize_int4 writes.
#pragma once
#include "cuda_async.cuh"
#include "int4_layout.h"

namespace kdtree {

// Two values + 8, in bits 0-3 and 16-19, times two equal scales. 128 + value + 8 is the BF16 whose lowest bits they are; the
// difference is exact and the product is rounded once.
__device__ __forceinline__ uint32_t int4_pair(uint32_t word, uint32_t scale) {
  constexpr uint32_t k128 = 0x43004300, k136 = 0x43084308;
  uint32_t v;
  asm("lop3.b32 %0, %1, 0x000f000f, %2, 0xea;" : "=r"(v) : "r"(word), "n"(k128));
  asm("sub.rn.bf16x2 %0, %0, %1;" : "+r"(v) : "r"(k136));
  asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(v) : "r"(scale));
  return v;
}

// What a lane holds of a block of 16 outputs x 32 inputs: the A matrices of the products of inputs 0-15 and 16-31.
struct Int4Fragments {
  uint32_t word[2], scale[2];  // scale: of the lane's outputs lane / 4 and lane / 4 + 8, twice

  // at: the lane's words in shared memory.
  __device__ __forceinline__ Int4Fragments(uint32_t at, int lane) {
    uint32_t scales;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(word[0]), "=r"(word[1]) : "r"(at));
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(scales) : "r"(at - lane * 8 + lane / 4 * 4 + kInt4ValueWords * 4));
    scale[0] = __byte_perm(scales, 0, 0x1010);
    scale[1] = __byte_perm(scales, 0, 0x3232);
  }

  __device__ __forceinline__ uint4 get(int half) const {
    const uint32_t w = word[half];
    return {int4_pair(w, scale[0]), int4_pair(w >> 4, scale[1]), int4_pair(w >> 8, scale[0]), int4_pair(w >> 12, scale[1])};
  }
};

}  // namespace kdtree
