/* The kernels from a C program: C99, kdtree.h alone. It builds a draft tree from the goldens' logits, walks it with the
 * goldens' tokens, and checks attention and a linear layer: rows of a batch give the same bits as rows alone.
 *
 *   example data/goldens/tiny.kdtr data/tiny.kdtr [--device cpu|cuda]
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kdtree.h"

/* --- small helpers: this program ends at the first error -------------------------------------------------------- */

static kdtree_device device; /* where everything runs */

static void expect(kdtree_status status) {
  if (status == KDTREE_OK) return;
  fprintf(stderr, "%s: %s\n", kdtree_status_string(status), kdtree_last_error());
  exit(1);
}

static void check(int holds, const char* what) {
  printf("%-6s %s\n", holds ? "ok" : "FAILED", what);
  if (!holds) exit(1);
}

/* New memory of the device, filled from the host where `from` is not NULL. */
static void* on_device(const void* from, size_t num_bytes) {
  void* memory = NULL;
  expect(kdtree_malloc(&device, (int64_t)num_bytes, &memory));
  if (from != NULL) {
    expect(kdtree_copy(&device, memory, from, (int64_t)num_bytes));
    expect(kdtree_synchronize(&device));
  }
  return memory;
}

/* Copies back what lies on the device, when the work on it is done. */
static void to_host(void* to, const void* from, size_t num_bytes) {
  expect(kdtree_copy(&device, to, from, (int64_t)num_bytes));
  expect(kdtree_synchronize(&device));
}

static void release(void* memory) { expect(kdtree_free(&device, memory)); }

static kdtree_kdtr_tensor tensor_of(const kdtree_kdtr* file, const char* name, const char* dtype, int rank) {
  kdtree_kdtr_tensor tensor;
  expect(kdtree_kdtr_find(file, name, &tensor));
  if (strcmp(tensor.dtype, dtype) != 0 || tensor.rank != rank) {
    fprintf(stderr, "%s: expected %s of rank %d, got %s of rank %d\n", name, dtype, rank, tensor.dtype, tensor.rank);
    exit(1);
  }
  return tensor;
}

/* A value in -1 … 1 for every index, the same on every machine. */
static float noise(uint32_t index) {
  uint32_t x = index * 2654435761u + 12345u;
  x ^= x >> 15, x *= 2246822519u, x ^= x >> 13;
  return (float)(x >> 8) / 8388608.0f - 1.0f;
}

static void fill(float* values, int count, uint32_t seed) {
  for (int i = 0; i < count; ++i) values[i] = noise(seed + (uint32_t)i);
}

/* --- a draft tree from the goldens' logits, accepted by the goldens' tokens ------------------------------------- */

enum { DEPTH = 6, CANDIDATES = 16, BUDGET = 24, SLOTS = BUDGET + 1, BATCH = 2 };

typedef struct {
  int64_t token[BATCH * SLOTS];
  int32_t parent[BATCH * SLOTS], depth[BATCH * SLOTS], num_nodes[BATCH];
} trees;

/* logits [rows, V]: row i is what the target computed before it chose tokens[i]. Both streams get the same drafts; the
 * second has a budget of half. */
