// CPU: the rows of a step that are in use, where their number is not known to the caller but lies in memory.
#pragma once
#include <algorithm>
#include <cstdint>

namespace kdtree {

// `args` with num_rows cut to *num_rows_device, if that is given. Nothing of a row past it is read or written.
template <class Args>
Args with_rows_in_use(Args args) {
  if (args.num_rows_device) args.num_rows = std::clamp<int64_t>(*args.num_rows_device, 0, args.num_rows);
  return args;
}

}  // namespace kdtree
