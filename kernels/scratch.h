// Temporary floats of a kernel, uninitialised, from the start of a cache line: a vector that crosses lines loads at half
// the speed.
#pragma once
#include <cstdint>
#include <memory>
#include <new>

namespace kdtree {

constexpr std::align_val_t kCacheLine{64};

struct FreeFloats {
  void operator()(float* p) const { ::operator delete[](p, kCacheLine); }
};

using Floats = std::unique_ptr<float[], FreeFloats>;

inline Floats new_floats(int64_t count) {
  return Floats(static_cast<float*>(::operator new[](count * sizeof(float), kCacheLine)));
}

}  // namespace kdtree
