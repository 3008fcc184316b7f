// decode_layers: neighbouring layers of a step of few rows in one launch. One block on each multiprocessor stays from the first
// phase to the last; between phases all blocks meet (decode_meet.cuh). What a launch of its own for every operation costs - a
// wait for the previous one, then for the first bytes of weights - is paid in few places, since weights are on their way long
// before they are needed (decode_ring.cuh).
#include "decode_block.cuh"
#include "verify_attn_launch.cuh"

namespace kdtree {
namespace {

__global__ void __launch_bounds__(kDecodeThreads, 1) decode_layers_kernel(const __grid_constant__ DecodeArgs k) {
  extern __shared__ __align__(1024) unsigned char memory[];
  if (threadIdx.x < kDecodeWarps)
    WeightRing::init_barriers(shared_address(memory) + kBarriersAt + threadIdx.x * kRingSlots * 8);
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  __syncthreads();
  DecodeBlock(k, memory).run();
}

// --- host ----------------------------------------------------------------------------------------------------------

VerifyAttnArgs attention_of(const DecodeArgs& k) {
  const DecodeLayersArgs& a = k.a;
  VerifyAttnArgs v{};
  v.q_latent = k.scratch.q_latent, v.q_rope = k.scratch.q_rope, v.stream = a.stream, v.node = a.node, v.parent = a.parent;
  v.depth = a.depth, v.prefix_len = a.prefix_len, v.num_rows = a.num_rows, v.num_heads = a.num_heads, v.num_streams = 1;
  v.latent_dim = a.latent_dim, v.rope_dim = a.rope_dim, v.num_slots = a.num_slots, v.num_tree_slots = a.num_tree_slots;
  v.scale = a.scale, v.dtype = kBF16, v.num_rows_device = a.num_rows_device;
  return v;
}

// Lays the scratch memory out from `base`; the bytes it takes.
int64_t lay_out_scratch(DecodeArgs& k, char* base) {
  const DecodeLayersArgs& a = k.a;
  int64_t bytes = 256;
  const auto take = [&](auto*& to, int64_t count) {
    to = reinterpret_cast<std::remove_reference_t<decltype(to)>>(base + bytes);
    bytes += align256(count * int64_t(sizeof(*to)));
  };
  k.scratch.num_met = reinterpret_cast<unsigned long long*>(base);
  take(k.scratch.q_kv, a.num_rows * (a.query_dim + a.latent_dim + a.rope_dim));
  take(k.scratch.q, a.num_rows * a.num_heads * (a.nope_dim + a.rope_dim));
  take(k.scratch.q_latent, a.num_rows * a.num_heads * a.latent_dim);
  take(k.scratch.q_rope, a.num_rows * a.num_heads * a.rope_dim);
  take(k.scratch.value, a.num_rows * a.num_heads * a.value_dim);
  take(k.scratch.hidden, a.num_rows * a.top_k * a.width);
  take(k.scratch.shared_hidden, a.num_rows * a.shared_width);
  take(k.scratch.sums, (a.num_experts + 2 * a.shared_width) / kTileOut * kNumSegments * kWarp * 4);
  k.attention.scale_log2 = float(double(a.scale) * 1.4426950408889634);
  return bytes + lay_out(k.attention, attention_of(k), a.num_rows, base + bytes);
}

int map_layer(DecodeMaps& maps, const DecodeLayer& w) {
  constexpr int64_t kUpColumns = 2 * Dims::kWidth / kInt4ColumnOut, kDownColumns = Dims::kDim / kInt4ColumnOut;
  if (const int status = map_int4(maps.gate_up, w.gate_up, Dims::kExperts * kUpColumns * units_of(Dims::kDim))) return status;
  return map_int4(maps.down, w.down, Dims::kExperts * kDownColumns * units_of(Dims::kWidth));
}

bool is_served(const DecodeLayersArgs& a) {
  using D = DecodeDims;
  return a.num_layers <= kMaxDecodeLayers && a.num_rows <= kMaxDecodeRows && a.num_tree_slots <= kFewTreeSlots &&
         a.dim == D::kDim && a.query_dim == D::kQuery && a.latent_dim == D::kLatent && a.nope_dim == D::kNope &&
         a.rope_dim == D::kRope && a.value_dim == D::kValue && a.num_heads == D::kHeads && a.num_experts == D::kExperts &&
         a.top_k == D::kTopK && a.width == D::kWidth && a.shared_width == D::kSharedWidth;
}

}  // namespace

bool decode_layers_serves(const DecodeLayersArgs& a) {
  int device = 0, major = 0, shared = 0;
  if (!is_served(a) || cudaGetDevice(&device) != cudaSuccess) return false;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  return major == 9 && shared >= kDecodeSharedBytes;
}

int64_t decode_layers_cuda_workspace_bytes(const DecodeLayersArgs& a) {
  DecodeArgs k{};
  k.a = a;
  return lay_out_scratch(k, nullptr);
}

int decode_layers_cuda(const DecodeLayersArgs& a, void* stream) {
  if (!decode_layers_serves(a)) return kUnsupported;
  if (a.num_rows == 0 || a.num_layers == 0) return kOk;
  DecodeArgs k{};
  k.a = a, k.costs = kAttnTuning.few;
  lay_out_scratch(k, static_cast<char*>(a.workspace));
  for (int64_t i = 0; i < a.num_layers; ++i)
    for (int p = 0; p < kDecodePointers; ++p)
      reinterpret_cast<int64_t*>(&k.layers[i])[p] = a.pointers[i * kDecodePointers + p];
  for (int64_t i = 0; i < a.num_layers; ++i)
    if (const int status = map_layer(k.maps[i], k.layers[i])) return status;
  int device = 0, num_multiprocessors = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return kCudaError;
  if (cudaDeviceGetAttribute(&num_multiprocessors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) return kCudaError;
  LaunchShape shape;
  shape.grid = dim3(num_multiprocessors), shape.block = dim3(kDecodeThreads), shape.shared_bytes = kDecodeSharedBytes;
  shape.is_cooperative = true;
  return launch(decode_layers_kernel, shape, stream, k);
}

}  // namespace kdtree
