// The tile shapes of linear on CUDA, for tests and benchmarks that name one. linear_cuda chooses by itself.
#pragma once
#include "op_args.h"

namespace kdtree {

struct TileArgs;

struct LinearShape {
  const char* name;
  int num_rows, num_out, cluster;  // of a block; blocks of a cluster
  bool wide;                       // of linear_wide.cuh: Hopper, x in aligned chunks of 16 bytes; of INT4: Hopper alone
  bool direct;                     // of linear_direct.cuh: x in aligned chunks of 16 bytes
  int (*run)(TileArgs, int num_groups, void* stream);
  // The products of experts with the shared one's beside them (expert_tiles.cuh), or nullptr.
  int (*run_beside)(TileArgs shared, TileArgs experts, void* stream) = nullptr;
  // The same of the up products, which do swiglu: needs clusters.
  int (*run_swiglu_beside)(TileArgs shared, TileArgs experts, void* stream) = nullptr;
};

struct LinearDevice {
  int num_multiprocessors;
  bool clusters;  // may several blocks share a tile?
  bool wgmma;
};

int num_linear_shapes(Dtype);
const LinearShape& linear_shape(Dtype, int index);
int linear_device(LinearDevice*);  // the current one
bool serves(const LinearShape&, const LinearArgs&, const LinearDevice&);
int choose_linear_shape(const LinearArgs&, const LinearDevice&);

// Whether weights_settled is made use of: weights are copied while the previous kernel still runs. Not where a grid leaves
// multiprocessors idle and several blocks fit on one: the next kernel's blocks would crowd onto those and stay there. Nor where
// a block fills one and they come in waves: it won nothing or cost up to 10 %. Nor in F32, where it cost up to 50 % at N = 2048
// and won 2 % elsewhere. Blocks without stages are few and short, 0.1-0.5 us of 2; there it always won, as for clusters and
// shares of few segments: all products of a rank of eight so begun took 41 us where those that wait took 44. To ask for weights
// into L2 and then wait (44 us), or to let the next kernel begin at once (44 us beside 41), won nothing.
bool reads_weights_early(const LinearArgs&, const LinearShape&, const LinearDevice&);

int linear_cuda_with(const LinearArgs&, int index, void* stream);  // this shape, weights_settled taken as it is

TileArgs linear_tile_args(const LinearArgs&);

// The same for INT4 weights; linear_cuda and linear_cuda_with call it where args.int4.
int num_int4_shapes();
const LinearShape& int4_shape(int index);
int choose_int4_shape(const LinearArgs&, const LinearDevice&);

// And for the two grouped products of INT4 experts: indices of an int4_shape and an int4_partial_shape, both of rows_per_item rows.
struct Int4ExpertShapes {
  int up, down;
};
int num_int4_partial_shapes();
const LinearShape& int4_partial_shape(int index);
Int4ExpertShapes choose_int4_experts(const MoeExpertsArgs&, const LinearDevice&);
int moe_experts_cuda_with(const MoeExpertsArgs&, Int4ExpertShapes, void* stream);  // args.int4
int moe_rows_per_item(const MoeExpertsArgs&);                                      // of rows that share an expert, at most

}  // namespace kdtree