static trees draft(const float* logits, int64_t vocab_size, const int64_t* tokens) {
  const size_t drafts = BATCH * DEPTH * CANDIDATES, nodes = BATCH * SLOTS;
  float* twice = malloc(sizeof(float) * BATCH * DEPTH * (size_t)vocab_size);
  for (int b = 0; b < BATCH; ++b)
    memcpy(twice + b * DEPTH * vocab_size, logits + vocab_size, sizeof(float) * DEPTH * (size_t)vocab_size);

  kdtree_draft_topk_args topk = {0};
  topk.logits = on_device(twice, sizeof(float) * BATCH * DEPTH * (size_t)vocab_size);
  topk.log_probs = on_device(NULL, sizeof(float) * drafts);
  topk.token_ids = on_device(NULL, sizeof(int64_t) * drafts);
  topk.num_rows = BATCH * DEPTH, topk.vocab_size = vocab_size, topk.num_candidates = CANDIDATES;
  int64_t workspace_bytes = 0;
  expect(kdtree_draft_topk_workspace_bytes(&topk, &device, &workspace_bytes));
  topk.workspace = on_device(NULL, (size_t)workspace_bytes);
  expect(kdtree_draft_topk(&topk, &device));

  const int64_t bonus[BATCH] = {tokens[0], tokens[0]};
  const int32_t budget[BATCH] = {BUDGET, BUDGET / 2};
  kdtree_tree_build_args build = {0};
  build.log_probs = topk.log_probs, build.token_ids = topk.token_ids;
  build.bonus = on_device(bonus, sizeof bonus), build.budget = on_device(budget, sizeof budget);
  build.token = on_device(NULL, sizeof(int64_t) * nodes), build.parent = on_device(NULL, sizeof(int32_t) * nodes);
  build.depth = on_device(NULL, sizeof(int32_t) * nodes), build.log_prob = on_device(NULL, sizeof(double) * nodes);
  build.ancestor_bits = on_device(NULL, sizeof(int64_t) * nodes * ((SLOTS + 63) / 64));
  build.num_nodes = on_device(NULL, sizeof(int32_t) * BATCH), build.status = on_device(NULL, sizeof(int32_t) * BATCH);
  build.num_streams = BATCH, build.max_depth = DEPTH, build.num_candidates = CANDIDATES, build.max_budget = BUDGET;
  expect(kdtree_tree_build(&build, &device));

  trees out;
  to_host(out.token, build.token, sizeof out.token);
  to_host(out.parent, build.parent, sizeof out.parent);
  to_host(out.depth, build.depth, sizeof out.depth);
  to_host(out.num_nodes, build.num_nodes, sizeof out.num_nodes);
  release((void*)topk.logits), release(topk.log_probs), release(topk.token_ids), release(topk.workspace);
  release((void*)build.bonus), release((void*)build.budget), release(build.token), release(build.parent);
  release(build.depth), release(build.log_prob), release(build.ancestor_bits), release(build.num_nodes);
  release(build.status);
  free(twice);
  return out;
}

/* What the target would say after each node: the goldens' token at its depth, which only nodes on its path deserve. */
static void accept(const trees* drafted, const int64_t* tokens, int32_t* path, int32_t* num_accepted,
                   int64_t* next_token) {
  int64_t target[BATCH * SLOTS];
  for (int i = 0; i < BATCH * SLOTS; ++i) target[i] = drafted->depth[i] < 0 ? -1 : tokens[drafted->depth[i] + 1];
  kdtree_tree_accept_args args = {0};
  args.token = on_device(drafted->token, sizeof drafted->token);
  args.parent = on_device(drafted->parent, sizeof drafted->parent);
  args.num_nodes = on_device(drafted->num_nodes, sizeof drafted->num_nodes);
  args.target_token = on_device(target, sizeof target);
  args.accepted_path = on_device(NULL, sizeof(int32_t) * BATCH * DEPTH);
  args.num_accepted = on_device(NULL, sizeof(int32_t) * BATCH);
  args.next_token = on_device(NULL, sizeof(int64_t) * BATCH);
  args.num_streams = BATCH, args.num_tree_slots = SLOTS, args.max_depth = DEPTH;
  expect(kdtree_tree_accept(&args, &device));
  to_host(path, args.accepted_path, sizeof(int32_t) * BATCH * DEPTH);
  to_host(num_accepted, args.num_accepted, sizeof(int32_t) * BATCH);
  to_host(next_token, args.next_token, sizeof(int64_t) * BATCH);
  release((void*)args.token), release((void*)args.parent), release((void*)args.num_nodes);
  release((void*)args.target_token), release(args.accepted_path), release(args.num_accepted), release(args.next_token);
}

