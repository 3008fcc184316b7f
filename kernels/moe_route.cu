// moe_route: one block a row. See moe_route_row.cuh.
#include "moe_route_row.cuh"

namespace kdtree {
namespace {

__global__ void __launch_bounds__(kRouteWarps * kWarp) moe_route_kernel(MoeRouteArgs a) {
  extern __shared__ double memory[];
  const RouteSizes sizes(a);
  const RouteShared shared(a, sizes, memory);
  const int64_t row = blockIdx.x;
  wait_for_previous_kernel();
  allow_next_kernel();
  if (row >= rows_in_use(a.num_rows_device, a.num_rows)) return;
  route_row(a, sizes, shared, row, a.logits + row * a.num_experts);
}

}  // namespace

int moe_route_cuda(const MoeRouteArgs& a, void* stream) {
  if (a.top_k < 1 || a.top_k > a.num_experts) return kUnsupported;
  if (a.scoring != kSoftmax && a.scoring != kSigmoid) return kUnsupported;
  if (!groups_are_valid(a)) return kUnsupported;
  const RouteSizes sizes(a);
  const int64_t num_bytes = sizes.num_bytes(a);
  if (num_bytes > kMaxSharedBytes - 1024 || a.num_rows > INT32_MAX) return kUnsupported;
  if (a.num_rows == 0) return kOk;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(a.num_rows));
  shape.block = dim3(static_cast<unsigned>(std::min<int64_t>(sizes.num_lists, kRouteWarps) * kWarp));
  shape.shared_bytes = size_t(num_bytes), shape.shared_limit = kMaxSharedBytes - 1024, shape.start = Start::kEarly;
  return launch(moe_route_kernel, shape, stream, a);
}

}  // namespace kdtree
