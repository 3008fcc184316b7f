// Checks of the arguments at the border of the C ABI. The first that fails decides the message; later ones do nothing.
#pragma once
#include <cinttypes>
#include <cstdint>
#include <initializer_list>

#include "../int4_layout.h"
#include "../status_text.h"
#include "device.h"
#include "error.h"

namespace kdtree::capi {

constexpr int64_t kMaxIndex = INT32_MAX;  // of what kernels count in 32 bits

inline int64_t element_bytes(Dtype dtype) { return dtype == kF32 ? 4 : 2; }

class Checks {
 public:
  Checks(const char* op, const kdtree_device& device) : op_(op), device_(device) {}

  kdtree_status status() const { return status_; }
  bool on_cpu() const { return device_.kind == KDTREE_CPU; }

  void range(const char* name, int64_t value, int64_t low, int64_t high) {
    if (status_ == KDTREE_OK && (value < low || value > high))
      status_ = fail(KDTREE_INVALID_ARGUMENT, "%s: %s: expected %" PRId64 " to %" PRId64 ", got %" PRId64, op_, name,
                     low, high, value);
  }

  struct Size {
    const char* name;
    int64_t value;
  };
  void sizes(std::initializer_list<Size> all) {
    for (const Size& size : all) range(size.name, size.value, 0, kMaxSize);
  }

  void dtype(const char* name, int32_t value) { range(name, value, kF32, kBF16); }

  void num_threads(int32_t value) { range("num_threads", value, 0, 4096); }

  void expect(bool condition, const char* what) {
    if (status_ == KDTREE_OK && !condition) status_ = fail(KDTREE_INVALID_ARGUMENT, "%s: %s", op_, what);
  }

  // An array of num_bytes each: not null unless it is empty, aligned to its elements, in the device's memory.
  void bytes(const char* name, const void* array, std::initializer_list<int64_t> shape, int64_t each,
             const char* symbols) {
    int64_t num_bytes = each;
    bool fits = true;
    for (const int64_t size : shape) {
      fits = fits && (size == 0 || num_bytes <= INT64_MAX / size);
      num_bytes = fits ? num_bytes * size : 0;
    }
    if (status_ != KDTREE_OK) return;
    if (!fits)
      status_ = fail(KDTREE_INVALID_ARGUMENT, "%s: %s: expected fewer than 2^63 bytes for %s, got more", op_, name,
                     symbols);
    else if (num_bytes > 0)
      address(name, array, each, symbols);
  }

  template <class T>
  void array(const char* name, const T* array, std::initializer_list<int64_t> shape, const char* symbols) {
    bytes(name, array, shape, sizeof(T), symbols);
  }

  void floats(const char* name, const void* array, Dtype dtype, std::initializer_list<int64_t> shape,
              const char* symbols) {
    bytes(name, array, shape, element_bytes(dtype), symbols);
  }

  // A weight as pack_linear leaves it.
  void packed(const char* name, const void* array, Dtype dtype, int64_t num_groups, int64_t num_out, int64_t num_in) {
    if (on_cpu()) floats(name, array, dtype, {num_groups, (num_out + 15) / 16, num_in, 16}, "[G, ceil(N/16), K, 16]");
    else floats(name, array, dtype, {num_groups, (num_out + 15) / 16, (num_in + 31) / 32, 512},
                "[G, ceil(N/16), ceil(K/32), 512]");
  }

  // A weight as pack_int4 leaves it.
  void packed_int4(const char* name, const void* array, int64_t num_groups, int64_t num_out, int64_t num_in) {
    const int64_t num_blocks = int4_num_columns(num_out) * kInt4ColumnTiles;
    const int64_t num_units = (num_in + kInt4Unit - 1) / kInt4Unit;
    bytes(name, array, {num_groups, num_blocks, num_units, kInt4BlockBytes / 16}, 16, "[G, ceil(N/64), K/32, 4, 288]");
  }

  // Either, as a product takes it.
  void weight(const char* name, const void* array, bool int4, Dtype dtype, int64_t num_groups, int64_t num_out,
              int64_t num_in) {
    if (!int4) return packed(name, array, dtype, num_groups, num_out, num_in);
    expect(dtype == kBF16, "dtype: expected BF16 with INT4 weights, got F32");
    expect(num_in % kInt4Unit == 0, "int4: expected a multiple of 32 inputs, got another number");
    packed_int4(name, array, num_groups, num_out, num_in);
  }

  // A pointer that may be null.
  void optional(const char* name, const void* array, int64_t each, const char* symbols) {
    if (array != nullptr) address(name, array, each, symbols);
  }

  // Rows or groups that begin `stride` elements apart: one may not reach into the next.
  void stride(const char* name, int64_t value, int64_t count, int64_t width) {
    range(name, value, count > 1 ? width : 0, kMaxSize);
  }

  // How many rows are in use stands in the memory of the device.
  void num_rows_device(const int32_t* count) { optional("num_rows_device", count, sizeof *count, "[1]"); }

  void workspace(const void* memory, int64_t num_bytes) {
    if (num_bytes > 0) address("workspace", memory, 256, "as many bytes as the function of workspace_bytes says");
  }

  // On a CPU, after a kernel has found a value outside its range: says which.
  template <class Int>
  void values(const char* name, const Int* array, int64_t count, int64_t low, int64_t high) {
    for (int64_t i = 0; status_ == KDTREE_OK && i < count; ++i)
      if (array[i] < low || array[i] > high)
        status_ = fail(KDTREE_OUT_OF_RANGE,
                       "%s: %s: expected %" PRId64 " to %" PRId64 ", got %" PRId64 " at index %" PRId64, op_, name, low,
                       high, static_cast<int64_t>(array[i]), i);
  }

  void out_of_range(const char* what) {
    if (status_ == KDTREE_OK) status_ = fail(KDTREE_OUT_OF_RANGE, "%s: %s", op_, what);
  }

  // What a kernel returned, where nothing has said more.
  void kernel_status(int status) {
    if (status == kOk || status_ != KDTREE_OK) return;
    status_ = status == kCudaError ? fail_cuda(op_) : fail(status, "%s: %s", op_, status_text(status));
  }

 private:
  void address(const char* name, const void* array, int64_t alignment, const char* symbols) {
    if (status_ != KDTREE_OK) return;
    if (array == nullptr)
      status_ = fail(KDTREE_INVALID_ARGUMENT, "%s: %s: expected the address of %s, got NULL", op_, name, symbols);
    else if (reinterpret_cast<uintptr_t>(array) % static_cast<uintptr_t>(alignment) != 0)
      status_ = fail(KDTREE_INVALID_ARGUMENT, "%s: %s: expected an address aligned to %" PRId64 " bytes, got %p", op_,
                     name, alignment, array);
    else if (!can_reach(device_, array))
      status_ = fail(KDTREE_INVALID_ARGUMENT, "%s: %s: expected memory of %s, got %p, which is none", op_, name,
                     on_cpu() ? "the host" : "the GPU", array);
  }

  const char* op_;
  const kdtree_device& device_;
  kdtree_status status_ = KDTREE_OK;
};

}  // namespace kdtree::capi
