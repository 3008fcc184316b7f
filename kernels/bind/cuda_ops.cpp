// The bindings of the CUDA kernels.
#include "cuda_call.h"
#include "ops.h"

KDTREE_LIBRARY_IMPL(KDTREE_NS, CUDA, m) { kdtree::bind::add_bindings<kdtree::bind::CudaCall>(m); }
