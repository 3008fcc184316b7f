// The bindings of the CPU kernels.
#include "cpu_call.h"
#include "ops.h"

KDTREE_LIBRARY_IMPL(KDTREE_NS, CPU, m) { kdtree::bind::add_bindings<kdtree::bind::CpuCall>(m); }
