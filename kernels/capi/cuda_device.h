// The CUDA runtime's part of device.h, compiled by nvcc where the library has CUDA kernels. All take a GPU's device.
#pragma once
#include "kdtree.h"

namespace kdtree::capi::cuda {

bool is_in_use();  // whether this process has used a GPU through this library
bool is_host_memory(const void* memory);
bool is_reachable(int32_t index, const void* memory);
kdtree_status fail_last(const char* op);

kdtree_status num_devices(int32_t* count);
kdtree_status check(const char* op, const kdtree_device& device);
kdtree_status info(const kdtree_device& device, kdtree_device_info* out);
int32_t exchange_current(int32_t index);  // makes a GPU current and returns the one before; -1 does nothing

kdtree_status allocate(const kdtree_device& device, int64_t num_bytes, void** out);
kdtree_status release(const kdtree_device& device, void* memory);
kdtree_status copy(const kdtree_device& device, void* to, const void* from, int64_t num_bytes);
kdtree_status synchronize(const kdtree_device& device);
kdtree_status create_stream(kdtree_device* device);
kdtree_status destroy_stream(kdtree_device* device);

}  // namespace kdtree::capi::cuda
