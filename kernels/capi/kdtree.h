/* The kernels from C: C99 and C++17, no other header of the project but op_args.h, no torch, no CUDA headers.
 *
 *   kdtree_device cpu = {KDTREE_CPU, 0, NULL};
 *   kdtree_tree_build_args args = {0};
 *   args.log_probs = …;                                     the fields are those of op_args.h, which describes them
 *   if (kdtree_tree_build(&args, &cpu) != KDTREE_OK) puts(kdtree_last_error());
 *
 * Every function that can fail returns a status; kdtree_last_error() then says the operation, what was expected and
 * what came. Arguments are checked: null or misaligned pointers, sizes, strides and types that an operation cannot have
 * are KDTREE_INVALID_ARGUMENT. That an array is as long as its sizes say is for the caller to see to.
 *
 * On a CPU an operation is complete when its function returns, and has checked what its arrays hold. On a GPU it is
 * queued on the device's stream, in order with what else is on it; arrays lie in the GPU's memory, unseen by the host:
 * a token, position or expert outside its array gives a row of NaN, and a stream whose tree cannot be built 0 nodes.
 *
 * All functions may be called from several threads at once. A struct of arguments is read during the call alone. Zeroed
 * fields mean: no array (where it is optional), F32, one thread.
 */
#ifndef KDTREE_H
#define KDTREE_H

#include "../op_args.h"

#define KDTREE_VERSION "0.1.0"
#define KDTREE_ABI_VERSION 3 /* of structs and functions; another number means another layout */

#if defined(KDTREE_BUILD)
#define KDTREE_API __attribute__((visibility("default")))
#else
#define KDTREE_API
#endif

