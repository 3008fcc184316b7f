// C entry points of decode_layers for run_decode.py, and of verify_attn beside it; where parts of the scratch memory lie.
#include "decode_layers.cu"

using namespace kdtree;

extern "C" int run_decode_layers(const DecodeLayersArgs* a, void* stream) { return decode_layers_cuda(*a, stream); }
extern "C" int64_t bytes_decode_layers(const DecodeLayersArgs* a) { return decode_layers_cuda_workspace_bytes(*a); }
extern "C" int serves_decode_layers(const DecodeLayersArgs* a) { return decode_layers_serves(*a); }
extern "C" int run_verify_attn(const VerifyAttnArgs* a, void* stream) { return verify_attn_cuda(*a, stream); }
extern "C" int64_t bytes_verify_attn(const VerifyAttnArgs* a) { return verify_attn_cuda_workspace_bytes(*a); }

// Bytes from the beginning of the workspace: q_kv, q, q_latent, q_rope, value, hidden, shared_hidden, sums, attention.
extern "C" void scratch_decode_layers(const DecodeLayersArgs* a, int64_t* at) {
  DecodeArgs k{};
  k.a = *a;
  lay_out_scratch(k, nullptr);
  const void* parts[] = {k.scratch.q_kv, k.scratch.q, k.scratch.q_latent, k.scratch.q_rope, k.scratch.value, k.scratch.hidden,
                         k.scratch.shared_hidden, k.scratch.sums, k.attention.tickets};
  for (const void* part : parts) *at++ = reinterpret_cast<int64_t>(part);
}
