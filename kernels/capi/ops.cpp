// The operations of the C ABI: check the arguments, call the kernel of the device, turn its status into a message.
#include <cstring>
#include <exception>
#include <new>

#include "../rows_in_use.h"
#include "op_checks.h"

namespace kdtree::capi {
namespace {

// The values that kdtree.h gives the kernels' enumerations.
constexpr bool same(int32_t in_c, int32_t in_kernels) { return in_c == in_kernels; }
static_assert(same(KDTREE_OK, kOk) && same(KDTREE_INVALID_CANDIDATES, kInvalidCandidates));
static_assert(same(KDTREE_NON_FINITE, kNonFinite) && same(KDTREE_INVALID_TREE, kInvalidTree));
static_assert(same(KDTREE_OUT_OF_RANGE, kOutOfRange) && same(KDTREE_UNSUPPORTED, kUnsupported));
static_assert(same(KDTREE_CUDA_ERROR, kCudaError));
static_assert(same(KDTREE_F32, kF32) && same(KDTREE_BF16, kBF16));
static_assert(same(KDTREE_RECORD_NODES, kRecordNodes) && same(KDTREE_RECORD_ACCEPTED, kRecordAccepted));
static_assert(same(KDTREE_RECORD_EMITTED, kRecordEmitted) && same(KDTREE_RECORD_STATUS, kRecordStatus));
static_assert(same(KDTREE_RECORD_TOKEN, kRecordToken));
static_assert(same(KDTREE_SOFTMAX, kSoftmax) && same(KDTREE_SIGMOID, kSigmoid));

#if defined(KDTREE_WITH_CUDA)
#define KDTREE_CUDA_KERNEL(kernel) kernel
#else
#define KDTREE_CUDA_KERNEL(kernel) nullptr
#endif

// Calls f, which returns a status, and turns what it throws into one.
template <class F>
kdtree_status guarded(const char* op, F&& f) {
  try {
    return f();
  } catch (const std::bad_alloc&) {
    return fail(KDTREE_OUT_OF_MEMORY, "%s: expected memory to work in, got none", op);
  } catch (const std::exception& error) {
    return fail(KDTREE_OUT_OF_MEMORY, "%s: expected threads and memory to work with, got %s", op, error.what());
  }
}

// A workspace as large as the operation asks for; verify_attn makes do with less, down to one row.
template <class Args>
void check_workspace(const Args& args, int64_t (*workspace_bytes)(const Args&), Checks& checks) {
  if (!checks.on_cpu()) checks.workspace(args.workspace, workspace_bytes(args));
}

void check_workspace(const VerifyAttnArgs& args, int64_t (*workspace_bytes)(const VerifyAttnArgs&), Checks& checks) {
  if (checks.on_cpu() || args.num_rows == 0) return;
  VerifyAttnArgs one_row = args;
  one_row.num_rows = 1;
  checks.range("workspace_bytes", args.workspace_bytes, workspace_bytes(one_row), INT64_MAX);
  checks.workspace(args.workspace, args.workspace_bytes);
}

kdtree_status check_call(const char* op, const void* args, const kdtree_device* device) {
  if (args == nullptr) return fail(KDTREE_INVALID_ARGUMENT, "%s: args: expected an address, got NULL", op);
  return check_device(op, device);
}

// The arguments with the rows in use alone, where an operation can be told of them.
template <class Args>
auto only_used(const Args& args, int) -> decltype(args.num_rows_device, args.num_rows, Args(args)) {
  return with_rows_in_use(args);
}
template <class Args>
Args only_used(const Args& args, long) {
  return args;
}

// check_more(args, checks) has what an operation's own check has not.
template <class Args, class CheckMore>
kdtree_status call(const char* op, const Args* args, const kdtree_device* device, int (*cpu)(const Args&),
                   int (*cuda)(const Args&, void* stream), CheckMore&& check_more) {
  if (const kdtree_status status = check_call(op, args, device)) return status;
  return guarded(op, [&] {
    const CurrentDevice current(*device);
    Checks checks(op, *device);
    check(*args, checks);
    if (checks.status() == KDTREE_OK) check_more(*args, checks);
    if (checks.status() != KDTREE_OK) return checks.status();
    const int status = checks.on_cpu() ? cpu(*args) : cuda(*args, device->stream);
    if (checks.on_cpu() && status == kOutOfRange) explain(only_used(*args, 0), checks);
    checks.kernel_status(status);
    return checks.status();
  });
}

// Bytes of memory that an operation's arguments ask for on a device: count(args) where the sizes are sound.
template <class Args, class Count>
kdtree_status count_bytes(const char* op, const Args* args, const kdtree_device* device, int64_t* num_bytes,
                          Count&& count) {
  if (const kdtree_status status = check_call(op, args, device)) return status;
  if (num_bytes == nullptr) return fail(KDTREE_INVALID_ARGUMENT, "%s: num_bytes: expected an address, got NULL", op);
  const CurrentDevice current(*device);
  Checks checks(op, *device);
  check_sizes(*args, checks);
  if (checks.status() == KDTREE_OK) *num_bytes = count(*args, checks.on_cpu());
  return checks.status();
}

}  // namespace
}  // namespace kdtree::capi

