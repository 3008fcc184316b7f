// absorb_query: queries into latent space, their positions into their angle. Nothing is written where rope refuses a position.
#include "absorb_query.h"

namespace kdtree {

int absorb_query_cpu(const AbsorbQueryArgs& a) {
  const int status = rope_cpu(rope_of(a));
  return status == kOk ? linear_cpu(product_of(a)) : status;
}

}  // namespace kdtree
