// embed: rows of a table, copied.
#include <cstring>

#include "op_args.h"
#include "rows_in_use.h"

namespace kdtree {

int embed_cpu(const EmbedArgs& args) {
  const EmbedArgs a = with_rows_in_use(args);
  for (int64_t t = 0; t < a.num_rows; ++t)
    if (a.token[t] < 0 || a.token[t] >= a.vocab_size) return kOutOfRange;
  const int64_t row_bytes = a.dim * (a.dtype == kF32 ? 4 : 2);
  for (int64_t t = 0; t < a.num_rows; ++t)
    std::memcpy(static_cast<char*>(a.out) + t * row_bytes,
                static_cast<const char*>(a.weight) + a.token[t] * row_bytes, row_bytes);
  return kOk;
}

}  // namespace kdtree
