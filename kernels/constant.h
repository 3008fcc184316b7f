// A number known at run time as a template argument, for loops that the compiler must unroll into registers.
#pragma once
#include <type_traits>

namespace kdtree {

// Calls visit(integral constant equal to count), 1 <= count <= kMax.
template <int kMax, class Visit>
inline void with_constant(int count, Visit&& visit) {
  if constexpr (kMax > 1)
    if (count < kMax) return with_constant<kMax - 1>(count, visit);
  visit(std::integral_constant<int, kMax>());
}

}  // namespace kdtree
