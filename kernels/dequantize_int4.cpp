// dequantize_int4: INT4 weights to the packed floats of linear and moe_experts, for the groups (experts) that are wanted.
#include "dequantize_int4.h"

#include <algorithm>
#include <vector>

#include "dot_tile.h"
#include "op_args.h"
#include "parallel.h"

namespace kdtree {
namespace {

inline float to_float(float x) { return x; }
inline float to_float(Bf16 x) { return widen(x); }

// One packed block of 16 outputs.
template <class Float, class Scale>
void dequantize_block(const DequantizeInt4Args& a, int64_t group, int64_t block, Float* out) {
  const int64_t num_words = a.num_in / kInt4PerWord, num_scales = a.num_in / a.group_size;
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    const int64_t n = block * kLanes + lane;
    const int32_t* words = a.weight + (group * a.num_out + n) * num_words;
    const Scale* scale = static_cast<const Scale*>(a.scale) + (group * a.num_out + n) * num_scales;
    for (int64_t k = 0; k < a.num_in; ++k)
      out[k * kLanes + lane] =
          narrow<Float>(n < a.num_out ? float(int4_at(words, k)) * to_float(scale[k / a.group_size]) : 0.0f);
  }
}

std::vector<int64_t> wanted_groups(const DequantizeInt4Args& a) {
  std::vector<bool> is_wanted(a.num_groups, a.group_id == nullptr);
  int64_t num_ids = a.num_ids;
  if (a.num_rows_device) num_ids = std::clamp<int64_t>(*a.num_rows_device * a.ids_per_row, 0, num_ids);
  for (int64_t i = 0; a.group_id && i < num_ids; ++i)
    if (a.group_id[i] >= 0 && a.group_id[i] < a.num_groups) is_wanted[a.group_id[i]] = true;
  std::vector<int64_t> groups;
  for (int64_t g = 0; g < a.num_groups; ++g)
    if (is_wanted[g]) groups.push_back(g);
  return groups;
}

template <class Float, class Scale>
void dequantize(const DequantizeInt4Args& a) {
  const std::vector<int64_t> groups = wanted_groups(a);
  const int64_t blocks_per_group = num_blocks_of(a.num_out), block_size = a.num_in * kLanes;
  const int64_t num_blocks = int64_t(groups.size()) * blocks_per_group;
  run_tasks(threads_for(num_blocks * block_size, a.num_threads), num_blocks, [&](int64_t i, int) {
    const int64_t group = groups[i / blocks_per_group], block = i % blocks_per_group;
    Float* out = static_cast<Float*>(a.packed) + (group * blocks_per_group + block) * block_size;
    dequantize_block<Float, Scale>(a, group, block, out);
  });
}

}  // namespace

int dequantize_int4_cpu(const DequantizeInt4Args& a) {
  if (a.group_size < 1 || a.group_size % kInt4PerWord || a.num_in % a.group_size) return kUnsupported;
  if (a.out_dtype == kF32)
    a.dtype == kF32 ? dequantize<float, float>(a) : dequantize<float, Bf16>(a);
  else
    a.dtype == kF32 ? dequantize<Bf16, float>(a) : dequantize<Bf16, Bf16>(a);
  return kOk;
}

}  // namespace kdtree
