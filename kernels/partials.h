// How many ranks' partial sums add_partials takes: whole segments each, in pairs on the tree over 8 of them.
#pragma once
#include <cstdint>

namespace kdtree {

constexpr int kMaxPartials = 8;

inline bool is_num_partials(int64_t count) { return count == 1 || count == 2 || count == 4 || count == kMaxPartials; }

}  // namespace kdtree