#ifdef __cplusplus
#define KDTREE_STRUCT(Name) kdtree::Name
extern "C" {
#else
#define KDTREE_STRUCT(Name) struct Name
#endif

/* --- statuses and enumerations ---------------------------------------------------------------------------------- */

typedef int32_t kdtree_status;
enum {
  KDTREE_OK = 0,
  KDTREE_INVALID_CANDIDATES = 1, /* tree_build: log-probs that increase, are positive or NaN; token ids that repeat */
  KDTREE_NON_FINITE = 2,         /* draft_topk: a NaN or +inf logit */
  KDTREE_INVALID_TREE = 3,       /* a parent index that is not below its node's own */
  KDTREE_OUT_OF_RANGE = 4,       /* a token id, slot, position or count outside its array */
  KDTREE_UNSUPPORTED = 5,        /* no kernel for these types and sizes, or for this GPU */
  KDTREE_CUDA_ERROR = 6,         /* a call of the CUDA runtime failed */
  KDTREE_INVALID_ARGUMENT = 100, /* what a function cannot be called with */
  KDTREE_UNAVAILABLE = 101,      /* a GPU was asked for, but the library was built without CUDA or no GPU is there */
  KDTREE_OUT_OF_MEMORY = 102,
  KDTREE_BAD_FILE = 103 /* a KDTR file that cannot be read, or lacks a tensor */
};

enum { KDTREE_F32 = 0, KDTREE_BF16 = 1 };       /* dtype */
enum { KDTREE_SOFTMAX = 0, KDTREE_SIGMOID = 1 }; /* scoring of moe_route */

/* What a record of step_commit holds in front of its tokens. */
enum {
  KDTREE_RECORD_NODES = 0,
  KDTREE_RECORD_ACCEPTED = 1,
  KDTREE_RECORD_EMITTED = 2,
  KDTREE_RECORD_STATUS = 3,
  KDTREE_RECORD_TOKEN = 4
};

/* --- versions and errors ---------------------------------------------------------------------------------------- */

/* What the library was built as. A program compares them with KDTREE_VERSION and KDTREE_ABI_VERSION of its header. */
KDTREE_API const char* kdtree_version(void);
KDTREE_API int32_t kdtree_abi_version(void);

/* sizeof the struct of an operation ("embed") in the library, or -1 for a name that is none. */
KDTREE_API int64_t kdtree_args_bytes(const char* op);

/* The name of a status: "KDTREE_INVALID_TREE". */
KDTREE_API const char* kdtree_status_string(kdtree_status status);

/* Why the last call that failed on this thread did: operation, expected, got. Empty before one has. */
KDTREE_API const char* kdtree_last_error(void);

/* --- devices and memory ----------------------------------------------------------------------------------------- */

enum { KDTREE_CPU = 0, KDTREE_CUDA = 1 };

typedef struct kdtree_device {
  int32_t kind;  /* KDTREE_CPU or KDTREE_CUDA */
  int32_t index; /* which GPU; 0 for the CPU */
  void* stream;  /* a cudaStream_t of that GPU, or NULL for its default stream; NULL for the CPU */
} kdtree_device;

typedef struct kdtree_device_info {
  char name[256];
  int32_t arch;                /* 90 for sm_90; 0 for the CPU */
  int32_t has_kernels;         /* 1 if the library holds machine code for it */
  int32_t num_multiprocessors; /* for the CPU: processors that are online */
  int64_t memory_bytes;
} kdtree_device_info;

/* How many devices of a kind there are. KDTREE_UNAVAILABLE for GPUs where the library has no CUDA kernels or the
 * machine no driver. */
KDTREE_API kdtree_status kdtree_num_devices(int32_t kind, int32_t* count);
KDTREE_API kdtree_status kdtree_get_device_info(const kdtree_device* device, kdtree_device_info* info);

/* Memory of a device, aligned to 256 bytes and not initialised; num_bytes may be 0. Free takes NULL, too. */
KDTREE_API kdtree_status kdtree_malloc(const kdtree_device* device, int64_t num_bytes, void** out);
KDTREE_API kdtree_status kdtree_free(const kdtree_device* device, void* memory);

/* Copies from and to the memory of `device` or the host, in order with the device's stream. Host memory may be touched
 * again after kdtree_synchronize. */
KDTREE_API kdtree_status kdtree_copy(const kdtree_device* device, void* to, const void* from, int64_t num_bytes);

/* Waits until all that was queued on the device's stream is done, and reports an error that occurred in it. */
KDTREE_API kdtree_status kdtree_synchronize(const kdtree_device* device);

/* Makes a stream of its own for `device`, which must have none, and destroys it (device->stream becomes NULL). A CPU
 * has none: both do nothing. */
KDTREE_API kdtree_status kdtree_create_stream(kdtree_device* device);
KDTREE_API kdtree_status kdtree_destroy_stream(kdtree_device* device);

/* --- operations ------------------------------------------------------------------------------------------------- */

typedef KDTREE_STRUCT(EmbedArgs) kdtree_embed_args;
typedef KDTREE_STRUCT(RmsNormArgs) kdtree_rms_norm_args;
typedef KDTREE_STRUCT(PackLinearArgs) kdtree_pack_linear_args;
typedef KDTREE_STRUCT(DequantizeInt4Args) kdtree_dequantize_int4_args;
typedef KDTREE_STRUCT(PackInt4Args) kdtree_pack_int4_args;
typedef KDTREE_STRUCT(LinearArgs) kdtree_linear_args;
typedef KDTREE_STRUCT(RopeArgs) kdtree_rope_args;
typedef KDTREE_STRUCT(SwigluArgs) kdtree_swiglu_args;
typedef KDTREE_STRUCT(ResidualAddArgs) kdtree_residual_add_args;
typedef KDTREE_STRUCT(AddPartialsArgs) kdtree_add_partials_args;
typedef KDTREE_STRUCT(ArgmaxArgs) kdtree_argmax_args;
typedef KDTREE_STRUCT(SampleArgs) kdtree_sample_args;
typedef KDTREE_STRUCT(SampleAmongArgs) kdtree_sample_among_args;
typedef KDTREE_STRUCT(MoeRouteArgs) kdtree_moe_route_args;
typedef KDTREE_STRUCT(MoeExpertsArgs) kdtree_moe_experts_args;
typedef KDTREE_STRUCT(CacheAppendArgs) kdtree_cache_append_args;
typedef KDTREE_STRUCT(LatentAppendArgs) kdtree_latent_append_args;
typedef KDTREE_STRUCT(AbsorbQueryArgs) kdtree_absorb_query_args;
typedef KDTREE_STRUCT(CacheCompactArgs) kdtree_cache_compact_args;
typedef KDTREE_STRUCT(VerifyAttnArgs) kdtree_verify_attn_args;
typedef KDTREE_STRUCT(ContextAppendArgs) kdtree_context_append_args;
typedef KDTREE_STRUCT(BlockAttnArgs) kdtree_block_attn_args;
typedef KDTREE_STRUCT(DraftTopkArgs) kdtree_draft_topk_args;
typedef KDTREE_STRUCT(DraftTopkMergeArgs) kdtree_draft_topk_merge_args;
typedef KDTREE_STRUCT(TreeBuildArgs) kdtree_tree_build_args;
typedef KDTREE_STRUCT(TreeRowsArgs) kdtree_tree_rows_args;
typedef KDTREE_STRUCT(TreeAcceptArgs) kdtree_tree_accept_args;
typedef KDTREE_STRUCT(StepCommitArgs) kdtree_step_commit_args;
typedef KDTREE_STRUCT(AcceptedFeaturesArgs) kdtree_accepted_features_args;

KDTREE_API kdtree_status kdtree_embed(const kdtree_embed_args* args, const kdtree_device* device);
KDTREE_API kdtree_status kdtree_rms_norm(const kdtree_rms_norm_args* args, const kdtree_device* device);
KDTREE_API kdtree_status kdtree_pack_linear(const kdtree_pack_linear_args* args, const kdtree_device* device);
KDTREE_API kdtree_status kdtree_dequantize_int4(const kdtree_dequantize_int4_args* args, const kdtree_device* device);
KDTREE_API kdtree_status kdtree_pack_int4(const kdtree_pack_int4_args* args, const kdtree_device* device);
KDTREE_API kdtree_status kdtree_linear(const kdtree_linear_args* args, const kdtree_device* device);
KDTREE_API kdtree_status kdtree_rope(const kdtree_rope_args* args, const kdtree_device* device);
KDTREE_API kdtree_status kdtree_swiglu(const kdtree_swiglu_args* args, const kdtree_device* device);
KDTREE_API kdtree_status kdtree_residual_add(const kdtree_residual_add_args* args, const kdtree_device* device);
KDTREE_API kdtree_status kdtree_add_partials(const kdtree_add_partials_args* args, const kdtree_device* device);
KDTREE_API kdtree_status kdtree_argmax(const kdtree_argmax_args* args, const kdtree_device* device);
KDTREE_API kdtree_status kdtree_sample(const kdtree_sample_args* args, const kdtree_device* device);
KDTREE_API kdtree_status kdtree_sample_among(const kdtree_sample_among_args* args, const kdtree_device* device);
KDTREE_API kdtree_status kdtree_moe_route(const kdtree_moe_route_args* args, const kdtree_device* device);
KDTREE_API kdtree_status kdtree_moe_experts(const kdtree_moe_experts_args* args, const kdtree_device* device);
KDTREE_API kdtree_status kdtree_cache_append(const kdtree_cache_append_args* args, const kdtree_device* device);
KDTREE_API kdtree_status kdtree_latent_append(const kdtree_latent_append_args* args, const kdtree_device* device);
KDTREE_API kdtree_status kdtree_absorb_query(const kdtree_absorb_query_args* args, const kdtree_device* device);
KDTREE_API kdtree_status kdtree_cache_compact(const kdtree_cache_compact_args* args, const kdtree_device* device);
KDTREE_API kdtree_status kdtree_verify_attn(const kdtree_verify_attn_args* args, const kdtree_device* device);
KDTREE_API kdtree_status kdtree_context_append(const kdtree_context_append_args* args, const kdtree_device* device);
KDTREE_API kdtree_status kdtree_block_attn(const kdtree_block_attn_args* args, const kdtree_device* device);
KDTREE_API kdtree_status kdtree_draft_topk(const kdtree_draft_topk_args* args, const kdtree_device* device);
KDTREE_API kdtree_status kdtree_draft_topk_merge(const kdtree_draft_topk_merge_args* args, const kdtree_device* device);
KDTREE_API kdtree_status kdtree_tree_build(const kdtree_tree_build_args* args, const kdtree_device* device);
KDTREE_API kdtree_status kdtree_tree_rows(const kdtree_tree_rows_args* args, const kdtree_device* device);
KDTREE_API kdtree_status kdtree_tree_accept(const kdtree_tree_accept_args* args, const kdtree_device* device);
KDTREE_API kdtree_status kdtree_step_commit(const kdtree_step_commit_args* args, const kdtree_device* device);
KDTREE_API kdtree_status kdtree_accepted_features(const kdtree_accepted_features_args* args, const kdtree_device* device);

/* Bytes of a packed weight, which is a device's own (PackLinearArgs). */
KDTREE_API kdtree_status kdtree_pack_linear_packed_bytes(const kdtree_pack_linear_args* args,
                                                         const kdtree_device* device, int64_t* num_bytes);

/* Bytes that `workspace` must have room for: 0 on a CPU. Only sizes and types of args are looked at. */
KDTREE_API kdtree_status kdtree_moe_experts_workspace_bytes(const kdtree_moe_experts_args* args,
                                                            const kdtree_device* device, int64_t* num_bytes);
KDTREE_API kdtree_status kdtree_verify_attn_workspace_bytes(const kdtree_verify_attn_args* args,
                                                            const kdtree_device* device, int64_t* num_bytes);
KDTREE_API kdtree_status kdtree_draft_topk_workspace_bytes(const kdtree_draft_topk_args* args,
                                                           const kdtree_device* device, int64_t* num_bytes);

/* --- KDTR files (in C++ use kdtr.h itself) ---------------------------------------------------------------------- */

typedef struct kdtree_kdtr kdtree_kdtr; /* an open file */

typedef struct kdtree_kdtr_tensor {
  const char* name;
  const char* dtype; /* f64 f32 bf16 f16 i64 i32 i16 i8 u8 bool */
  const void* data;  /* NULL where num_bytes is 0 */
  int64_t num_bytes;
  int32_t rank;
  int64_t shape[8]; /* 0 from `rank` on */
} kdtree_kdtr_tensor;

/* KDTREE_BAD_FILE for whatever is wrong with the file. What the functions below give lives until the file is closed. */
KDTREE_API kdtree_status kdtree_kdtr_open(const char* path, kdtree_kdtr** out);
KDTREE_API void kdtree_kdtr_close(kdtree_kdtr* file);
KDTREE_API int64_t kdtree_kdtr_num_tensors(const kdtree_kdtr* file);
KDTREE_API const char* kdtree_kdtr_metadata(const kdtree_kdtr* file); /* JSON */

/* A tensor by its place in the header, or by name; checks its CRC-32 (the first time). */
KDTREE_API kdtree_status kdtree_kdtr_get(const kdtree_kdtr* file, int64_t index, kdtree_kdtr_tensor* out);
KDTREE_API kdtree_status kdtree_kdtr_find(const kdtree_kdtr* file, const char* name, kdtree_kdtr_tensor* out);

#undef KDTREE_STRUCT
#ifdef __cplusplus
}
#endif
#endif
