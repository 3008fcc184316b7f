// C functions for `kdtree_nb.bench.linear_shapes`: linear in every tile shape, to measure what the choice among them costs.
#include "../linear.cuh"

using namespace kdtree;

extern "C" {

int kdtree_linear_num_shapes(int dtype) { return num_linear_shapes(Dtype(dtype)); }

// Its name; the rows and outputs of a block and the blocks of a cluster go to numbers[3].
const char* kdtree_linear_shape(int dtype, int index, int* numbers) {
  const LinearShape& shape = linear_shape(Dtype(dtype), index);
  numbers[0] = shape.num_rows, numbers[1] = shape.num_out, numbers[2] = shape.cluster;
  return shape.name;
}

// x [T, K] times packed weights into out [T, N], dense and of one type, which were complete long before. index: the shape,
// or -1 for the one that linear_cuda chooses. A Status.
int kdtree_linear_with(const void* x, const void* packed, void* out, int64_t num_rows, int64_t num_out, int64_t num_in,
                       int dtype, int index, void* stream) {
  LinearArgs args{};
  args.x = x, args.packed = packed, args.out = out;
  args.num_rows = num_rows, args.num_groups = 1, args.num_out = num_out, args.num_in = num_in;
  args.x_row_stride = args.x_group_stride = num_in;
  args.dtype = args.out_dtype = Dtype(dtype);
  args.weights_settled = true;
  return index < 0 ? linear_cuda(args, stream) : linear_cuda_with(args, index, stream);
}

}  // extern "C"