static trees check_trees(const float* logits, int64_t vocab_size, const int64_t* tokens) {
  const trees drafted = draft(logits, vocab_size, tokens);
  check(drafted.num_nodes[0] == SLOTS && drafted.num_nodes[1] == 1 + BUDGET / 2, "tree_build spends the budgets");
  int same = 1;
  for (int i = 0; i < drafted.num_nodes[1]; ++i)
    same = same && drafted.token[i] == drafted.token[SLOTS + i] && drafted.parent[i] == drafted.parent[SLOTS + i];
  check(same, "the smaller tree is the beginning of the larger one");
  int32_t path[BATCH * DEPTH], num_accepted[BATCH];
  int64_t next_token[BATCH];
  accept(&drafted, tokens, path, num_accepted, next_token);
  same = num_accepted[0] >= 1 && num_accepted[0] >= num_accepted[1];
  for (int b = 0; b < BATCH; ++b) {
    for (int j = 0; j < num_accepted[b]; ++j)
      same = same && drafted.token[b * SLOTS + path[b * DEPTH + j]] == tokens[j + 1];
    same = same && next_token[b] == tokens[num_accepted[b] + 1];
  }
  printf("       %d and %d tokens accepted\n", num_accepted[0], num_accepted[1]);
  check(same, "tree_accept finds the goldens' tokens");
  return drafted;
}

static void check_argmax(const float* logits, int64_t num_rows, int64_t vocab_size, const int64_t* tokens) {
  int64_t found[64];
  kdtree_argmax_args args = {0};
  args.logits = on_device(logits, sizeof(float) * (size_t)(num_rows * vocab_size));
  args.token = on_device(NULL, sizeof found);
  args.num_rows = num_rows, args.vocab_size = vocab_size;
  expect(kdtree_argmax(&args, &device));
  to_host(found, args.token, sizeof(int64_t) * (size_t)num_rows);
  const int same = memcmp(found, tokens, sizeof(int64_t) * (size_t)num_rows) == 0;
  check(same, "argmax of the goldens' logits is their tokens");
  release((void*)args.logits), release(args.token);
}

/* --- attention of the tree over a latent cache ------------------------------------------------------------------ */

enum { HEADS = 4, LATENT = 64, ROPE = 16, WIDTH = LATENT + ROPE, PREFIX = 77, CACHE_SLOTS = PREFIX + SLOTS };

typedef struct {
  float q_latent[SLOTS * HEADS * LATENT], q_rope[SLOTS * HEADS * ROPE], cache[CACHE_SLOTS * WIDTH];
  int32_t stream[SLOTS], node[SLOTS];
} attention;

/* The rows first … first + num_rows of the tree of stream 0. */
static void attend(const attention* in, const trees* drafted, int first, int num_rows, float* out) {
  const int32_t prefix_len = PREFIX;
  const size_t out_bytes = sizeof(float) * (size_t)num_rows * HEADS * LATENT;
  kdtree_verify_attn_args args = {0};
  args.q_latent = on_device(in->q_latent + first * HEADS * LATENT, out_bytes);
  args.q_rope = on_device(in->q_rope + first * HEADS * ROPE, sizeof(float) * (size_t)num_rows * HEADS * ROPE);
  args.cache = on_device(in->cache, sizeof in->cache);
  args.stream = on_device(in->stream, sizeof(int32_t) * (size_t)num_rows);
  args.node = on_device(in->node + first, sizeof(int32_t) * (size_t)num_rows);
  args.parent = on_device(drafted->parent, sizeof(int32_t) * SLOTS);
  args.depth = on_device(drafted->depth, sizeof(int32_t) * SLOTS);
  args.prefix_len = on_device(&prefix_len, sizeof prefix_len);
  args.out = on_device(NULL, out_bytes);
  args.num_rows = num_rows, args.num_heads = HEADS, args.latent_dim = LATENT, args.rope_dim = ROPE;
  args.num_streams = 1, args.num_slots = CACHE_SLOTS, args.num_tree_slots = SLOTS;
  args.scale = 0.125f;
  expect(kdtree_verify_attn_workspace_bytes(&args, &device, &args.workspace_bytes));
  args.workspace = on_device(NULL, (size_t)args.workspace_bytes);
  expect(kdtree_verify_attn(&args, &device));
  to_host(out, args.out, out_bytes);
  release((void*)args.q_latent), release((void*)args.q_rope), release((void*)args.cache), release((void*)args.stream);
  release((void*)args.node), release((void*)args.parent), release((void*)args.depth), release((void*)args.prefix_len);
  release(args.out), release(args.workspace);
}