using namespace kdtree;
using namespace kdtree::capi;

extern "C" {

const char* kdtree_version(void) { return KDTREE_VERSION; }

int32_t kdtree_abi_version(void) { return KDTREE_ABI_VERSION; }

const char* kdtree_last_error(void) { return last_error(); }

const char* kdtree_status_string(kdtree_status status) {
#define KDTREE_NAME(name) case name: return #name;
  switch (status) {
    KDTREE_NAME(KDTREE_OK)
    KDTREE_NAME(KDTREE_INVALID_CANDIDATES)
    KDTREE_NAME(KDTREE_NON_FINITE)
    KDTREE_NAME(KDTREE_INVALID_TREE)
    KDTREE_NAME(KDTREE_OUT_OF_RANGE)
    KDTREE_NAME(KDTREE_UNSUPPORTED)
    KDTREE_NAME(KDTREE_CUDA_ERROR)
    KDTREE_NAME(KDTREE_INVALID_ARGUMENT)
    KDTREE_NAME(KDTREE_UNAVAILABLE)
    KDTREE_NAME(KDTREE_OUT_OF_MEMORY)
    KDTREE_NAME(KDTREE_BAD_FILE)
    default: return "an unknown status";
  }
#undef KDTREE_NAME
}

// Every operation once: X(op), or W(op) for one that works in memory of the caller's.
#define KDTREE_ALL(X, W)                                                                               \
  X(embed) X(rms_norm) X(pack_linear) X(dequantize_int4) X(pack_int4) X(linear) X(rope) X(swiglu) X(residual_add) X(add_partials) X(argmax)    \
  X(sample) X(sample_among) X(moe_route) W(moe_experts) X(cache_append) X(latent_append) X(absorb_query)            \
  X(cache_compact) W(verify_attn) X(context_append) X(block_attn) W(draft_topk)                                         \
  X(draft_topk_merge)                                                                                  \
  X(tree_build) X(tree_rows) X(tree_accept) X(step_commit) X(accepted_features)

#define KDTREE_OP(op)                                                                            \
  kdtree_status kdtree_##op(const kdtree_##op##_args* args, const kdtree_device* device) {       \
    return call<kdtree_##op##_args>(#op, args, device, op##_cpu, KDTREE_CUDA_KERNEL(op##_cuda),  \
                                    [](const kdtree_##op##_args&, Checks&) {});                  \
  }

#define KDTREE_OP_WITH_WORKSPACE(op)                                                                       \
  constexpr int64_t (*op##_workspace_bytes)(const kdtree_##op##_args&) =                                   \
      KDTREE_CUDA_KERNEL(op##_cuda_workspace_bytes);                                                       \
  kdtree_status kdtree_##op(const kdtree_##op##_args* args, const kdtree_device* device) {                 \
    return call<kdtree_##op##_args>(                                                                       \
        #op, args, device, op##_cpu, KDTREE_CUDA_KERNEL(op##_cuda),                                        \
        [](const kdtree_##op##_args& a, Checks& c) { check_workspace(a, op##_workspace_bytes, c); });      \
  }                                                                                                        \
  kdtree_status kdtree_##op##_workspace_bytes(const kdtree_##op##_args* args, const kdtree_device* device, \
                                              int64_t* num_bytes) {                                        \
    return count_bytes(                                                                                    \
        #op "_workspace_bytes", args, device, num_bytes,                                                   \
        [](const kdtree_##op##_args& a, bool on_cpu) { return on_cpu ? 0 : op##_workspace_bytes(a); });    \
  }

KDTREE_ALL(KDTREE_OP, KDTREE_OP_WITH_WORKSPACE)

kdtree_status kdtree_pack_linear_packed_bytes(const kdtree_pack_linear_args* args, const kdtree_device* device,
                                              int64_t* num_bytes) {
  return count_bytes("pack_linear_packed_bytes", args, device, num_bytes, [](const PackLinearArgs& a, bool on_cpu) {
    const int64_t num_in = on_cpu ? a.num_in : (a.num_in + 31) / 32 * 32;
    return a.num_groups * ((a.num_out + 15) / 16 * 16) * num_in * element_bytes(a.dtype);
  });
}

int64_t kdtree_args_bytes(const char* op) {
#define KDTREE_BYTES(name) \
  if (op != nullptr && std::strcmp(op, #name) == 0) return sizeof(kdtree_##name##_args);
  KDTREE_ALL(KDTREE_BYTES, KDTREE_BYTES)
#undef KDTREE_BYTES
  return -1;
}

}  // extern "C"
