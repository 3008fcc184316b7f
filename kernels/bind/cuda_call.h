// One call of an operation on a GPU: checks against its device, tensors on it, its stream. A binding makes one first,
// so that what it allocates and launches is ordered on the caller's current stream of that device.
#pragma once
#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <algorithm>

#include "call.h"
#include "kernels.h"

namespace kdtree::bind {

constexpr int64_t kMaxAttnWorkspaceBytes = int64_t{1} << 28;  // more rows than fit are done in several launches

class CudaCall : public Call<CudaCall> {
 public:
  // The first tensor decides the device.
  CudaCall(const char* op, const char* name, const Tensor& first)
      : Call(op), guard_(device_of(op, name, first)), device_(first.device()),
        stream_(c10::cuda::getCurrentCUDAStream(first.device().index()).stream()) {}

  static constexpr bool kReadsValues = false;  // it would have to wait for them

  int32_t num_threads() const { return 0; }

  void on_device(const char* name, const Tensor& t) const {
    KDTREE_CHECK(t.device() == device_, op(), ": ", name, ": expected a tensor on ", device_, ", got one on ",
                 t.device());
  }

  // Blocks of 16 outputs by 32 inputs, see PackLinearArgs.
  static std::array<int64_t, 4> packed_sizes(int64_t num_groups, int64_t num_out, int64_t num_in) {
    return {num_groups, (num_out + 15) / 16, (num_in + 31) / 32, 512};
  }
  static const char* packed_symbols(const char*) { return "[G, ceil(N/16), ceil(K/32), 512]"; }

  Tensor empty(at::IntArrayRef sizes, at::ScalarType type) const {
    return Tensor(at::detail::empty_cuda(sizes, type, device_, std::nullopt));
  }

  Tensor empty_of_tree(at::IntArrayRef sizes, at::ScalarType type) const { return empty(sizes, type); }

  // Where tree_build says what it made of each stream, for nobody: a tree of 0 nodes tells it too.
  struct Statuses {
    Statuses(const CudaCall& call, int64_t num_streams) : values(call.empty({num_streams}, at::kInt)) {}
    int32_t* data() { return values.mutable_data_ptr<int32_t>(); }
    Tensor values;
  };

  // What a kernel works in, put into its args. It may be freed when the call returns: later work of the stream waits
  // for the kernels.
  Tensor workspace_of(MoeExpertsArgs& args) const { return workspace(args, moe_experts_cuda_workspace_bytes(args)); }
  Tensor workspace_of(DraftTopkArgs& args) const { return workspace(args, draft_topk_cuda_workspace_bytes(args)); }
  Tensor workspace_of(VerifyAttnArgs& args) const {
    VerifyAttnArgs one_row = args;
    one_row.num_rows = 1;
    args.workspace_bytes = std::min(verify_attn_cuda_workspace_bytes(args),
                                    std::max(kMaxAttnWorkspaceBytes, verify_attn_cuda_workspace_bytes(one_row)));
    return workspace(args, args.workspace_bytes);
  }

#define KDTREE_RUN(kernel, Args) \
  int run(const Args& args) const { return kernel##_cuda(args, stream_); }
  KDTREE_KERNELS(KDTREE_RUN)
#undef KDTREE_RUN

  int run_for_rows(const TreeRowsArgs& args, int64_t) const { return run(args); }

  // The rows of all streams, which size a result: the one number for which the host waits.
  int64_t total_nodes(const Tensor& num_nodes, int64_t num_slots) const {
    c10::SmallVector<int32_t, 16> counts(num_nodes.size(0));
    const size_t num_bytes = counts.size() * sizeof(int32_t);
    auto error = cudaMemcpyAsync(counts.data(), num_nodes.const_data_ptr(), num_bytes, cudaMemcpyDeviceToHost, stream_);
    if (error == cudaSuccess) error = cudaStreamSynchronize(stream_);
    TORCH_CHECK(error == cudaSuccess, op(), ": CUDA error: ", cudaGetErrorString(error));
    return total(counts.data(), num_nodes.size(0), num_slots);
  }

  // A launch that fails is a RuntimeError, sizes without a kernel are a ValueError.
  void check(int status) const {
    TORCH_CHECK(status != kCudaError, op(), ": CUDA error: ", cudaGetErrorString(cudaGetLastError()));
    expect_ok(op(), status);
  }

 private:
  static at::Device device_of(const char* op, const char* name, const Tensor& t) {
    expect_device(op, name, t, at::kCUDA);
    return t.device();
  }

  // Aligned to 256 bytes.
  template <class Args>
  Tensor workspace(Args& args, int64_t num_bytes) const {
    Tensor bytes = empty({num_bytes}, at::kByte);
    args.workspace = bytes.mutable_data_ptr();
    return bytes;
  }

  c10::cuda::CUDAGuard guard_;
  at::Device device_;
  cudaStream_t stream_;
};

}  // namespace kdtree::bind
