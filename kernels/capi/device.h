// Devices behind the C ABI: what the checks and the operations need to know of them.
#pragma once
#include "kdtree.h"

namespace kdtree::capi {

// Whether `device` is one: its kind, and for a GPU that it is there and that the library has kernels for it.
kdtree_status check_device(const char* op, const kdtree_device* device);

// Whether kernels on the device may read and write there. Host memory is told from a GPU's only once a GPU was used.
bool can_reach(const kdtree_device& device, const void* memory);

// KDTREE_CUDA_ERROR with the text of the runtime's last error, which it takes back.
kdtree_status fail_cuda(const char* op);

// Makes a GPU current for the calls of this thread, and the one before again at the end.
class CurrentDevice {
 public:
  explicit CurrentDevice(const kdtree_device& device);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int32_t before_ = -1;
};

}  // namespace kdtree::capi
