// Device memory for ctypes, without torch: what a sanitizer sees is the kernels alone. Used by sanitize_case.py.
#include <cuda_runtime.h>

#include <cstddef>

extern "C" {
int kd_alloc(void** p, size_t num_bytes) { return cudaMalloc(p, num_bytes); }
int kd_put(void* to, const void* from, size_t num_bytes) { return cudaMemcpy(to, from, num_bytes, cudaMemcpyHostToDevice); }
int kd_get(void* to, const void* from, size_t num_bytes) { return cudaMemcpy(to, from, num_bytes, cudaMemcpyDeviceToHost); }
int kd_free(void* p) { return cudaFree(p); }
int kd_wait() { return cudaDeviceSynchronize(); }
const char* kd_error() { return cudaGetErrorString(cudaGetLastError()); }
// Device name (at most 256 bytes), and driver and runtime version: 13000 is 13.0.
int kd_device(char* name, int* versions) {
  cudaDeviceProp properties;
  if (int error = cudaGetDeviceProperties(&properties, 0)) return error;
  for (int i = 0; i < 256; ++i) name[i] = properties.name[i];
  if (int error = cudaDriverGetVersion(versions)) return error;
  return cudaRuntimeGetVersion(versions + 1);
}
}