/* Softmax in double over the prefix and the node's ancestors; the largest difference from `out`. */
static double attention_error(const attention* in, const trees* drafted, const float* out) {
  double largest = 0;
  for (int row = 0; row < SLOTS; ++row)
    for (int head = 0; head < HEADS; ++head) {
      double sum = 0, expected[LATENT] = {0};
      for (int slot = 0; slot < CACHE_SLOTS; ++slot) {
        int seen = slot < PREFIX;
        for (int node = row; node >= 0 && !seen; node = drafted->parent[node]) seen = slot == PREFIX + node;
        if (!seen) continue;
        const float* key = in->cache + slot * WIDTH;
        double score = 0;
        for (int k = 0; k < LATENT; ++k) score += (double)in->q_latent[(row * HEADS + head) * LATENT + k] * key[k];
        for (int k = 0; k < ROPE; ++k) score += (double)in->q_rope[(row * HEADS + head) * ROPE + k] * key[LATENT + k];
        const double weight = exp(0.125 * score);
        sum += weight;
        for (int k = 0; k < LATENT; ++k) expected[k] += weight * key[k];
      }
      for (int k = 0; k < LATENT; ++k) {
        const double error = fabs(expected[k] / sum - out[(row * HEADS + head) * LATENT + k]);
        largest = error <= largest ? largest : error; /* a NaN is the largest */
      }
    }
  return largest;
}

static void check_attention(const trees* drafted) {
  static attention in;
  static float all[SLOTS * HEADS * LATENT], alone[HEADS * LATENT];
  fill(in.q_latent, SLOTS * HEADS * LATENT, 1u << 20);
  fill(in.q_rope, SLOTS * HEADS * ROPE, 2u << 20);
  fill(in.cache, CACHE_SLOTS * WIDTH, 3u << 20);
  for (int i = 0; i < SLOTS; ++i) in.stream[i] = 0, in.node[i] = i;
  attend(&in, drafted, 0, SLOTS, all);
  const double error = attention_error(&in, drafted, all);
  printf("       largest difference from softmax in double: %.1e\n", error);
  check(error < 1e-5, "verify_attn attends to the prefix and to ancestors");
  int same = 1;
  for (int row = 0; row < SLOTS; ++row) {
    attend(&in, drafted, row, 1, alone);
    same = same && memcmp(alone, all + row * HEADS * LATENT, sizeof alone) == 0;
  }
  check(same, "verify_attn gives a node alone the bits that it has in the tree");
}

/* --- the output layer of the model ------------------------------------------------------------------------------ */

