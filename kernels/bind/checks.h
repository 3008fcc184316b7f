// Argument checks of the bindings. Each raises ValueError in Python: the operation, what was expected, what came. The
// texts are built only on failure: a decode step makes dozens of calls and the checks may cost nanoseconds.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <array>
#include <initializer_list>
#include <optional>
#include <string>
#include <type_traits>

#include "../int4_layout.h"
#include "../op_args.h"
#include "../segments.h"
#include "../status_text.h"

namespace kdtree::bind {

// Numbers as text, without a stream: a library into which the compiler links a libstdc++ of its own would look for the
// stream's locale in the wrong copy, and crash.
template <class T>
std::conditional_t<std::is_integral_v<T>, std::string, const T&> shown(const T& value) {
  if constexpr (std::is_integral_v<T>) return std::to_string(value);
  else return value;
}
inline std::string shown(const at::IntArrayRef& values) {
  std::string text = "[";
  for (const int64_t value : values) text += (text.size() > 1 ? ", " : "") + std::to_string(value);
  return text + "]";
}

template <class... Args>
std::string message(const Args&... args) {
  return c10::str(shown(args)...);
}

// Arrives in Python as ValueError. The message is put together only where the condition is false.
#define KDTREE_CHECK(condition, ...) TORCH_CHECK_VALUE(condition, kdtree::bind::message(__VA_ARGS__))

inline void expect_device(const char* op, const char* name, const at::Tensor& t, at::DeviceType want) {
  KDTREE_CHECK(t.defined(), op, ": ", name, ": expected a tensor, got None");
  KDTREE_CHECK(t.device().type() == want, op, ": ", name, ": expected a tensor on ", want, ", got one on ",
               t.device());
}

inline void expect_type(const char* op, const char* name, const at::Tensor& t, at::ScalarType want) {
  KDTREE_CHECK(t.scalar_type() == want, op, ": ", name, ": expected dtype ", want, ", got ", t.scalar_type());
}

// The two activation types; raises for any other.
inline Dtype float_type(const char* op, const char* name, const at::Tensor& t) {
  const auto type = t.scalar_type();
  KDTREE_CHECK(type == at::kFloat || type == at::kBFloat16, op, ": ", name,
               ": expected dtype Float or BFloat16, got ", type);
  return type == at::kFloat ? kF32 : kBF16;
}

inline at::ScalarType scalar_type(Dtype dtype) { return dtype == kF32 ? at::kFloat : at::kBFloat16; }

inline void expect_dim(const char* op, const char* name, const at::Tensor& t, int64_t want, const char* symbols) {
  KDTREE_CHECK(t.dim() == want, op, ": ", name, ": expected ", want, " dimensions ", symbols, ", got shape ",
               t.sizes());
}

// `want` holds the sizes; -1 accepts any. `symbols` is the shape as the schema's reader knows it, "[B, L, K]".
inline void expect_shape(const char* op, const char* name, const at::Tensor& t, std::initializer_list<int64_t> want,
                         const char* symbols) {
  const auto sizes = t.sizes();
  bool same = sizes.size() == want.size();
  size_t i = 0;
  for (const int64_t size : want) same = same && (size < 0 || sizes[i] == size), ++i;
  KDTREE_CHECK(same, op, ": ", name, ": expected shape ", symbols, " = ", at::IntArrayRef(want),
               " (-1: any), got ", sizes);
}

inline void expect_contiguous(const char* op, const char* name, const at::Tensor& t) {
  KDTREE_CHECK(t.is_contiguous(), op, ": ", name, ": expected a contiguous tensor, got strides ", t.strides(),
               " for shape ", t.sizes(), "; call .contiguous()");
}

// For inputs that may be views into wider rows: only the innermost dimension must be dense.
inline void expect_dense_rows(const char* op, const char* name, const at::Tensor& t) {
  KDTREE_CHECK(t.dim() > 0 && (t.size(-1) <= 1 || t.stride(-1) == 1 || t.numel() == 0), op, ": ", name,
               ": expected stride 1 in the last dimension, got strides ", t.strides(), " for shape ", t.sizes());
}

// A dense tensor of one type and shape, on any device.
inline void expect_dense(const char* op, const char* name, const at::Tensor& t, at::ScalarType type,
                         std::initializer_list<int64_t> want, const char* symbols) {
  expect_type(op, name, t, type);
  expect_shape(op, name, t, want, symbols);
  expect_contiguous(op, name, t);
}

// INT4 weights as pack_int4 leaves them.
constexpr const char* kInt4Symbols = "[G, ceil(N/64), K/32, 4, 288]";

inline std::array<int64_t, 5> packed_int4_sizes(int64_t num_groups, int64_t num_out, int64_t num_in) {
  return {num_groups, int4_num_columns(num_out), num_in / kInt4Unit, kInt4ColumnTiles, kInt4BlockBytes};
}

// Whether a weight is INT4, which is checked here; other weights are not.
inline bool is_int4(const char* op, const char* name, const at::Tensor& t, at::ScalarType type, int64_t num_groups,
                    int64_t num_out, int64_t num_in) {
  if (t.scalar_type() != at::kByte) return false;
  KDTREE_CHECK(type == at::kBFloat16, op, ": ", name, ": expected INT4 weights with BFloat16 rows alone, got ", type);
  KDTREE_CHECK(num_in % kInt4Unit == 0, op, ": ", name, ": expected a multiple of ", kInt4Unit, " inputs, got ", num_in);
  const auto want = packed_int4_sizes(num_groups, num_out, num_in);
  expect_dense(op, name, t, at::kByte, {want[0], want[1], want[2], want[3], want[4]}, kInt4Symbols);
  return true;
}

inline void expect_range(const char* op, const char* name, int64_t value, int64_t low, int64_t high) {
  KDTREE_CHECK(value >= low && value <= high, op, ": ", name, ": expected ", low, " … ", high, ", got ", value);
}

// After a kernel has returned kOutOfRange: raises for the first value of `t` outside low … high, if there is one.
template <class Int>
void expect_values(const char* op, const char* name, const at::Tensor& t, int64_t low, int64_t high) {
  const Int* values = t.const_data_ptr<Int>();
  for (int64_t i = 0; i < t.numel(); ++i)
    KDTREE_CHECK(values[i] >= low && values[i] <= high, op, ": ", name, ": expected ", low, " … ", high, ", got ",
                 values[i], " at index ", i);
}

// Groups of experts, of which moe_route chooses some; see groups_are_valid.
inline void expect_groups(const char* op, int64_t num_experts, int64_t top_k, int64_t num_groups, int64_t topk_groups) {
  expect_range(op, "num_groups", num_groups, 1, num_experts);
  if (num_groups == 1) return;
  KDTREE_CHECK(num_experts % num_groups == 0 && num_experts / num_groups >= 2, op,
               ": num_groups: expected whole groups of at least 2 of ", num_experts, " experts, got ", num_groups);
  expect_range(op, "topk_groups", topk_groups, 1, num_groups);
  expect_range(op, "top_k", top_k, 1, topk_groups * (num_experts / num_groups));
}

// A rank's share of a reduction, see SegmentShare; num_segments 0 is none, and then nothing may be said of it.
inline SegmentShare expect_share(const char* op, const char* name, int64_t length, int64_t whole, int64_t first,
                                 int64_t count) {
  expect_range(op, name, whole, 0, kMaxSize);
  expect_range(op, "first_segment", first, 0, kNumSegments - 1);
  expect_range(op, "num_segments", count, 0, kNumSegments);
  KDTREE_CHECK(count != 0 || (whole == 0 && first == 0), op, ": num_segments: expected those of the share that ", name, " = ",
               whole, " and first_segment = ", first, " are about, got 0");
  const SegmentShare share{whole, int(first), int(count)};
  KDTREE_CHECK(share.fits(length), op, ": ", name, ": expected segments ", first, " … ", first + count - 1, " of ", whole,
               " elements, a node of the tree, to have the length given, got ", length);
  return share;
}

// A factor: neither infinite nor NaN, also in FP32.
inline void expect_finite(const char* op, const char* name, double value) {
  KDTREE_CHECK(float(value) - float(value) == 0, op, ": ", name, ": expected a finite number, got ", value);
}

inline void expect_at_least(const char* op, const char* name, int64_t value, int64_t low) {
  KDTREE_CHECK(value >= low, op, ": ", name, ": expected at least ", low, ", got ", value);
}

// draft_topk and draft_topk_merge: the first row, of max_depth for each stream, whose logits the kernel refused.
[[noreturn]] inline void fail_non_finite(int64_t row, int64_t max_depth) {
  TORCH_CHECK_VALUE(false, message("draft_topk: logits of stream ", row / max_depth, ", depth ", row % max_depth + 1,
                                   ": ", status_text(kNonFinite)));
}

inline void expect_ok(const char* op, int status) {
  KDTREE_CHECK(status == kOk, op, ": ", status_text(status), " (status ", status, ")");
}

}  // namespace kdtree::bind
