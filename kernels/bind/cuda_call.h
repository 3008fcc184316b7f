// One call of an operation on a GPU: checks against its device, tensors on it, its stream. A binding makes one first, so
// that what it allocates and launches is ordered on the caller's current stream of that device.
#pragma once
#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <optional>

#include "checks.h"

namespace kdtree::bind {

class CudaCall {
 public:
  // The first tensor decides the device.
  CudaCall(const char* op, const char* name, const at::Tensor& first)
      : op_(op), guard_(device_of(op, name, first)), device_(first.device()),
        stream_(c10::cuda::getCurrentCUDAStream(first.device().index()).stream()) {}

  void* stream() const { return stream_; }

  void on_device(const char* name, const at::Tensor& t) const {
    KDTREE_CHECK(t.device() == device_, op_, ": ", name, ": expected a tensor on ", device_, ", got one on ",
                 t.device());
  }

  // A dense tensor on the device: what most arguments must be.
  void expect(const char* name, const at::Tensor& t, at::ScalarType type, std::initializer_list<int64_t> want,
              const char* symbols) const {
    on_device(name, t);
    expect_dense(op_, name, t, type, want, symbols);
  }

  // For inputs that may be views into wider rows.
  void expect_rows(const char* name, const at::Tensor& t, int64_t num_dims, const char* symbols) const {
    on_device(name, t);
    expect_dim(op_, name, t, num_dims, symbols);
    expect_dense_rows(op_, name, t);
  }

  // Where the number of rows in use lies, i32 [1], or null where all are.
  const int32_t* rows_in_use(const std::optional<at::Tensor>& num_rows) const {
    if (!num_rows) return nullptr;
    expect("num_rows", *num_rows, at::kInt, {1}, "[1]");
    return num_rows->const_data_ptr<int32_t>();
  }

  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType type) const {
    return at::Tensor(at::detail::empty_cuda(sizes, type, device_, std::nullopt));
  }

  // Bytes aligned to 256. They may be freed when the call returns: later work of the stream waits for the kernels.
  at::Tensor workspace(int64_t num_bytes) const { return empty({num_bytes}, at::kByte); }

  // A launch that fails is a RuntimeError, sizes without a kernel are a ValueError.
  void check(int status) const {
    TORCH_CHECK(status != kCudaError, op_, ": CUDA error: ", cudaGetErrorString(cudaGetLastError()));
    expect_ok(op_, status);
  }

 private:
  static at::Device device_of(const char* op, const char* name, const at::Tensor& t) {
    expect_device(op, name, t, at::kCUDA);
    return t.device();
  }

  const char* op_;
  c10::cuda::CUDAGuard guard_;
  at::Device device_;
  cudaStream_t stream_;
};

}  // namespace kdtree::bind
