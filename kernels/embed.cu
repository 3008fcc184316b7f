// embed: rows of a table, copied. A token outside the vocabulary gives a row of NaN.
#include "cuda_rows.cuh"

namespace kdtree {
namespace {

__global__ void __launch_bounds__(128) embed_kernel(EmbedArgs a, int64_t row_bytes) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const int64_t row = blockIdx.x;
  if (row >= rows_in_use(a.num_rows_device, a.num_rows)) return;
  const int64_t token = a.token[row];
  char* out = static_cast<char*>(a.out) + row * row_bytes;
  if (token < 0 || token >= a.vocab_size)
    poison_row(out, row_bytes);
  else
    copy_row(out, static_cast<const char*>(a.weight) + token * row_bytes, row_bytes);
}

}  // namespace

int embed_cuda(const EmbedArgs& a, void* stream) {
  if (a.num_rows == 0) return kOk;
  return launch(embed_kernel, {dim3(a.num_rows), dim3(128), 0, 1, Start::kEarly}, stream, a, a.dim * element_bytes(a.dtype));
}

}  // namespace kdtree
