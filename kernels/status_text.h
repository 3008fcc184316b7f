// What a kernel's status says about the arguments, for messages.
#pragma once
#include "op_args.h"

namespace kdtree {

constexpr int64_t kMaxSize = int64_t{1} << 40;  // of a size that an argument gives: products do not overflow soon

inline const char* status_text(int status) {
  switch (status) {
    case kInvalidCandidates:
      return "expected log-probs that are non-increasing, at most 0 and free of NaN, and token ids that are not "
             "negative and differ within a row";
    case kNonFinite: return "expected logits below +inf and free of NaN";
    case kInvalidTree: return "expected a parent index from 0 up to below the node's own index, and a depth one more";
    case kOutOfRange: return "expected token ids, slots and positions inside their arrays";
    case kUnsupported: return "this combination of types and sizes has no kernel";
    default: return "the kernel returned an unknown status";
  }
}

}  // namespace kdtree
