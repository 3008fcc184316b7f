// silu(gate) * up on CUDA, shared by swiglu and moe_experts: FP32 inside, one rounding.
#pragma once
#include "cuda_rows.cuh"

namespace kdtree {

__device__ __forceinline__ float swiglu_of(float gate, float up) {
  return __fmul_rn(__fdiv_rn(gate, __fadd_rn(1.0f, expf(-gate))), up);
}

// Elements i … i + kChunk - 1, as far as there are dim of them, of one row: gate_up has dim gates, then dim ups.
template <class Float>
__device__ __forceinline__ void swiglu_chunk(const Float* gate_up, Float* out, int64_t dim, int64_t i) {
  float gate[kChunk], up[kChunk];
  load_chunk(gate_up + i, dim - i, gate);
  load_chunk(gate_up + dim + i, dim - i, up);
#pragma unroll
  for (int k = 0; k < kChunk; ++k) up[k] = swiglu_of(gate[k], up[k]);
  store_chunk(out + i, dim - i, up);
}

}  // namespace kdtree
