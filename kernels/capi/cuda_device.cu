#include "cuda_device.h"

#include <cuda_runtime.h>

#include <atomic>
#include <cstdio>

#include "error.h"

namespace kdtree::capi::cuda {
namespace {

constexpr int kMaxDevices = 64;

std::atomic<bool> in_use{false};
std::atomic<bool> is_checked[kMaxDevices];

// Compiled for the same architectures as every kernel: a GPU that has it has all.
__global__ void probe() {}

cudaStream_t stream_of(const kdtree_device& device) { return static_cast<cudaStream_t>(device.stream); }

kdtree_status status_of(const char* op, cudaError_t error) {
  if (error == cudaSuccess) return KDTREE_OK;
  cudaGetLastError();  // takes it back, so that a later call does not report it
  const kdtree_status status = error == cudaErrorMemoryAllocation ? KDTREE_OUT_OF_MEMORY : KDTREE_CUDA_ERROR;
  return fail(status, "%s: CUDA error: %s", op, cudaGetErrorString(error));
}

// Whether the GPU that is current has machine code of this library.
cudaError_t find_kernels() {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, probe);
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}

bool is_missing_code(cudaError_t error) {
  return error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction;
}

cudaError_t arch_of(int32_t index, int* arch) {
  int major = 0, minor = 0;
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index);
  *arch = 10 * major + minor;
  return error;
}

}  // namespace

bool is_in_use() { return in_use; }

bool is_host_memory(const void* memory) {
  cudaPointerAttributes attributes;
  if (cudaPointerGetAttributes(&attributes, memory) != cudaSuccess) return cudaGetLastError(), true;
  return attributes.type != cudaMemoryTypeDevice;
}

bool is_reachable(int32_t index, const void* memory) {
  cudaPointerAttributes attributes;
  if (cudaPointerGetAttributes(&attributes, memory) != cudaSuccess) return cudaGetLastError(), false;
  if (attributes.type == cudaMemoryTypeDevice) return attributes.device == index;
  return attributes.type == cudaMemoryTypeManaged || attributes.devicePointer != nullptr;
}

kdtree_status fail_last(const char* op) {
  const cudaError_t error = cudaGetLastError();
  return fail(KDTREE_CUDA_ERROR, "%s: CUDA error: %s", op, cudaGetErrorString(error));
}

kdtree_status num_devices(int32_t* count) {
  int found = 0;
  const cudaError_t error = cudaGetDeviceCount(&found);
  if (error != cudaSuccess) cudaGetLastError();
  *count = found;
  if (error == cudaSuccess || error == cudaErrorNoDevice) return KDTREE_OK;
  if (error != cudaErrorInsufficientDriver) return status_of("num_devices", error);
  return fail(KDTREE_UNAVAILABLE, "num_devices: expected an NVIDIA driver for CUDA %d.%d or newer, got none or an "
              "older one; check nvidia-smi", CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
}

kdtree_status check(const char* op, const kdtree_device& device) {
  if (device.index >= 0 && device.index < kMaxDevices && is_checked[device.index]) return KDTREE_OK;
  int32_t count = 0;
  if (const kdtree_status status = num_devices(&count)) return status;
  if (count == 0)
    return fail(KDTREE_UNAVAILABLE, "%s: expected a GPU, got none; check nvidia-smi and CUDA_VISIBLE_DEVICES", op);
  if (device.index < 0 || device.index >= count || device.index >= kMaxDevices)
    return fail(KDTREE_INVALID_ARGUMENT, "%s: device: expected the index of a GPU, 0 to %d, got %d", op, count - 1,
                device.index);
  in_use = true;
  const int32_t before = exchange_current(device.index);
  const cudaError_t error = find_kernels();
  exchange_current(before);
  int arch = 0;
  if (const kdtree_status status = status_of(op, arch_of(device.index, &arch))) return status;
  if (is_missing_code(error))
    return fail(KDTREE_UNSUPPORTED, "%s: expected a GPU that the library has kernels for, got sm_%d; build it for that",
                op, arch);
  if (error != cudaSuccess) return status_of(op, error);
  is_checked[device.index] = true;
  return KDTREE_OK;
}

kdtree_status info(const kdtree_device& device, kdtree_device_info* out) {
  const char* op = "get_device_info";
  int32_t count = 0;
  if (const kdtree_status status = num_devices(&count)) return status;
  if (device.index < 0 || device.index >= count)
    return fail(KDTREE_INVALID_ARGUMENT, "%s: device: expected the index of a GPU below %d, got %d", op, count,
                device.index);
  in_use = true;
  cudaDeviceProp found;
  if (const kdtree_status status = status_of(op, cudaGetDeviceProperties(&found, device.index))) return status;
  const int32_t before = exchange_current(device.index);
  const cudaError_t error = find_kernels();
  exchange_current(before);
  if (error != cudaSuccess && !is_missing_code(error)) return status_of(op, error);
  std::snprintf(out->name, sizeof out->name, "%s", found.name);
  out->arch = 10 * found.major + found.minor;
  out->has_kernels = error == cudaSuccess;
  out->num_multiprocessors = found.multiProcessorCount;
  out->memory_bytes = static_cast<int64_t>(found.totalGlobalMem);
  return KDTREE_OK;
}

int32_t exchange_current(int32_t index) {
  int before = 0;
  if (index < 0 || cudaGetDevice(&before) != cudaSuccess) return -1;
  if (before != index && cudaSetDevice(index) != cudaSuccess) return -1;
  return before;
}

kdtree_status allocate(const kdtree_device&, int64_t num_bytes, void** out) {
  return status_of("malloc", cudaMalloc(out, static_cast<size_t>(num_bytes)));
}

kdtree_status release(const kdtree_device&, void* memory) { return status_of("free", cudaFree(memory)); }

kdtree_status copy(const kdtree_device& device, void* to, const void* from, int64_t num_bytes) {
  const auto size = static_cast<size_t>(num_bytes);
  return status_of("copy", cudaMemcpyAsync(to, from, size, cudaMemcpyDefault, stream_of(device)));
}

kdtree_status synchronize(const kdtree_device& device) {
  return status_of("synchronize", cudaStreamSynchronize(stream_of(device)));
}

kdtree_status create_stream(kdtree_device* device) {
  cudaStream_t stream = nullptr;
  const cudaError_t error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (error == cudaSuccess) device->stream = stream;
  return status_of("create_stream", error);
}

kdtree_status destroy_stream(kdtree_device* device) {
  if (device->stream == nullptr) return KDTREE_OK;
  const cudaError_t error = cudaStreamDestroy(stream_of(*device));
  device->stream = nullptr;
  return status_of("destroy_stream", error);
}

}  // namespace kdtree::capi::cuda
