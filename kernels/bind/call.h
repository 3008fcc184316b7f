// One call of an operation: what cpu_call.h and cuda_call.h share. A binding is a template over their classes, so that
// what it checks, allocates and passes on is written once; only what a device has of its own stands with its class.
#pragma once
#include <optional>
#include <tuple>

#include "checks.h"

namespace kdtree::bind {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// `Device` adds, among others, on_device(name, tensor), which raises for a tensor elsewhere, and kReadsValues: whether
// the host may look at what arrays hold.
template <class Device>
class Call {
 public:
  explicit Call(const char* op) : op_(op) {}

  const char* op() const { return op_; }

  // A dense tensor on the device: what most arguments must be.
  void expect(const char* name, const Tensor& t, at::ScalarType type, std::initializer_list<int64_t> want,
              const char* symbols) const {
    device().on_device(name, t);
    expect_dense(op_, name, t, type, want, symbols);
  }

  // For inputs that may be views into wider rows.
  void expect_rows(const char* name, const Tensor& t, int64_t num_dims, const char* symbols) const {
    device().on_device(name, t);
    expect_dim(op_, name, t, num_dims, symbols);
    expect_dense_rows(op_, name, t);
  }

  // Where the number of rows in use lies, i32 [1], or null where all are.
  const int32_t* rows_in_use(const OptionalTensor& num_rows) const {
    if (!num_rows) return nullptr;
    expect("num_rows", *num_rows, at::kInt, {1}, "[1]");
    return num_rows->const_data_ptr<int32_t>();
  }

  // Whether the kernel has looked at its arrays and refused them: the host may look, too, and say which value.
  static constexpr bool refused(int status, Status why) { return Device::kReadsValues && status == why; }

  // A packed weight of floats; `symbols` is its shape on a CPU.
  void expect_packed(const char* name, const Tensor& t, at::ScalarType type, int64_t num_groups, int64_t num_out,
                     int64_t num_in, const char* symbols) const {
    const auto want = Device::packed_sizes(num_groups, num_out, num_in);
    expect(name, t, type, {want[0], want[1], want[2], want[3]}, Device::packed_symbols(symbols));
  }

  // A weight of products, packed floats or INT4. Whether it is INT4.
  bool expect_weight(const char* name, const Tensor& t, at::ScalarType type, int64_t num_groups, int64_t num_out,
                     int64_t num_in, const char* symbols) const {
    device().on_device(name, t);
    if (is_int4(op_, name, t, type, num_groups, num_out, num_in)) return true;
    expect_packed(name, t, type, num_groups, num_out, num_in, symbols);
    return false;
  }

 protected:
  // The rows of all streams. Counts outside 0 … N raise here, before anything is sized by them.
  int64_t total(const int32_t* counts, int64_t num_streams, int64_t num_slots) const {
    int64_t total = 0;
    for (int64_t b = 0; b < num_streams; total += counts[b++]) expect_range(op_, "num_nodes", counts[b], 0, num_slots);
    return total;
  }

 private:
  const Device& device() const { return static_cast<const Device&>(*this); }

  const char* op_;
};

inline const void* data_or_null(const OptionalTensor& t) { return t ? t->const_data_ptr() : nullptr; }

}  // namespace kdtree::bind
