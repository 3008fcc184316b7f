// The tile shapes of linear on CUDA, for tests and benchmarks that name one. linear_cuda chooses by itself.
#pragma once
#include "op_args.h"

namespace kdtree {

struct TileArgs;

struct LinearShape {
  const char* name;
  int num_rows, num_out, cluster;  // of a block; blocks of a cluster
  int (*run)(TileArgs, int num_groups, void* stream);
};

int num_linear_shapes(Dtype);
const LinearShape& linear_shape(Dtype, int index);
int choose_linear_shape(const LinearArgs&, bool clusters);
int linear_cuda_with(const LinearArgs&, int index, void* stream);

}  // namespace kdtree
