// Hopper's own instructions (sm_90a): products of a warpgroup of 4 warps on tiles in shared memory and
// the copies of the tensor memory accelerator that bring such tiles.
//
// A tile is 64 rows of 64 BF16 values, 128 bytes a row, 8 KB, aligned to 1 KB; the 16-byte chunk c of row r lies at place
// c ^ (r & 7) of the row. Accumulators of 64 x N: thread t of the group holds rows t / 32 * 16 + t % 32 / 4 (and 8 more)
// and of each 8 columns the two from 2 * (t % 4): d[4 * block + 2 * (lower row) + column].
#pragma once
#include <cuda.h>

#include "cuda_async.cuh"

namespace kdtree {

constexpr int kWarpgroup = 128, kTileRows = 64, kTileColumns = 64, kTileBytes = kTileRows * kTileColumns * 2;

// Describes a tile to a product. Groups of 8 rows lie 1 KB apart; where the rows are the reduction (transposed),
// `next_tile_bytes` leads to the next 64 columns.
__device__ __forceinline__ uint64_t tile_descriptor(uint32_t address, int next_tile_bytes = 16) {
  return uint64_t{1} << 62 | uint64_t{1024 / 16} << 32 | uint64_t(next_tile_bytes / 16) << 16 | uint64_t(address / 16);
}

__device__ __forceinline__ uint32_t chunk_offset(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) * 16); }

// Before the first product after registers of its operands were written; behind the last one; until all are done.
__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// The compiler must not move what uses these registers to the other side.
template <int N>
__device__ __forceinline__ void pin(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

#define KDTREE_D8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
                     "+f"(d[i + 6]), "+f"(d[i + 7])
#define KDTREE_D32(i) KDTREE_D8(i), KDTREE_D8(i + 8), KDTREE_D8(i + 16), KDTREE_D8(i + 24)

// d = A B^T (+ d unless `first`) over 16 columns of two tiles.
__device__ __forceinline__ void wgmma_64x64(float (&d)[32], uint64_t a, uint64_t b, bool first) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.eq.s32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, "
      "%14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%32, %33, p, 1, 1, 0, 0;\n}"
      : KDTREE_D32(0)
      : "l"(a), "l"(b), "r"(int(first)));
}

// The same with A in registers: rows as in the accumulators, of each 8 columns the two from 2 * (t % 4).
__device__ __forceinline__ void wgmma_64x64(float (&d)[32], const uint32_t (&a)[4], uint64_t b, bool first) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.eq.s32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, "
      "%14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"
      : KDTREE_D32(0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(first)));
}

// d = A B (+ d unless `first`) over 16 rows of B: A [64, 16] in a tile, B [16, 256] in 4 tiles.
__device__ __forceinline__ void wgmma_64x256(float (&d)[128], uint64_t a, uint64_t b, bool first) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.eq.s32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
      "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, "
      "%35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, "
      "%57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, "
      "%79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, "
      "%101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, "
      "%119, %120, %121, %122, %123, %124, %125, %126, %127}, %128, %129, p, 1, 1, 0, 1;\n}"
      : KDTREE_D32(0), KDTREE_D32(32), KDTREE_D32(64), KDTREE_D32(96)
      : "l"(a), "l"(b), "r"(int(first)));
}

#undef KDTREE_D32
#undef KDTREE_D8

// Ordinary stores to shared memory before it are seen by products and copies issued after it.
__device__ __forceinline__ void fence_for_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// One thread: tiles beside each other, as many as the map says, from this row and this tile of columns on; rows past the
// end of the matrix become zeros.
__device__ __forceinline__ void copy_tiles(uint32_t to, const CUtensorMap& map, int row, int tile, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(
          to),
      "l"(&map), "r"(0), "r"(row), "r"(tile), "r"(barrier)
      : "memory");
}

// --- host ----------------------------------------------------------------------------------------------------------

// Maps a dense BF16 matrix [num_rows, num_columns] for copies of `num_tiles` tiles that lie beside each other.
inline int map_tiles(CUtensorMap& map, const void* matrix, int64_t num_rows, int64_t num_columns, int num_tiles) {
  static std::atomic<void*> entry{nullptr};
  if (entry.load() == nullptr) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result) != cudaSuccess)
      return kCudaError;
    if (result != cudaDriverEntryPointSuccess) return kUnsupported;
    entry.store(found);
  }
  const auto encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry.load());
  const cuuint64_t sizes[3] = {kTileColumns, cuuint64_t(num_rows), cuuint64_t(num_columns / kTileColumns)};
  const cuuint64_t pitch[2] = {cuuint64_t(num_columns) * 2, kTileColumns * 2};
  const cuuint32_t box[3] = {kTileColumns, kTileRows, cuuint32_t(num_tiles)}, step[3] = {1, 1, 1};
  const CUresult result =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(matrix), sizes, pitch, box, step,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? kOk : kUnsupported;
}

}  // namespace kdtree
