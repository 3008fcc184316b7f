// C names for ctypes: linear, its tile shapes, pack_linear and moe_experts. Used by run_linear.py.
#include "linear.cuh"

using namespace kdtree;

extern "C" {
int kd_pack(const PackLinearArgs* a, void* stream) { return pack_linear_cuda(*a, stream); }
int kd_linear(const LinearArgs* a, int shape, void* stream) {
  return shape < 0 ? linear_cuda(*a, stream) : linear_cuda_with(*a, shape, stream);
}
// The shape that linear_cuda takes, plus 256 if it reads weights early; -1 without a device.
int kd_choice(const LinearArgs* a) {
  LinearDevice device;
  if (linear_device(&device)) return -1;
  const int shape = choose_linear_shape(*a, device);
  return shape + (reads_weights_early(*a, linear_shape(a->dtype, shape), device) ? 256 : 0);
}
int kd_serves(const LinearArgs* a, int shape) {
  LinearDevice device;
  return linear_device(&device) == kOk && serves(linear_shape(a->dtype, shape), *a, device);
}
int kd_num_shapes(int dtype) { return num_linear_shapes(static_cast<Dtype>(dtype)); }
const char* kd_shape(int dtype, int i, int* out) {
  const LinearShape& shape = linear_shape(static_cast<Dtype>(dtype), i);
  out[0] = shape.num_rows, out[1] = shape.num_out, out[2] = shape.cluster;
  return shape.name;
}
int kd_moe(const MoeExpertsArgs* a, void* stream) { return moe_experts_cuda(*a, stream); }
int64_t kd_moe_workspace(const MoeExpertsArgs* a) { return moe_experts_cuda_workspace_bytes(*a); }
}
