// C names for ctypes: linear, its tile shapes, the packing of weights, rms_norm and moe_experts. Used by run_linear.py and run_int4.py.
#include "linear.cuh"

using namespace kdtree;

namespace {
const char* describe(const LinearShape& shape, int* out) {
  out[0] = shape.num_rows, out[1] = shape.num_out, out[2] = shape.cluster;
  return shape.name;
}
const LinearShape& shape_of(const LinearArgs& a, int index) {
  return a.int4 ? int4_shape(index) : linear_shape(a.dtype, index);
}
}  // namespace

extern "C" {
int kd_pack(const PackLinearArgs* a, void* stream) { return pack_linear_cuda(*a, stream); }
int kd_rms_norm(const RmsNormArgs* a, void* stream) { return rms_norm_cuda(*a, stream); }
int kd_pack_int4(const PackInt4Args* a, void* stream) { return pack_int4_cuda(*a, stream); }
int kd_linear(const LinearArgs* a, int shape, void* stream) {
  return shape < 0 ? linear_cuda(*a, stream) : linear_cuda_with(*a, shape, stream);
}
// The shape that linear_cuda takes, plus 256 if it reads weights early; -1 without a device.
int kd_choice(const LinearArgs* a) {
  LinearDevice device;
  if (linear_device(&device)) return -1;
  const int shape = choose_linear_shape(*a, device);
  return shape + (reads_weights_early(*a, shape_of(*a, shape), device) ? 256 : 0);
}
int kd_serves(const LinearArgs* a, int shape) {
  LinearDevice device;
  return linear_device(&device) == kOk && serves(shape_of(*a, shape), *a, device);
}
int kd_num_shapes(int dtype) { return num_linear_shapes(static_cast<Dtype>(dtype)); }
const char* kd_shape(int dtype, int i, int* out) { return describe(linear_shape(static_cast<Dtype>(dtype), i), out); }
int kd_num_int4_shapes(int partial) { return partial ? num_int4_partial_shapes() : num_int4_shapes(); }
const char* kd_int4_shape(int partial, int i, int* out) { return describe(partial ? int4_partial_shape(i) : int4_shape(i), out); }
int kd_moe(const MoeExpertsArgs* a, void* stream) { return moe_experts_cuda(*a, stream); }
// INT4 experts with the shapes up and down of the two grouped products.
int kd_moe_with(const MoeExpertsArgs* a, int up, int down, void* stream) { return moe_experts_cuda_with(*a, {up, down}, stream); }
int kd_moe_rows_per_item(const MoeExpertsArgs* a) { return moe_rows_per_item(*a); }
int64_t kd_moe_workspace(const MoeExpertsArgs* a) { return moe_experts_cuda_workspace_bytes(*a); }
}