static float widen(uint16_t bits) {
  const uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

/* out [num_rows, N] = x [num_rows, K] W^T, from BF16 with F32 results. */
static void project(const uint16_t* x, int64_t num_rows, void* packed, int64_t num_out, int64_t num_in, float* out) {
  const size_t out_bytes = sizeof(float) * (size_t)(num_rows * num_out);
  kdtree_linear_args args = {0};
  args.x = on_device(x, sizeof(uint16_t) * (size_t)(num_rows * num_in));
  args.packed = packed;
  args.out = on_device(NULL, out_bytes);
  args.num_rows = num_rows, args.num_groups = 1, args.num_out = num_out, args.num_in = num_in;
  args.x_row_stride = num_in;
  args.dtype = KDTREE_BF16, args.out_dtype = KDTREE_F32;
  expect(kdtree_linear(&args, &device));
  to_host(out, args.out, out_bytes);
  release((void*)args.x), release(args.out);
}

static void check_linear(const kdtree_kdtr* model) {
  const kdtree_kdtr_tensor weight = tensor_of(model, "lm_head.weight", "bf16", 2);
  const kdtree_kdtr_tensor embedding = tensor_of(model, "model.embed_tokens.weight", "bf16", 2);
  const int64_t num_out = weight.shape[0], num_in = weight.shape[1], num_rows = 33;
  kdtree_pack_linear_args pack = {0};
  pack.weight = on_device(weight.data, (size_t)weight.num_bytes);
  pack.num_groups = 1, pack.num_out = num_out, pack.num_in = num_in;
  pack.dtype = KDTREE_BF16;
  int64_t packed_bytes = 0;
  expect(kdtree_pack_linear_packed_bytes(&pack, &device, &packed_bytes));
  pack.packed = on_device(NULL, (size_t)packed_bytes);
  expect(kdtree_pack_linear(&pack, &device));

  const uint16_t *x = embedding.data, *w = weight.data;
  float* all = malloc(sizeof(float) * (size_t)(num_rows * num_out));
  float* alone = malloc(sizeof(float) * (size_t)num_out);
  project(x, num_rows, pack.packed, num_out, num_in, all);
  int close = 1, same = 1;
  for (int64_t row = 0; row < num_rows; ++row) {
    for (int64_t n = 0; n < num_out; ++n) {
      double sum = 0, size = 0;
      for (int64_t k = 0; k < num_in; ++k) {
        const double term = (double)widen(x[row * num_in + k]) * widen(w[n * num_in + k]);
        sum += term, size += fabs(term);
      }
      close = close && fabs(sum - all[row * num_out + n]) <= 2e-6 * size; /* false for NaN */
    }
    project(x + row * num_in, 1, pack.packed, num_out, num_in, alone);
    same = same && memcmp(alone, all + row * num_out, sizeof(float) * (size_t)num_out) == 0;
  }
  check(close, "linear computes the model's output layer");
  check(same, "linear gives a row alone the bits that it has among 33");
  free(all), free(alone);
  release((void*)pack.weight), release(pack.packed);
}

/* --- what is refused -------------------------------------------------------------------------------------------- */

static void check_refusals(void) {
  kdtree_argmax_args args = {0};
  args.num_rows = 1, args.vocab_size = 8;
  const kdtree_status status = kdtree_argmax(&args, &device);
  printf("       %s\n", kdtree_last_error());
  check(status == KDTREE_INVALID_ARGUMENT && strstr(kdtree_last_error(), "argmax: logits: expected") != NULL,
        "a null pointer is an error with a message");
}

int main(int argc, char** argv) {
  const int is_cuda = argc == 5 && strcmp(argv[3], "--device") == 0 && strcmp(argv[4], "cuda") == 0;
  const int is_cpu = argc == 3 || (argc == 5 && strcmp(argv[3], "--device") == 0 && strcmp(argv[4], "cpu") == 0);
  if (!is_cpu && !is_cuda) {
    fprintf(stderr, "usage: %s data/goldens/tiny.kdtr data/tiny.kdtr [--device cpu|cuda]\n", argv[0]);
    return 2;
  }
  if (kdtree_abi_version() != KDTREE_ABI_VERSION) {
    fprintf(stderr, "expected a library of ABI %d, got %d\n", KDTREE_ABI_VERSION, (int)kdtree_abi_version());
    return 1;
  }
  device.kind = is_cuda ? KDTREE_CUDA : KDTREE_CPU;
  expect(kdtree_create_stream(&device));
  kdtree_device_info info;
  expect(kdtree_get_device_info(&device, &info));
  printf("kdtree %s on %s\n", kdtree_version(), info.name);

  kdtree_kdtr *goldens = NULL, *model = NULL;
  expect(kdtree_kdtr_open(argv[1], &goldens));
  expect(kdtree_kdtr_open(argv[2], &model));
  const kdtree_kdtr_tensor tokens = tensor_of(goldens, "read_config.tokens", "i64", 1);
  const kdtree_kdtr_tensor logits = tensor_of(goldens, "read_config.logits", "f64", 2);
  const int64_t num_rows = logits.shape[0], vocab_size = logits.shape[1];
  check(num_rows > DEPTH + 1 && num_rows <= 64 && tokens.shape[0] >= num_rows, "the goldens have enough rows");
  float* narrow = malloc(sizeof(float) * (size_t)(num_rows * vocab_size));
  for (int64_t i = 0; i < num_rows * vocab_size; ++i) narrow[i] = (float)((const double*)logits.data)[i];

  check_argmax(narrow, num_rows, vocab_size, tokens.data);
  const trees drafted = check_trees(narrow, vocab_size, tokens.data);
  check_attention(&drafted);
  check_linear(model);
  check_refusals();

  free(narrow);
  kdtree_kdtr_close(goldens), kdtree_kdtr_close(model);
  expect(kdtree_destroy_stream(&device));
  printf("all ok\n");
  return 0;
}
