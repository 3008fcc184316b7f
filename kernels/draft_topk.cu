// Log-softmax over the vocabulary and its K largest, in two kernels. `scan` gives a block one of the 8 vocabulary
// segments of a row: its maximum, its sum of exponentials, and every logit that may be among the K largest. `select`
// gives a block the candidates of a row, which it cuts to K and sorts.
//
// A bound from below for the K-th largest logit of a segment is the K-th largest of many disjoint groups' maxima; few
// more than K logits reach it. Order of additions: a thread adds the terms of its chunks of 8 in ascending id, then
// block_sum, then the segments, scaled to the row's maximum, as ((0+1)+(2+3))+((4+5)+(6+7)). It depends on V alone.
#include "draft_topk_select.cuh"
#include "segments.h"

namespace kdtree {

int64_t draft_topk_cuda_workspace_bytes(const DraftTopkArgs& a) {
  return results_bytes(a.num_rows) + a.num_rows * kSegments * kCapacity * int64_t(sizeof(uint64_t));
}

int draft_topk_cuda(const DraftTopkArgs& a, void* stream) {
  if (a.num_candidates < 1 || a.num_candidates > (a.num_segments ? a.whole_vocab : a.vocab_size)) return kOutOfRange;
  if (!SegmentShare{a.whole_vocab, a.first_segment, a.num_segments}.fits(a.vocab_size)) return kUnsupported;
  if (a.num_candidates > kMaxCandidates || a.vocab_size > int64_t{1} << 30 || a.num_rows > 65535) return kUnsupported;
  if (a.num_rows == 0) return kOk;
  char* base = static_cast<char*>(a.workspace);
  Workspace workspace{reinterpret_cast<SegmentResult*>(base),
                      reinterpret_cast<uint64_t*>(base + results_bytes(a.num_rows)), 1};
  while (int64_t{1} << workspace.id_bits < a.vocab_size) ++workspace.id_bits;
  const int status = with_dtype(a.dtype, [&](auto element) {
    const LaunchShape shape{dim3(kSegments, a.num_rows), dim3(kScanThreads), 0, 1, Start::kEarly};
    return launch(scan_kernel<decltype(element)>, shape, stream, a, workspace);
  });
  if (status) return status;
  return launch(select_kernel, {dim3(a.num_rows), dim3(kSelectThreads), 0, 1, Start::kEarly}, stream, a, workspace);
}

}  // namespace kdtree
