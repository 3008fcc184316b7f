// What every CUDA kernel of the project shares: status, launches, element types, reductions in a fixed order, and
// asynchronous copies. Targets sm_90 and later; compiled with -fmad=false, so a fused multiply-add is always written out.
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "op_args.h"

namespace kdtree {

constexpr int kWarp = 32;
constexpr int kMaxSharedBytes = 99 * 1024;  // the most a block may have on sm_120

// --- host: launches ------------------------------------------------------------------------------------------------

inline int launch_status() { return cudaPeekAtLastError() == cudaSuccess ? kOk : kCudaError; }

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Calls f(float()) or f(__nv_bfloat16()) by dtype and returns its result.
template <class F>
int with_dtype(Dtype dtype, F&& f) {
  if (dtype == kF32) return f(float());
  if (dtype == kBF16) return f(__nv_bfloat16());
  return kUnsupported;
}

// When a kernel may start. No number and no truth value, so that it cannot land in a neighbouring field of LaunchShape.
enum class Start {
  kAfterPrevious,
  kEarly,  // before the previous kernel ends: the kernel must call wait_for_previous_kernel()
};

struct LaunchShape {
  dim3 grid, block;
  size_t shared_bytes = 0;
  int cluster = 1;
  Start start = Start::kAfterPrevious;
  size_t shared_limit = 0;  // the most shared memory that this kernel is ever launched with, if it varies
};

// A kernel may use more than 48 KB of shared memory only after its limit was raised, once for each device.
inline int raise_shared_limit(const void* kernel, size_t shared_bytes) {
  constexpr int kDevices = 64, kKernels = 256;
  static std::atomic<const void*> raised[kDevices][kKernels];
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return kCudaError;
  auto& known = raised[device % kDevices];
  int i = 0;
  for (; i < kKernels && known[i].load() != nullptr; ++i)
    if (known[i].load() == kernel) return kOk;
  cudaFuncAttributes attributes;
  if (cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess) return kCudaError;
  const size_t usual = kMaxSharedBytes - attributes.sharedSizeBytes;  // static and dynamic share the device's limit
  const int limit = static_cast<int>(shared_bytes > usual ? shared_bytes : usual);
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, limit) != cudaSuccess) return kCudaError;
  for (const void* empty = nullptr; i < kKernels && !known[i].compare_exchange_strong(empty, kernel); ++i) empty = nullptr;
  return kOk;
}

template <class... Params, class... Args>
int launch(void (*kernel)(Params...), const LaunchShape& shape, void* stream, Args... args) {
  if (shape.shared_bytes > 48 * 1024)
    if (int status = raise_shared_limit(reinterpret_cast<const void*>(kernel), std::max(shape.shared_bytes, shape.shared_limit)))
      return status;
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attribute[2];
  if (shape.cluster > 1) {
    attribute[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attribute[config.numAttrs].val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
    ++config.numAttrs;
  }
  if (shape.start == Start::kEarly) {
    attribute[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute[config.numAttrs].val.programmaticStreamSerializationAllowed = 1;
    ++config.numAttrs;
  }
  config.attrs = attribute;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...) == cudaSuccess ? kOk : kCudaError;
}

// --- device: programmatic dependent launch ---------------------------------------------------------------------------

// Blocks until the previous kernel of the stream has ended and its writes are visible; at once when launched normally.
__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next kernel start (if it was launched with kEarly) once every block has said so or ended.
__device__ __forceinline__ void allow_next_kernel() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Rows in use of the num_rows that begin at row `begin` of the step.
__device__ __forceinline__ int rows_in_use(const int32_t* num_rows_device, int64_t num_rows, int64_t begin = 0) {
  if (num_rows_device == nullptr) return static_cast<int>(num_rows);
  const int64_t used = static_cast<int64_t>(*num_rows_device) - begin;
  return static_cast<int>(used < 0 ? 0 : used < num_rows ? used : num_rows);
}

// --- device: elements ------------------------------------------------------------------------------------------------

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) { return x; }
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

// --- device: reductions over a warp, in one fixed order; every lane gets the result ----------------------------------

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

__device__ __forceinline__ float warp_max(float x) {  // NaN is ignored, as fmaxf does
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
  return x;
}

// --- device: asynchronous copies to shared memory ----------------------------------------------------------------------

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Copies 16 bytes; with num_bytes < 16 the rest is zero-filled. Both addresses aligned to 16. No L2 cache hint: with one,
// ptxas 13.0 split the shared address into two registers and the instruction died as illegal on sm_90.
__device__ __forceinline__ void cp_async16(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void cp_async16(uint32_t to, const void* from, int num_bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(num_bytes) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace kdtree
