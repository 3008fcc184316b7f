// Devices, memory and streams of the C ABI. What concerns GPUs is in cuda_device.cu, or missing from this library.
#include "device.h"

#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "error.h"

#if defined(KDTREE_WITH_CUDA)
#include "cuda_device.h"
#define KDTREE_IF_CUDA(call) call
#else
#define KDTREE_IF_CUDA(call) ::kdtree::capi::fail_without_cuda()
#endif

namespace kdtree::capi {
namespace {

constexpr size_t kAlignment = 256;

[[maybe_unused]] kdtree_status fail_without_cuda() {
  return fail(KDTREE_UNAVAILABLE, "device: expected KDTREE_CPU in a library that was built without CUDA kernels, got "
              "KDTREE_CUDA");
}

kdtree_status check_size(const char* op, int64_t num_bytes) {
  if (num_bytes >= 0 && num_bytes <= int64_t{1} << 50) return KDTREE_OK;
  return fail(KDTREE_INVALID_ARGUMENT, "%s: num_bytes: expected 0 to 2^50, got %lld", op,
              static_cast<long long>(num_bytes));
}

kdtree_status check_pointer(const char* op, const char* name, const void* pointer) {
  if (pointer != nullptr) return KDTREE_OK;
  return fail(KDTREE_INVALID_ARGUMENT, "%s: %s: expected an address, got NULL", op, name);
}

kdtree_status allocate_on_cpu(int64_t num_bytes, void** out) {
  const size_t rounded = (static_cast<size_t>(num_bytes) + kAlignment - 1) / kAlignment * kAlignment;
  *out = std::aligned_alloc(kAlignment, rounded == 0 ? kAlignment : rounded);
  if (*out != nullptr) return KDTREE_OK;
  return fail(KDTREE_OUT_OF_MEMORY, "malloc: expected %lld bytes of memory, got none",
              static_cast<long long>(num_bytes));
}

kdtree_status cpu_info(kdtree_device_info* out) {
  std::strcpy(out->name, "CPU");
  out->has_kernels = 1;
  out->num_multiprocessors = static_cast<int32_t>(sysconf(_SC_NPROCESSORS_ONLN));
  out->memory_bytes = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  return KDTREE_OK;
}

}  // namespace

kdtree_status check_device(const char* op, const kdtree_device* device) {
  if (const kdtree_status status = check_pointer(op, "device", device)) return status;
  if (device->kind == KDTREE_CUDA) return KDTREE_IF_CUDA(cuda::check(op, *device));
  if (device->kind != KDTREE_CPU)
    return fail(KDTREE_INVALID_ARGUMENT, "%s: device: expected the kind KDTREE_CPU (0) or KDTREE_CUDA (1), got %d", op,
                device->kind);
  if (device->index != 0 || device->stream != nullptr)
    return fail(KDTREE_INVALID_ARGUMENT, "%s: device: expected index 0 and no stream for a CPU, got index %d and %p",
                op, device->index, device->stream);
  return KDTREE_OK;
}

bool can_reach([[maybe_unused]] const kdtree_device& device, [[maybe_unused]] const void* memory) {
#if defined(KDTREE_WITH_CUDA)
  if (device.kind == KDTREE_CUDA) return cuda::is_reachable(device.index, memory);
  return !cuda::is_in_use() || cuda::is_host_memory(memory);
#else
  return true;
#endif
}

kdtree_status fail_cuda([[maybe_unused]] const char* op) { return KDTREE_IF_CUDA(cuda::fail_last(op)); }

CurrentDevice::CurrentDevice([[maybe_unused]] const kdtree_device& device) {
#if defined(KDTREE_WITH_CUDA)
  if (device.kind == KDTREE_CUDA) before_ = cuda::exchange_current(device.index);
#endif
}

CurrentDevice::~CurrentDevice() {
#if defined(KDTREE_WITH_CUDA)
  cuda::exchange_current(before_);
#endif
}

}  // namespace kdtree::capi

using namespace kdtree::capi;

