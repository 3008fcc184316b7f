// moe_route: scores of all experts, the top_k of score + bias (equal: lower id), their weights in ascending id. They are
// summed in that order for renormalisation.
#include <algorithm>
#include <cmath>
#include <limits>

#include "expert_groups.h"
#include "op_args.h"
#include "rows_in_use.h"
#include "scratch.h"
#include "vec16.h"

namespace kdtree {
namespace {

// Softmax sums in 16 lanes (lane = e mod 16), closed by sum_lanes.
void softmax(const float* logits, float* scores, int64_t count) {
  const float infinity = std::numeric_limits<float>::infinity();
  float largest = -infinity;
  for (int64_t e = 0; e < count; ++e) largest = logits[e] > largest ? logits[e] : largest;
  Vec16 sum = Vec16::all(0.0f);
  for (int64_t e = 0; e < count; e += kLanes) {
    const Vec16 shifted = load_first(logits + e, count - e) - Vec16::all(largest);
    const Vec16 power = exp(first_lanes(count - e, shifted, Vec16::all(-infinity)));
    sum = sum + power;
    store_first(power, scores + e, count - e);
  }
  const float total = sum_lanes(sum);
  for (int64_t e = 0; e < count; ++e) scores[e] /= total;
}

void sigmoid(const float* logits, float* scores, int64_t count) {
  const Vec16 one = Vec16::all(1.0f);
  for (int64_t e = 0; e < count; e += kLanes)
    store_first(one / (one + exp(Vec16::all(0.0f) - load_first(logits + e, count - e))), scores + e, count - e);
}

// The sum of the two largest keys of a group.
float group_score(const float* keys, int64_t size) {
  float first = -std::numeric_limits<float>::infinity(), second = first;
  for (int64_t e = 0; e < size; ++e) {
    if (keys[e] > first) {
      second = first;
      first = keys[e];
    } else if (keys[e] > second) {
      second = keys[e];
    }
  }
  return first + second;
}

// Keys of the groups that do not take part become -inf. A group takes part if fewer than topk_groups are better.
void mask_groups(const MoeRouteArgs& a, float* keys, float* sums) {
  const int64_t size = a.num_experts / a.num_groups;
  for (int64_t g = 0; g < a.num_groups; ++g) sums[g] = group_score(keys + g * size, size);
  for (int64_t g = 0; g < a.num_groups; ++g) {
    int64_t num_better = 0;
    for (int64_t other = 0; other < a.num_groups; ++other)
      num_better += sums[other] > sums[g] || (sums[other] == sums[g] && other < g);
    if (num_better >= a.topk_groups)
      std::fill_n(keys + g * size, size, -std::numeric_limits<float>::infinity());
  }
}

void route_row(const MoeRouteArgs& a, int64_t row, float* scores, float* keys, float* sums) {
  const float infinity = std::numeric_limits<float>::infinity();
  const int64_t count = a.num_experts;
  (a.scoring == kSoftmax ? softmax : sigmoid)(a.logits + row * count, scores, count);
  for (int64_t e = 0; e < count; ++e) {
    keys[e] = a.bias ? scores[e] + a.bias[e] : scores[e];
    if (std::isnan(keys[e])) keys[e] = infinity;  // chosen first, so that a NaN reaches the output instead of hiding
  }
  if (a.num_groups > 1) mask_groups(a, keys, sums);
  int32_t* expert_id = a.expert_id + row * a.top_k;
  for (int64_t chosen = 0; chosen < a.top_k; ++chosen) {
    int64_t best = -1;
    for (int64_t e = 0; e < count; ++e) {
      const bool taken = std::isnan(keys[e]);
      if (!taken && (best < 0 || keys[e] > keys[best])) best = e;
    }
    keys[best] = std::numeric_limits<float>::quiet_NaN();  // marks a chosen expert
  }
  float* weight = a.weight + row * a.top_k;
  float sum = 0.0f;
  for (int64_t e = 0, slot = 0; slot < a.top_k; ++e) {
    if (!std::isnan(keys[e])) continue;
    expert_id[slot] = int32_t(e);
    weight[slot++] = scores[e];
    sum += scores[e];
  }
  for (int64_t slot = 0; slot < a.top_k; ++slot) {
    if (a.renormalize) weight[slot] /= sum + 1e-20f;
    weight[slot] *= a.scaling_factor;
  }
}

}  // namespace

int moe_route_cpu(const MoeRouteArgs& args) {
  const MoeRouteArgs a = with_rows_in_use(args);
  if (a.top_k < 1 || a.top_k > a.num_experts) return kUnsupported;
  if (a.scoring != kSoftmax && a.scoring != kSigmoid) return kUnsupported;
  if (!groups_are_valid(a)) return kUnsupported;
  const Floats scratch = new_floats(3 * a.num_experts);  // there are at most as many groups as experts
  float *scores = scratch.get(), *keys = scores + a.num_experts, *sums = keys + a.num_experts;
  for (int64_t t = 0; t < a.num_rows; ++t) route_row(a, t, scores, keys, sums);
  return kOk;
}

}  // namespace kdtree
