// What linear needs of Hopper (sm_90a), one function each: warpgroup products of shared-memory matrices, registers moved
// between warpgroups, copies by a tensor map. The products and moves exist nowhere else.
#pragma once
#include <cuda.h>

#include "cuda_async.cuh"

namespace kdtree {

// --- products --------------------------------------------------------------------------------------------------------

// A matrix in shared memory, 16 columns (K) of it: rows in groups of 8, `group_bytes` apart. Swizzled: rows of 128 bytes whose
// 16-byte chunk c lies at c ^ row % 8, the group aligned to 1024 bytes. Else: 8 x 8 matrices, neighbours along K 128 bytes apart.
// Rows of 64 bytes: chunk c lies at c ^ row / 2 % 4, as row_chunk puts it, the group aligned to 512 bytes.
__device__ __forceinline__ uint64_t matrix(uint32_t address, int group_bytes, bool swizzled) {
  return (address & 0x3ffff) >> 4 | uint64_t(swizzled ? 1 : 128 >> 4) << 16 | uint64_t(group_bytes >> 4) << 32 |
         uint64_t(swizzled) << 62;
}

__device__ __forceinline__ uint64_t matrix_of_short_rows(uint32_t address, int group_bytes) {
  return (address & 0x3ffff) >> 4 | uint64_t(1) << 16 | uint64_t(group_bytes >> 4) << 32 | uint64_t(2) << 62;
}

__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory"); }

// d += A B^T: A 64 x 16, B 8 kGroups x 16, BF16. Element d[j][e] of thread t of the warpgroup is row 16 (t / 32) + t % 32 / 4 +
// 8 (e / 2), column 8 j + 2 (t % 4) + e % 2.
template <int kGroups>
__device__ __forceinline__ void wgmma(float (&d)[kGroups][4], uint64_t a, uint64_t b);

#define KDTREE_D1 "%0,%1,%2,%3"
#define KDTREE_D2 KDTREE_D1 ",%4,%5,%6,%7"
#define KDTREE_D3 KDTREE_D2 ",%8,%9,%10,%11"
#define KDTREE_D4 KDTREE_D3 ",%12,%13,%14,%15"
#define KDTREE_D5 KDTREE_D4 ",%16,%17,%18,%19"
#define KDTREE_D6 KDTREE_D5 ",%20,%21,%22,%23"
#define KDTREE_D7 KDTREE_D6 ",%24,%25,%26,%27"
#define KDTREE_D8 KDTREE_D7 ",%28,%29,%30,%31"
#define KDTREE_D9 KDTREE_D8 ",%32,%33,%34,%35"
#define KDTREE_D10 KDTREE_D9 ",%36,%37,%38,%39"
#define KDTREE_D11 KDTREE_D10 ",%40,%41,%42,%43"
#define KDTREE_D12 KDTREE_D11 ",%44,%45,%46,%47"
#define KDTREE_D13 KDTREE_D12 ",%48,%49,%50,%51"
#define KDTREE_D14 KDTREE_D13 ",%52,%53,%54,%55"
#define KDTREE_D15 KDTREE_D14 ",%56,%57,%58,%59"
#define KDTREE_D16 KDTREE_D15 ",%60,%61,%62,%63"
#define KDTREE_R(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define KDTREE_R1 KDTREE_R(0)
#define KDTREE_R2 KDTREE_R1, KDTREE_R(1)
#define KDTREE_R3 KDTREE_R2, KDTREE_R(2)
#define KDTREE_R4 KDTREE_R3, KDTREE_R(3)
#define KDTREE_R5 KDTREE_R4, KDTREE_R(4)
#define KDTREE_R6 KDTREE_R5, KDTREE_R(5)
#define KDTREE_R7 KDTREE_R6, KDTREE_R(6)
#define KDTREE_R8 KDTREE_R7, KDTREE_R(7)
#define KDTREE_R9 KDTREE_R8, KDTREE_R(8)
#define KDTREE_R10 KDTREE_R9, KDTREE_R(9)
#define KDTREE_R11 KDTREE_R10, KDTREE_R(10)
#define KDTREE_R12 KDTREE_R11, KDTREE_R(11)
#define KDTREE_R13 KDTREE_R12, KDTREE_R(12)
#define KDTREE_R14 KDTREE_R13, KDTREE_R(13)
#define KDTREE_R15 KDTREE_R14, KDTREE_R(14)
#define KDTREE_R16 KDTREE_R15, KDTREE_R(15)
#define KDTREE_WGMMA(groups, n, a_index, b_index)                                                                    \
  template <>                                                                                                        \
  __device__ __forceinline__ void wgmma<groups>(float (&d)[groups][4], uint64_t a, uint64_t b) {                     \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" KDTREE_D##groups "}, %" #a_index ", %" \
                 #b_index ", 1, 1, 1, 0, 0;"                                                                         \
                 : KDTREE_R##groups                                                                                  \
                 : "l"(a), "l"(b));                                                                                  \
  }
KDTREE_WGMMA(7, 56, 28, 29)
KDTREE_WGMMA(8, 64, 32, 33)
KDTREE_WGMMA(9, 72, 36, 37)
KDTREE_WGMMA(10, 80, 40, 41)
KDTREE_WGMMA(16, 128, 64, 65)
#undef KDTREE_WGMMA

// The same with A in registers: of each warp its 16 rows, as mma_bf16 wants them.
template <int kGroups>
__device__ __forceinline__ void wgmma(float (&d)[kGroups][4], uint4 a, uint64_t b);
#define KDTREE_WGMMA(groups, n, a0, a1, a2, a3, b_index)                                                             \
  template <>                                                                                                        \
  __device__ __forceinline__ void wgmma<groups>(float (&d)[groups][4], uint4 a, uint64_t b) {                        \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" KDTREE_D##groups "}, {%" #a0 ", %" #a1 \
                 ", %" #a2 ", %" #a3 "}, %" #b_index ", 1, 1, 1, 0;"                                                 \
                 : KDTREE_R##groups                                                                                  \
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b));                                                  \
  }
KDTREE_WGMMA(2, 16, 8, 9, 10, 11, 12)
KDTREE_WGMMA(4, 32, 16, 17, 18, 19, 20)
KDTREE_WGMMA(8, 64, 32, 33, 34, 35, 36)
KDTREE_WGMMA(16, 128, 64, 65, 66, 67, 68)
#undef KDTREE_WGMMA
#undef KDTREE_R

// The sums of a product lie in registers that the compiler must not read before the wait, nor fill after the begin.
template <int kGroups>
__device__ __forceinline__ void pin(float (&d)[kGroups][4]) {
#pragma unroll
  for (int j = 0; j < kGroups; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(d[j][e]));
}

// --- registers: all four warps of a warpgroup call it --------------------------------------------------------------------

template <int kRegisters>
__device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters)); }
template <int kRegisters>
__device__ __forceinline__ void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters)); }

// --- copies by a map: the box at the given place, to `to` -----------------------------------------------------------------

struct Place {
  int at[4];
};
__device__ __forceinline__ void map_copy(uint32_t to, const CUtensorMap& map, Place p, uint32_t barrier) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to), "l"(&map), "r"(p.at[0]), "r"(p.at[1]), "r"(p.at[2]), "r"(p.at[3]), "r"(barrier) : "memory");
}
__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// A map of a four-dimensional array: sizes, innermost first, byte strides of all but the innermost, the size of a box. What a
// box has outside the array is filled with zeros.
struct MapArgs {
  CUtensorMapDataType type;
  const void* data;
  cuuint64_t size[4], stride[3];
  cuuint32_t box[4];
  bool swizzled;
};

inline int make_map(const MapArgs& a, CUtensorMap* map) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    return reinterpret_cast<Encode>(function);
  }();
  if (encode == nullptr) return kCudaError;
  const cuuint32_t step[4] = {1, 1, 1, 1};
  const CUresult result = encode(map, a.type, 4, const_cast<void*>(a.data), a.size, a.stride, a.box, step,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, a.swizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? kOk : kCudaError;
}

}  // namespace kdtree
