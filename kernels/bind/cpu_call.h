// One call of an operation on a CPU, whose kernel a capture in progress records.
#pragma once
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>

#include <cstdlib>

#include "call.h"
#include "capture.h"
#include "kernels.h"

namespace kdtree::bind {

// Plain malloc. Torch's allocator asks for 64-byte alignment, for which glibc bypasses its per-thread cache: the six
// arrays of a small tree then take longer to get than to fill.
class MallocAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override {
    void* data = num_bytes ? std::malloc(num_bytes) : nullptr;
    TORCH_CHECK(data || !num_bytes, message("tree_build: could not allocate ", num_bytes, " bytes"));
    return {data, data, &std::free, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* target, const void* source, std::size_t num_bytes) const override {
    default_copy_data(target, source, num_bytes);
  }
};

class CpuCall : public Call<CpuCall> {
 public:
  CpuCall(const char* op, const char* name, const Tensor& first) : Call(op) { on_device(name, first); }

  static constexpr bool kReadsValues = true;

  int32_t num_threads() const { return at::get_num_threads(); }

  void on_device(const char* name, const Tensor& t) const { expect_device(op(), name, t, at::kCPU); }

  // Blocks of 16 outputs by all inputs, see PackLinearArgs.
  static std::array<int64_t, 4> packed_sizes(int64_t num_groups, int64_t num_out, int64_t num_in) {
    return {num_groups, (num_out + 15) / 16, num_in, 16};
  }
  static const char* packed_symbols(const char* symbols) { return symbols; }

  // A new dense tensor; cheaper than at::empty, which passes the dispatcher again. A capture in progress keeps it.
  Tensor empty(at::IntArrayRef sizes, at::ScalarType type) const {
    try {
      Tensor tensor(at::detail::empty_cpu(sizes, type, /*pin_memory=*/false, /*memory_format=*/std::nullopt));
      if (recording) recording->tensors.push_back(tensor);
      return tensor;
    } catch (const c10::Error& error) {
      TORCH_CHECK(false, message(op(), ": expected memory for a result of shape ", sizes, ", got: ", error.msg()));
    }
  }

  // An array of tree_build: no capture keeps them.
  Tensor empty_of_tree(at::IntArrayRef sizes, at::ScalarType type) const {
    KDTREE_CHECK(!recording, op(), ": expected no capture in progress, got one; build trees outside of it");
    static MallocAllocator allocator;
    return at::detail::empty_generic(sizes, &allocator, c10::DispatchKeySet(c10::DispatchKey::CPU), type, std::nullopt);
  }

  // Where tree_build says what it made of each stream.
  struct Statuses {
    Statuses(const CpuCall&, int64_t num_streams) : values(num_streams) {}
    int32_t* data() { return values.data(); }
    c10::SmallVector<int32_t, 16> values;
  };

  // The kernels need none.
  template <class Args>
  Tensor workspace_of(Args&) const {
    return {};
  }

#define KDTREE_RUN(kernel, Args) \
  int run(const Args& args) const { return run_recorded(kernel##_cpu, args); }
  KDTREE_KERNELS(KDTREE_RUN)
#undef KDTREE_RUN

  // tree_rows, whose arrays have room for num_rows: a replay refuses to fill them with another number.
  int run_for_rows(const TreeRowsArgs& args, int64_t num_rows) const {
    const auto again = [args, num_rows] {
      int64_t total = 0;
      for (int64_t b = 0; b < args.num_streams; total += args.num_nodes[b++])
        if (args.num_nodes[b] < 0 || args.num_nodes[b] > args.num_tree_slots) return int{kOutOfRange};
      return total == num_rows ? tree_rows_cpu(args) : int{kOutOfRange};
    };
    if (recording) recording->calls.emplace_back(again);
    return tree_rows_cpu(args);
  }

  int64_t total_nodes(const Tensor& num_nodes, int64_t num_slots) const {
    return total(num_nodes.const_data_ptr<int32_t>(), num_nodes.size(0), num_slots);
  }

  void check(int status) const { expect_ok(op(), status); }
};

}  // namespace kdtree::bind
