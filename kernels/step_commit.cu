// step_commit: what a verified step emits, and the state from which the next step starts. One block; a warp a stream
// looks at 32 choices along the accepted path at once.
#include <algorithm>

#include "cuda_common.cuh"

namespace kdtree {
namespace {

constexpr int kMaxWarps = 32;
constexpr uint32_t kAll = 0xffffffffu;

// The first lane where `condition` holds, or 32.
__device__ __forceinline__ int first_lane(bool condition) {
  const uint32_t lanes = __ballot_sync(kAll, condition);
  return lanes ? __ffs(lanes) - 1 : kWarp;
}

// The j-th choice along the accepted path, the root's first; -1, as for a NaN row, where it lies outside its array.
__device__ __forceinline__ int64_t choice(const StepCommitArgs& a, int64_t s, int64_t j, int num_nodes) {
  const int64_t node = j == 0 ? 0 : a.accepted_path[s * a.max_depth + j - 1];
  const int64_t row = a.row_begin[s] + node;
  if (node < 0 || node >= num_nodes || row < 0 || row >= a.num_rows) return -1;
  const int64_t token = a.target_token[row];
  return token < a.vocab_size ? token : -1;
}

// Whole warp: the stream's part of the record, and its new state.
__device__ void commit_stream(const StepCommitArgs& a, int64_t s, int64_t* record) {
  const int lane = threadIdx.x % kWarp;
  const bool active = a.active[s] != 0;
  const int num_nodes = active ? a.num_nodes[s] : 0;  // may be the same memory as active
  const int num_accepted = num_nodes > 0 ? min(max(a.num_accepted[s], 0), int(a.max_depth)) : 0;
  const int remaining = a.remaining[s];
  const int64_t prefix_len = a.prefix_len[s];
  int status = active && num_nodes <= 0 ? kInvalidCandidates : kOk, count = 0;
  bool goes_on = active && num_nodes > 0;
  int64_t last = -1;
  for (int begin = 0; begin <= a.max_depth; begin += kWarp) {
    const int j = begin + lane;
    const bool accepted = goes_on && j <= num_accepted;
    const int64_t token = accepted ? choice(a, s, j, num_nodes) : -1;
    const bool ends = token >= 0 && (a.is_stop[token] || j + 1 >= remaining);
    // Lanes ascend along the path, so the first lane of each kind bounds what is emitted.
    const int usable = first_lane(token < 0), emitted = min(usable, first_lane(ends) + 1);
    if (j <= a.max_depth) record[(kRecordToken + j) * a.num_streams + s] = lane < emitted ? token : -1;
    if (lane < emitted && prefix_len + 1 + j < a.num_text_slots)
      a.text[s * a.num_text_slots + prefix_len + 1 + j] = token;
    const int64_t lane_token = __shfl_sync(kAll, token, max(emitted - 1, 0));
    if (emitted > 0) last = lane_token;
    count += emitted;
    const bool ended = __any_sync(kAll, ends && lane < emitted);
    if (__any_sync(kAll, accepted && lane == emitted && !ended)) status = kNonFinite;
    goes_on = goes_on && !ended && status == kOk;
  }
  __syncwarp();
  if (lane > 0) return;
  record[kRecordNodes * a.num_streams + s] = num_nodes > 0 ? num_nodes : 0;
  record[kRecordAccepted * a.num_streams + s] = num_accepted;
  record[kRecordEmitted * a.num_streams + s] = count;
  record[kRecordStatus * a.num_streams + s] = status;
  if (count > 0) a.bonus[s] = last;
  a.prefix_len[s] = int32_t(prefix_len + count);
  a.remaining[s] = remaining - count;
  a.active[s] = goes_on;
}

__global__ void __launch_bounds__(kMaxWarps * kWarp) step_commit_kernel(StepCommitArgs a) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const int64_t step = *a.step;
  int64_t* record = a.ring + step % a.ring_size * (kRecordToken + 1 + a.max_depth) * a.num_streams;
  for (int64_t s = threadIdx.x / kWarp; s < a.num_streams; s += blockDim.x / kWarp) commit_stream(a, s, record);
  __syncthreads();  // every warp has read the number of the step
  if (threadIdx.x == 0) *a.step = step + 1;
}

}  // namespace

int step_commit_cuda(const StepCommitArgs& a, void* stream) {
  if (a.ring_size < 1) return kUnsupported;
  if (a.num_streams == 0) return kOk;
  const int num_warps = static_cast<int>(std::min<int64_t>(a.num_streams, kMaxWarps));
  return launch(step_commit_kernel, {dim3(1), dim3(num_warps * kWarp), 0, 1, Start::kEarly}, stream, a);
}

}  // namespace kdtree
