// One plain struct per operation: THE contract between the operations, their bindings and the C ABI.
//
// Every kernel is `int <op>_cpu(const <Op>Args&)` in <op>.cpp and `int <op>_cuda(const <Op>Args&, void* stream)` in
// <op>.cu. The return value is a Status. Pointers are to dense row-major arrays in the order of the shape comment unless
// a stride is given; strides count elements. `Float` arrays hold the type named by `dtype` (F32 or BF16). Symbols:
//   T rows of the step (ragged: rows of stream 0, then stream 1, …)   B streams   N tree slots per stream = 1 + max_budget
//   H heads   C kv_lora_rank   R qk_rope_head_dim   L draft depth   K candidates per depth   V vocabulary   E experts
// No file that includes this header sees torch. The structs are C99 as well: capi/kdtree.h gives them to C programs, so
// their fields are pointers and fixed-size numbers, and a new field comes last.
#pragma once
#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
namespace kdtree {

enum Dtype : int32_t { kF32 = 0, kBF16 = 1 };

enum Scoring : int32_t { kSoftmax = 0, kSigmoid = 1 };

enum Status : int32_t {
  kOk = 0,
  kInvalidCandidates = 1,  // tree_build: a row is NaN, positive, increasing, or repeats a token id
  kNonFinite = 2,          // draft_topk: a NaN logit
  kInvalidTree = 3,        // a parent index that is not below its node's own index
  kOutOfRange = 4,         // a token id, slot or position outside its array
  kUnsupported = 5,
  kCudaError = 6,          // a launch or runtime call failed; cudaGetLastError says why
};

// What a record of step_commit holds per stream in front of its tokens.
enum RecordField : int32_t {
  kRecordNodes = 0, kRecordAccepted = 1, kRecordEmitted = 2, kRecordStatus = 3, kRecordToken = 4
};

#else  // C: fields of an enum are plain numbers; kdtree.h names the values
#define Dtype int32_t
#define Scoring int32_t
#endif

// --- rows of the transformer ---------------------------------------------------------------------------------------

struct EmbedArgs {           // out[t] = weight[token[t]]
  const void* weight;        // Float [V, D]
  const int64_t* token;      // [T]
  void* out;                 // Float [T, D]
  int64_t num_rows, vocab_size, dim;
  Dtype dtype;
  int32_t num_threads;
  const int32_t* num_rows_device;  // or nullptr: only the first *num_rows_device rows are in use
};

struct RmsNormArgs {         // out = x / sqrt(mean(x^2) + eps) * weight, per row
  const void* x;             // Float [T, D], row stride x_stride
  const void* weight;        // Float [D]
  void* out;                 // Float [T, D]
  int64_t num_rows, dim, x_stride;
  float eps;
  Dtype dtype;
  int32_t num_threads;
  const int32_t* num_rows_device;  // or nullptr: only the first *num_rows_device rows are in use
  bool weights_settled;      // see LinearArgs
};

// Weights of linear are packed once at load by pack_linear. CPU layout: [G, ceil(N/16), K, 16], zero-filled past N, so
// that 16 neighbouring outputs are one vector and every output is summed alone, in k order, inside each segment.
// CUDA layout: [G, ceil(N/16), ceil(K/32), 512], zero-filled past N and K. The 512 values of a 16 x 32 block are, in F32,
// [k 32][n 16]; in BF16 [n/8 2][k/8 4][n%8 8][k%8 8]: 8 x 8 matrices, as ldmatrix and wgmma's unswizzled operands want them.
struct PackLinearArgs {
  const void* weight;        // Float [G, N, K]
  void* packed;              // Float, CPU [G, ceil(N/16), K, 16], CUDA [G, ceil(N/16), ceil(K/32), 512]
  int64_t num_groups, num_out, num_in;
  Dtype dtype;
  int32_t num_threads;       // CPU
};

// INT4 weights, as checkpoints hold them, to the packed floats that linear and moe_experts take: value * scale, in FP32,
// rounded once to out_dtype. So a product with INT4 weights has the bits of the product with the values they stand for.
struct DequantizeInt4Args {
  const int32_t* weight;     // [G, N, K/8]: value + 8 of k in bits 4 (k mod 8) … + 3 of word k / 8
  const void* scale;         // Float [G, N, K/group_size]
  void* packed;              // out_dtype, as in PackLinearArgs
  const int32_t* group_id;   // [num_ids] the groups that are wanted, others are left as they are; or nullptr: all
  int64_t num_ids, num_groups, num_out, num_in, group_size;   // num_in a multiple of group_size, that of 8
  Dtype dtype, out_dtype;
  int32_t num_threads;
  const int32_t* num_rows_device;  // or nullptr: only the first *num_rows_device * ids_per_row ids are in use
  int64_t ids_per_row;
};

// INT4 weights packed once at load for products with BF16 rows, in one layout for both devices (int4_layout.h): columns of 64
// outputs, units of 32 inputs, in each four blocks of 16 outputs with their scales. Past N values and scales are zeros.
struct PackInt4Args {
  const int32_t* weight;     // i32 [G, N, K/8], as in DequantizeInt4Args
  const uint16_t* scale;     // BF16 [G, N, K/group_size]
  uint8_t* packed;           // [G, ceil(N/64), K/32, 4, 288], aligned to 16 bytes
  int64_t num_groups, num_out, num_in, group_size;  // group_size a multiple of 32 that divides num_in
  int32_t num_threads;       // CPU
};

// out[t, g] = W[g] x[t, g] (+ residual[t, g]). K is cut into 8 segments (see segments.h); segment sums are combined
// ((0+1)+(2+3))+((4+5)+(6+7)) in FP32, rounded once to the output type, and only then added to the residual.
struct LinearArgs {
  const void* x;             // Float [T, G, K], strides x_row_stride, x_group_stride
  const void* packed;        // Float, see PackLinearArgs
  const void* residual;      // Float [T, G, N] or nullptr; only with out_dtype == dtype
  void* out;                 // out_dtype [T, G, N]
  int64_t num_rows, num_groups, num_out, num_in;
  int64_t x_row_stride, x_group_stride;
  Dtype dtype, out_dtype;    // out_dtype: kF32 always allowed (logits, router)
  int32_t num_threads;
  const int32_t* num_rows_device;  // or nullptr: only the first *num_rows_device rows are in use
  bool weights_settled;      // CUDA: the host knew the weights to be complete before it launches this, so that they may be
                             // read while the kernel before it still runs
  bool int4;                 // packed is as in PackInt4Args, dtype BF16; the result has the bits of the BF16 weights that
                             // dequantize_int4 makes
  // Where num_segments is not 0: the num_in inputs are segments first_segment … first_segment + num_segments - 1 of a
  // reduction over whole_in inputs, and `out`, kF32, gets their part of the tree. num_segments is 1, 2, 4 or 8, and
  // first_segment a multiple of it. add_partials adds the parts of several ranks to what one rank alone would get.
  int64_t whole_in;
  int32_t first_segment, num_segments;
};

struct RopeArgs {            // NeoX rotation: pairs (i, i + R/2)
  const void* x;             // Float [T, H, R], strides x_row_stride, x_head_stride
  const float* cos_sin;      // f32 [P, R]: R/2 cosines, then R/2 sines, by absolute position
  const int32_t* position;   // [T]
  void* out;                 // Float [T, H, R]
  int64_t num_rows, num_heads, dim, num_positions;
  int64_t x_row_stride, x_head_stride;
  Dtype dtype;
  int32_t num_threads;
  const int32_t* num_rows_device;  // or nullptr: only the first *num_rows_device rows are in use
};

struct SwigluArgs {          // out = silu(gate) * up
  const void* gate_up;       // Float [T, 2I]: I gates, then I ups
  void* out;                 // Float [T, I]
  int64_t num_rows, dim;     // dim = I
  Dtype dtype;
  int32_t num_threads;
  const int32_t* num_rows_device;  // or nullptr: only the first *num_rows_device rows are in use
};

// The sums of neighbouring segments that P ranks computed, in order of their segments, to the whole reduction's result:
// added in pairs, ((0+1)+(2+3))+((4+5)+(6+7)) for P = 8, rounded once, and only then added to the residual.
struct AddPartialsArgs {
  const float* partials;     // f32 [P, T, N], P = 1, 2, 4 or 8
  const void* residual;      // Float [T, N] or nullptr
  void* out;                 // Float [T, N]
  int64_t num_partials, num_rows, dim;
  Dtype dtype;
  int32_t num_threads;
  const int32_t* num_rows_device;  // or nullptr: only the first *num_rows_device rows are in use
};

struct ResidualAddArgs {     // out = round(x + y)
  const void* x;             // Float [T, D]
  const void* y;             // Float [T, D]
  void* out;                 // Float [T, D]
  int64_t num_rows, dim;
  Dtype dtype;
  int32_t num_threads;
  const int32_t* num_rows_device;  // or nullptr: only the first *num_rows_device rows are in use
};

struct ArgmaxArgs {          // lower id wins ties; -1 for a row that holds a NaN
  const float* logits;       // f32 [T, V]
  int64_t* token;            // [T]
  int64_t num_rows, vocab_size;
  int32_t num_threads;
  const int32_t* num_rows_device;  // or nullptr: only the first *num_rows_device rows are in use
};

struct SampleArgs {          // argmax of logit / temperature + noise over the tokens that a row keeps; see sampling.h
  const float* logits;       // f32 [T, V]
  const int32_t* stream;     // [T]
  const int32_t* position;   // [T] of the row; the noise is that of position + 1, where the token will stand
  const float* temperature;  // f32 [S], 0: argmax
  const int32_t* top_k;      // [S] 0 (all) … 1024
  const float* top_p;        // f32 [S], above 0, at most 1
  const int64_t* seed;       // [S]
  int64_t* token;            // [T]; -1 for a row that holds a NaN, on CUDA also for a row that is not valid
  int64_t num_rows, vocab_size, num_streams;
  int32_t num_threads;
  const int32_t* num_rows_device;  // or nullptr: only the first *num_rows_device rows are in use
};

struct SampleAmongArgs {     // sample among the tokens of a row's words (vocabulary.h), where other ranks have others
  const int64_t* words;      // [T, M]; kNoWord counts as none
  const float* largest;      // f32 [T] the row's largest logit of all ranks
  const int32_t* stream;     // [T], and so on as in SampleArgs
  const int32_t* position;
  const float* temperature;
  const int32_t* top_k;
  const float* top_p;
  const int64_t* seed;
  int64_t* word;             // [T] of the token; kNanWord for a row that has it or whose largest is NaN, on CUDA also for a
                             // row that is not valid
  int64_t num_rows, num_words, vocab_size, num_streams;   // vocab_size: of all ranks
  int32_t num_threads;
  const int32_t* num_rows_device;  // or nullptr: only the first *num_rows_device rows are in use
};

// --- mixture of experts --------------------------------------------------------------------------------------------

struct MoeRouteArgs {        // choose top_k experts a row; bias selects only, weights are the unbiased scores
  const float* logits;       // f32 [T, E]
  const float* bias;         // f32 [E] or nullptr
  int32_t* expert_id;        // [T, top_k], ascending
  float* weight;             // f32 [T, top_k]
  int64_t num_rows, num_experts, top_k;
  Scoring scoring;
  bool renormalize;          // divide by (sum + 1e-20)
  float scaling_factor;
  int64_t num_groups, topk_groups;  // above 1 group: only the topk_groups groups of the largest sum of their two best
                                    // score + bias take part (equal: lower group); 0 counts as 1
  const int32_t* num_rows_device;  // or nullptr: only the first *num_rows_device rows are in use
};

// Segment tree outermost: per segment s of the down projection, acc = fma(weight, partial_expert_s, acc) from +0 over the
// row's experts in ascending id, the shared expert last with weight 1; then the tree over s; then one rounding; then the
// residual. Each expert is gate/up linear (rounded), swiglu (rounded), down linear (segment partials unrounded).
struct MoeExpertsArgs {
  const void* x;                // Float [T, D]
  const void* gate_up;          // Float, packed [E, 2I, D]
  const void* down;             // Float, packed [E, D, I]
  const void* shared_gate_up;   // Float, packed [1, 2S, D] or nullptr
  const void* shared_down;      // Float, packed [1, D, S] or nullptr
  const int32_t* expert_id;     // [T, top_k], ascending
  const float* weight;          // f32 [T, top_k]
  const void* residual;         // Float [T, D] or nullptr
  void* out;                    // Float [T, D]
  int64_t num_rows, dim, num_experts, top_k, width, shared_width;
  Dtype dtype;
  int32_t num_threads;
  const int32_t* num_rows_device;  // or nullptr: only the first *num_rows_device rows are in use
  void* workspace;              // CUDA: moe_experts_cuda_workspace_bytes(args) bytes, aligned to 256
  bool int4;                    // gate_up and down are as in PackInt4Args, dtype BF16; the shared expert's stay BF16
  // Where num_segments is not 0: width and shared_width are those segments (see LinearArgs) of whole_width and
  // whole_shared_width, perhaps 0; `out` is f32 and gets their part of the tree; there is no residual.
  int64_t whole_width, whole_shared_width;
  int32_t first_segment, num_segments;
};

// --- latent cache and attention ------------------------------------------------------------------------------------

struct CacheAppendArgs {     // cache[stream[t], slot[t]] = [latent[t], k_rope[t]]
  void* cache;               // Float [S, P, C+R], one layer
  const void* latent;        // Float [T, C]
  const void* k_rope;        // Float [T, R]
  const int32_t* stream;     // [T]
  const int32_t* slot;       // [T]
  int64_t num_rows, num_streams, num_slots, latent_dim, rope_dim;   // S, P, C, R
  Dtype dtype;
  const int32_t* num_rows_device;  // or nullptr: only the first *num_rows_device rows are in use
};

// What MLA does with the joint rows of its first product, in one launch: q = rms_norm of the first Q columns; and into the
// cache, at [stream[t], slot[t]], the rms_norm of the next C and the rope of the last R. The bits are those of rms_norm, rope
// and cache_append. CUDA: a position outside the table gives a key of NaN, nothing is written outside the cache.
struct LatentAppendArgs {
  const void* q_kv;          // Float [T, Q+C+R], row stride q_kv_stride
  const void* q_norm;        // Float [Q] weight; Q is 0 where queries have no latent of their own
  const void* kv_norm;       // Float [C] weight
  const float* cos_sin;      // f32 [num_positions, R]: R/2 cosines, then R/2 sines, by absolute position
  const int32_t* position;   // [T]
  const int32_t* stream;     // [T]
  const int32_t* slot;       // [T]
  void* q;                   // Float [T, Q]
  void* cache;               // Float [S, P, C+R], one layer
  int64_t num_rows, query_dim, latent_dim, rope_dim, num_positions, num_streams, num_slots;   // T Q C R . S P
  int64_t q_kv_stride;
  float eps;
  Dtype dtype;
  int32_t num_threads;
  const int32_t* num_rows_device;  // or nullptr: only the first *num_rows_device rows are in use
  bool weights_settled;      // see LinearArgs; of both norms
};

// Queries as attention takes them, in one launch: q_latent[t, h] = W[h] q_nope[t, h] and q_rope turned. The bits are those of
// linear and rope. CUDA: a position outside the table gives a q_rope of NaN.
struct AbsorbQueryArgs {
  const void* q;             // Float [T, H*(K+R)], row stride q_stride: q_nope [H, K], then q_rope [H, R]
  const void* packed;        // Float, packed [H, C, K], see PackLinearArgs
  const float* cos_sin;      // f32 [num_positions, R]: R/2 cosines, then R/2 sines, by absolute position
  const int32_t* position;   // [T]
  void* q_latent;            // Float [T, H, C]
  void* q_rope;              // Float [T, H, R]
  int64_t num_rows, num_heads, latent_dim, nope_dim, rope_dim, num_positions, q_stride;   // T H C K R
  Dtype dtype;
  int32_t num_threads;
  const int32_t* num_rows_device;  // or nullptr: only the first *num_rows_device rows are in use
  bool weights_settled;      // see LinearArgs
};

// After acceptance: slot prefix_len + 1 + j of every layer receives slot prefix_len + accepted_path[j]. In place; safe in
// ascending j because a node's index is never smaller than its depth.
struct CacheCompactArgs {
  void* cache;                    // Float [num_layers, S, P, W]
  const int32_t* prefix_len;      // [S]
  const int32_t* accepted_path;   // [S, L] node indices, root excluded, padded with -1
  const int32_t* num_accepted;    // [S]
  int64_t num_layers, num_streams, num_slots, width, max_depth;
  Dtype dtype;
};

// Row t is node n = node[t] of stream s = stream[t]. It attends to slots 0 … prefix_len[s]-1 and to the slots
// prefix_len[s] + a of its ancestors a and itself, in order of absolute position, so that the additions are those of
// one-token decoding. Scores scale * (q_latent . latent + q_rope . k_rope); output = sum p * latent / sum p. CUDA: rows
// lie as tree_rows makes them, a stream's rows together and streams ascending; a row that is not valid becomes NaN.
struct VerifyAttnArgs {
  const void* q_latent;      // Float [T, H, C]
  const void* q_rope;        // Float [T, H, R]
  const void* cache;         // Float [S, P, C+R], one layer
  const int32_t* stream;     // [T]
  const int32_t* node;       // [T]
  const int32_t* parent;     // [S, N]
  const int32_t* depth;      // [S, N]
  const int32_t* prefix_len; // [S]
  void* out;                 // Float [T, H, C]
  int64_t num_rows, num_heads, latent_dim, rope_dim, num_streams, num_slots, num_tree_slots;  // T H C R S P N
  float scale;
  Dtype dtype;
  int32_t num_threads;
  const int32_t* num_rows_device;  // or nullptr: only the first *num_rows_device rows are in use
  void* workspace;           // CUDA: aligned to 256
  int64_t workspace_bytes;   // below verify_attn_cuda_workspace_bytes(args): the rows are done in several launches
};

// --- block drafters -------------------------------------------------------------------------------------------------

// What a drafter remembers of T committed tokens, in all of its layers: each head of a key is normalised (as rms_norm, with
// its layer's weights), turned by the angle of its position (as rope) and only then rounded.
struct ContextAppendArgs {
  const void* kv;            // Float [T, 2, Y, K, d]: keys of all layers, then values
  const void* key_norm;      // Float [Y, d]
  const float* cos_sin;      // f32 [Q, d]: d/2 cosines, then d/2 sines, by absolute position
  const int32_t* stream;     // [T]
  const int32_t* position;   // [T]; -1: no token, nothing is written and its stream is not looked at
  void* keys;                // Float [S, P, Y, K, d], by position
  void* values;              // Float [S, P, Y, K, d]
  int64_t num_rows, num_layers, num_heads, dim, num_streams, num_slots, num_positions;   // T Y K d S P Q
  float eps;
  Dtype dtype;
  int32_t num_threads;
};

// One layer's attention of A blocks of b tokens behind their contexts. Queries and keys of the block are normalised, turned
// and rounded as in ContextAppendArgs; positions are prefix_len + 0 … b - 1. A token sees slots 0 … prefix_len - 1 and the
// block; where `causal`, not what stands behind it; with a window, only what stands less than that away from it. Several
// blocks may belong to one stream. Slots that no token of a block sees are not read. On CUDA a stream or prefix_len that
// cannot be makes a block NaN.
struct BlockAttnArgs {
  const void* qkv;           // Float [A, b, H + 2K, d]: queries, keys, values
  const void* query_norm;    // Float [d]
  const void* key_norm;      // Float [d]
  const float* cos_sin;      // f32 [Q, d]
  const void* keys;          // Float [S, P, Y, K, d], see ContextAppendArgs
  const void* values;        // Float [S, P, Y, K, d]
  const int32_t* stream;     // [A]
  const int32_t* prefix_len; // [A]
  void* out;                 // Float [A, b, H, d]
  int64_t num_blocks, block_size, num_heads, num_kv_heads, dim;           // A b H K d
  int64_t num_streams, num_slots, num_layers, layer, num_positions;       // S P Y, of these 0 … Y - 1, Q
  int64_t window;            // 0: none
  float eps, scale;          // of the scores
  Dtype dtype;
  int32_t num_threads;
  bool causal;
};

// --- draft trees ---------------------------------------------------------------------------------------------------

struct DraftTopkArgs {       // log-softmax over V and its K largest, equal logits: lower id first
  const void* logits;        // Float [B, L, V]
  float* log_probs;          // f32 [B, L, K], never above 0
  int64_t* token_ids;        // [B, L, K]
  int64_t num_rows, vocab_size, num_candidates;   // num_rows = B * L
  Dtype dtype;
  int32_t num_threads;
  void* workspace;           // CUDA: draft_topk_cuda_workspace_bytes(args) bytes, aligned to 256
  // Where num_segments is not 0: the logits are those segments of a vocabulary of whole_vocab tokens (see LinearArgs), K is at
  // most whole_vocab, and `words` gets what draft_topk_merge needs of them; log_probs and token_ids are not written.
  int64_t* words;            // [B, L, K + num_segments] as vocabulary.h makes them: candidates, best first, then segments
  int64_t whole_vocab;
  int32_t first_segment, num_segments;
};

struct DraftTopkMergeArgs {  // log-softmax and its K largest, from the words of P ranks in order of their segments
  const int64_t* words;      // [P, B, L, K + 8 / P], P = 1, 2, 4 or 8
  float* log_probs;          // f32 [B, L, K]
  int64_t* token_ids;        // [B, L, K]
  int64_t num_partials, num_rows, num_candidates;   // num_rows = B * L
  int32_t num_threads;
};

struct TreeBuildArgs {       // the budget[b] heaviest prefixes, best first; see DraftTree for the outputs
  const float* log_probs;    // f32 [B, L, K]
  const int64_t* token_ids;  // [B, L, K]
  const int64_t* bonus;      // [B]
  const int32_t* budget;     // [B], 0 … max_budget
  int64_t* token;            // [B, N]
  int32_t* parent;           // [B, N]
  int32_t* depth;            // [B, N]
  double* log_prob;          // [B, N]
  int64_t* ancestor_bits;    // [B, N, ceil(N/64)]
  int32_t* num_nodes;        // [B]
  int32_t* status;           // [B] Status per stream
  int64_t num_streams, max_depth, num_candidates, max_budget;   // B L K N-1
};

struct TreeRowsArgs {        // flatten the nodes in use into the rows of one forward pass
  const int64_t* token;      // [B, N]
  const int32_t* depth;      // [B, N]
  const int32_t* num_nodes;  // [B]; 0 skips a stream
  const int32_t* prefix_len; // [B]
  int32_t* row_stream;       // [T]
  int32_t* row_node;         // [T]
  int32_t* row_position;     // [T] prefix_len + depth
  int32_t* row_slot;         // [T] prefix_len + node
  int64_t* row_token;        // [T]
  int64_t num_streams, num_tree_slots;
  int32_t* row_begin;        // [B] first row of each stream, or nullptr
  int32_t* num_rows_device;  // [1] number of rows, or nullptr; the rest of the B * N rows become fillers (-1)
};

struct TreeAcceptArgs {      // follow the child whose token is the target's choice, from the root
  const int64_t* token;           // [B, N]
  const int32_t* parent;          // [B, N]
  const int32_t* num_nodes;       // [B]; 0 skips a stream (nothing accepted, next_token -1)
  const int64_t* target_token;    // [B, N]; see row_begin
  int32_t* accepted_path;         // [B, L] padded with -1
  int32_t* num_accepted;          // [B]
  int64_t* next_token;            // [B]
  int64_t num_streams, num_tree_slots, max_depth;   // B N L
  const int32_t* row_begin;       // [B] or nullptr. If given, target_token is [T] and node n is row row_begin[b] + n
};

// A verified step ends: each active stream emits the target's choices along its accepted path, the root's first, up to
// one that ends the text or is the last that it may still emit. Those become text, prefix_len grows by their number, the
// last of them is the next bonus token, and a stream that has ended is no longer active. A choice of -1 (the logits held a
// NaN) and an active stream whose tree has no nodes (its candidates were refused) end the stream with a status. The record
// says what the host must know; a stream that is not active emits nothing, so steps after the last one do no harm.
struct StepCommitArgs {
  const int32_t* accepted_path;   // [S, L], see TreeAcceptArgs
  const int32_t* num_accepted;    // [S]
  const int32_t* num_nodes;       // [S]; may be the array `active`
  const int64_t* target_token;    // [T]
  const int32_t* row_begin;       // [S] the row of each stream's root
  const uint8_t* is_stop;         // [V] 1 where a token ends the text
  int32_t* prefix_len;            // [S] in and out, like the next four
  int64_t* bonus;                 // [S]
  int32_t* remaining;             // [S] tokens that may still be emitted
  int32_t* active;                // [S] 1 or 0
  int64_t* text;                  // [S, P] committed tokens; text[prefix_len] is the bonus token
  int64_t* ring;                  // [R, kRecordToken + 1 + L, S]; record step % R is written, its unused tokens are -1
  int64_t* step;                  // [1] steps so far; grows by one
  int64_t num_streams, max_depth, num_rows, vocab_size, num_text_slots, ring_size;   // S L T V P R
};

// What a drafter that wants hidden states is given of a verified step: those of the root and of the accepted nodes of each
// active stream, the outputs of num_layers layers side by side. Where there is no token (a stream that is not active, or
// behind its path) features are zeros, stream and position -1. On CUDA a token whose row lies outside has features of NaN
// and position -1.
struct AcceptedFeaturesArgs {
  const void* hidden_0;           // Float [T, D], behind the first of the layers; from the num_layers-th on not looked at
  const void* hidden_1;           // Float [T, D], and so on
  const void* hidden_2;
  const void* hidden_3;
  const void* hidden_4;
  const void* hidden_5;
  const void* hidden_6;
  const void* hidden_7;
  const int32_t* first_row;       // [S] the row of each stream's root
  const int32_t* prefix_len;      // [S] its position
  const int32_t* accepted_path;   // [S, L], see TreeAcceptArgs
  const int32_t* num_accepted;    // [S]
  const int32_t* active;          // [S] 1 or 0
  void* features;                 // Float [S, L + 1, num_layers, D]
  int32_t* stream;                // [S, L + 1]
  int32_t* position;              // [S, L + 1]
  int64_t num_layers, num_rows, num_streams, max_depth, dim;   // 1 … 8, T S L D
  Dtype dtype;
};

#ifdef __cplusplus

int embed_cpu(const EmbedArgs&);
int rms_norm_cpu(const RmsNormArgs&);
int pack_linear_cpu(const PackLinearArgs&);
int dequantize_int4_cpu(const DequantizeInt4Args&);
int pack_int4_cpu(const PackInt4Args&);
int linear_cpu(const LinearArgs&);
int rope_cpu(const RopeArgs&);
int swiglu_cpu(const SwigluArgs&);
int add_partials_cpu(const AddPartialsArgs&);
int residual_add_cpu(const ResidualAddArgs&);
int argmax_cpu(const ArgmaxArgs&);
int sample_cpu(const SampleArgs&);
int sample_among_cpu(const SampleAmongArgs&);
int moe_route_cpu(const MoeRouteArgs&);
int moe_experts_cpu(const MoeExpertsArgs&);
int cache_append_cpu(const CacheAppendArgs&);
int latent_append_cpu(const LatentAppendArgs&);
int absorb_query_cpu(const AbsorbQueryArgs&);
int cache_compact_cpu(const CacheCompactArgs&);
int verify_attn_cpu(const VerifyAttnArgs&);
int context_append_cpu(const ContextAppendArgs&);
int block_attn_cpu(const BlockAttnArgs&);
int draft_topk_cpu(const DraftTopkArgs&);
int draft_topk_merge_cpu(const DraftTopkMergeArgs&);
int tree_build_cpu(const TreeBuildArgs&);
int tree_rows_cpu(const TreeRowsArgs&);
int tree_accept_cpu(const TreeAcceptArgs&);
int step_commit_cpu(const StepCommitArgs&);
int accepted_features_cpu(const AcceptedFeaturesArgs&);

int embed_cuda(const EmbedArgs&, void* stream);
int rms_norm_cuda(const RmsNormArgs&, void* stream);
int pack_linear_cuda(const PackLinearArgs&, void* stream);
int dequantize_int4_cuda(const DequantizeInt4Args&, void* stream);
int pack_int4_cuda(const PackInt4Args&, void* stream);
int linear_cuda(const LinearArgs&, void* stream);
int rope_cuda(const RopeArgs&, void* stream);
int swiglu_cuda(const SwigluArgs&, void* stream);
int add_partials_cuda(const AddPartialsArgs&, void* stream);
int residual_add_cuda(const ResidualAddArgs&, void* stream);
int argmax_cuda(const ArgmaxArgs&, void* stream);
int sample_cuda(const SampleArgs&, void* stream);
int sample_among_cuda(const SampleAmongArgs&, void* stream);
int moe_route_cuda(const MoeRouteArgs&, void* stream);
int moe_experts_cuda(const MoeExpertsArgs&, void* stream);
int cache_append_cuda(const CacheAppendArgs&, void* stream);
int latent_append_cuda(const LatentAppendArgs&, void* stream);
int absorb_query_cuda(const AbsorbQueryArgs&, void* stream);
int cache_compact_cuda(const CacheCompactArgs&, void* stream);
int verify_attn_cuda(const VerifyAttnArgs&, void* stream);
int context_append_cuda(const ContextAppendArgs&, void* stream);
int block_attn_cuda(const BlockAttnArgs&, void* stream);
int draft_topk_cuda(const DraftTopkArgs&, void* stream);
int draft_topk_merge_cuda(const DraftTopkMergeArgs&, void* stream);
int tree_build_cuda(const TreeBuildArgs&, void* stream);
int tree_rows_cuda(const TreeRowsArgs&, void* stream);
int tree_accept_cuda(const TreeAcceptArgs&, void* stream);
int step_commit_cuda(const StepCommitArgs&, void* stream);
int accepted_features_cuda(const AcceptedFeaturesArgs&, void* stream);
int64_t moe_experts_cuda_workspace_bytes(const MoeExpertsArgs&);
int64_t verify_attn_cuda_workspace_bytes(const VerifyAttnArgs&);
int64_t draft_topk_cuda_workspace_bytes(const DraftTopkArgs&);

}  // namespace kdtree

#else
#undef Dtype
#undef Scoring
#endif
