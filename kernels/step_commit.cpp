// step_commit: what a verified step emits, and the state from which the next step starts. One stream after the other.
#include "op_args.h"

namespace kdtree {
namespace {

// Row of the j-th choice along the accepted path, the root's first; -1 if it lies outside.
int64_t row_of(const StepCommitArgs& a, int64_t s, int64_t j) {
  const int64_t node = j == 0 ? 0 : a.accepted_path[s * a.max_depth + j - 1];
  const int64_t row = a.row_begin[s] + node;
  return node >= 0 && node < a.num_nodes[s] && row >= 0 && row < a.num_rows ? row : -1;
}

// Everything that a stream's commit reads lies inside its array.
int check_stream(const StepCommitArgs& a, int64_t s) {
  if (!a.active[s] || a.num_nodes[s] == 0) return kOk;
  if (a.num_accepted[s] < 0 || a.num_accepted[s] > a.max_depth || a.remaining[s] < 1) return kOutOfRange;
  if (a.prefix_len[s] < 0 || a.prefix_len[s] + int64_t{a.num_accepted[s]} + 1 >= a.num_text_slots) return kOutOfRange;
  for (int64_t j = 0; j <= a.num_accepted[s]; ++j) {
    const int64_t row = row_of(a, s, j);
    if (row < 0 || a.target_token[row] >= a.vocab_size) return kOutOfRange;
  }
  return kOk;
}

void commit_stream(const StepCommitArgs& a, int64_t s, int64_t* record) {
  const auto field = [&](int64_t i) -> int64_t& { return record[i * a.num_streams + s]; };
  const bool drafted = a.active[s] && a.num_nodes[s] > 0;
  field(kRecordNodes) = drafted ? a.num_nodes[s] : 0;
  field(kRecordAccepted) = drafted ? a.num_accepted[s] : 0;
  int status = a.active[s] && !drafted ? kInvalidCandidates : kOk;
  int64_t count = 0;
  bool goes_on = drafted;
  for (int64_t j = 0; goes_on && j <= a.num_accepted[s]; ++j) {
    const int64_t token = a.target_token[row_of(a, s, j)];
    if (token < 0) {
      status = kNonFinite;
      goes_on = false;
      break;
    }
    field(kRecordToken + count++) = token;
    a.text[s * a.num_text_slots + a.prefix_len[s] + count] = a.bonus[s] = token;
    goes_on = !a.is_stop[token] && count < a.remaining[s];
  }
  for (int64_t j = count; j <= a.max_depth; ++j) field(kRecordToken + j) = -1;
  field(kRecordEmitted) = count;
  field(kRecordStatus) = status;
  a.prefix_len[s] += int32_t(count);
  a.remaining[s] -= int32_t(count);
  a.active[s] = goes_on;
}

}  // namespace

int step_commit_cpu(const StepCommitArgs& a) {
  if (a.ring_size < 1) return kUnsupported;
  for (int64_t s = 0; s < a.num_streams; ++s)
    if (const int status = check_stream(a, s)) return status;
  int64_t* record = a.ring + *a.step % a.ring_size * (kRecordToken + 1 + a.max_depth) * a.num_streams;
  for (int64_t s = 0; s < a.num_streams; ++s) commit_stream(a, s, record);
  ++*a.step;
  return kOk;
}

}  // namespace kdtree