extern "C" {

kdtree_status kdtree_num_devices(int32_t kind, int32_t* count) {
  if (const kdtree_status status = check_pointer("num_devices", "count", count)) return status;
  *count = kind == KDTREE_CPU;
  if (kind == KDTREE_CPU) return KDTREE_OK;
  if (kind == KDTREE_CUDA) return KDTREE_IF_CUDA(cuda::num_devices(count));
  return fail(KDTREE_INVALID_ARGUMENT, "num_devices: kind: expected KDTREE_CPU (0) or KDTREE_CUDA (1), got %d", kind);
}

kdtree_status kdtree_get_device_info(const kdtree_device* device, kdtree_device_info* info) {
  const char* op = "get_device_info";
  if (const kdtree_status status = check_pointer(op, "info", info)) return status;
  std::memset(info, 0, sizeof *info);
  if (device != nullptr && device->kind == KDTREE_CUDA) return KDTREE_IF_CUDA(cuda::info(*device, info));
  if (const kdtree_status status = check_device(op, device)) return status;
  return cpu_info(info);
}

kdtree_status kdtree_malloc(const kdtree_device* device, int64_t num_bytes, void** out) {
  const char* op = "malloc";
  if (const kdtree_status status = check_pointer(op, "out", out)) return status;
  *out = nullptr;
  if (const kdtree_status status = check_device(op, device)) return status;
  if (const kdtree_status status = check_size(op, num_bytes)) return status;
  const CurrentDevice current(*device);
  if (device->kind == KDTREE_CPU) return allocate_on_cpu(num_bytes, out);
  return KDTREE_IF_CUDA(cuda::allocate(*device, num_bytes == 0 ? 1 : num_bytes, out));
}

kdtree_status kdtree_free(const kdtree_device* device, void* memory) {
  if (const kdtree_status status = check_device("free", device)) return status;
  const CurrentDevice current(*device);
  if (device->kind == KDTREE_CUDA) return KDTREE_IF_CUDA(cuda::release(*device, memory));
  std::free(memory);
  return KDTREE_OK;
}

kdtree_status kdtree_copy(const kdtree_device* device, void* to, const void* from, int64_t num_bytes) {
  const char* op = "copy";
  if (const kdtree_status status = check_device(op, device)) return status;
  if (const kdtree_status status = check_size(op, num_bytes)) return status;
  if (num_bytes == 0) return KDTREE_OK;
  if (const kdtree_status status = check_pointer(op, "to", to)) return status;
  if (const kdtree_status status = check_pointer(op, "from", from)) return status;
  const CurrentDevice current(*device);
  if (device->kind == KDTREE_CUDA) return KDTREE_IF_CUDA(cuda::copy(*device, to, from, num_bytes));
  if (!can_reach(*device, to) || !can_reach(*device, from))
    return fail(KDTREE_INVALID_ARGUMENT, "%s: expected memory of the host on a CPU, got a GPU's; copy with the GPU's "
                "device", op);
  std::memmove(to, from, static_cast<size_t>(num_bytes));
  return KDTREE_OK;
}

kdtree_status kdtree_synchronize(const kdtree_device* device) {
  if (const kdtree_status status = check_device("synchronize", device)) return status;
  if (device->kind == KDTREE_CPU) return KDTREE_OK;
  const CurrentDevice current(*device);
  return KDTREE_IF_CUDA(cuda::synchronize(*device));
}

kdtree_status kdtree_create_stream(kdtree_device* device) {
  const char* op = "create_stream";
  if (const kdtree_status status = check_device(op, device)) return status;
  if (device->stream != nullptr)
    return fail(KDTREE_INVALID_ARGUMENT, "%s: device: expected one without a stream, got one that has it", op);
  if (device->kind == KDTREE_CPU) return KDTREE_OK;
  const CurrentDevice current(*device);
  return KDTREE_IF_CUDA(cuda::create_stream(device));
}

kdtree_status kdtree_destroy_stream(kdtree_device* device) {
  if (const kdtree_status status = check_device("destroy_stream", device)) return status;
  if (device->kind == KDTREE_CPU) return KDTREE_OK;
  const CurrentDevice current(*device);
  return KDTREE_IF_CUDA(cuda::destroy_stream(device));
}

}  // extern "C"
