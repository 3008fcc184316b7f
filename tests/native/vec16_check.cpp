// Prints the bits that the vector type and the kernels built on it give for fixed inputs. Compiled by test_vec16.py once
// per instruction set: every form of Vec16 must print the same.
#include "vec16.h"

#include <cstdio>
#include <limits>
#include <vector>

#include "op_args.h"

namespace kdtree {
namespace {

uint64_t random_state = 20261;

float uniform() {  // in -1 … 1
  random_state = random_state * 6364136223846793005u + 1442695040888963407u;
  return float(int32_t(random_state >> 32)) * 0x1p-31f;
}

std::vector<float> values(int64_t count) {
  std::vector<float> out(count);
  for (float& x : out) x = uniform();
  return out;
}

std::vector<Bf16> rounded_values(int64_t count) {
  std::vector<Bf16> out(count);
  for (Bf16& x : out) x = round_bf16(uniform());
  return out;
}

void print(const char* name, const void* data, size_t bytes) {
  uint64_t hash = 14695981039346656037u;  // FNV-1a
  for (size_t i = 0; i < bytes; ++i) hash = (hash ^ static_cast<const unsigned char*>(data)[i]) * 1099511628211u;
  std::printf("%s %016llx\n", name, static_cast<unsigned long long>(hash));
}

void print(const char* name, Vec16 v) {
  float lanes[kLanes];
  v.store(lanes);
  for (float& x : lanes)
    if (x != x) x = std::numeric_limits<float>::quiet_NaN();  // the sign and payload of a NaN are not promised
  print(name, lanes, sizeof lanes);
}

void check_vector() {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  const float special[kLanes] = {0.0f, -0.0f, 1.0f, -1.0f, inf, -inf, nan, 88.8f, -88.8f, -103.9f, 1e-40f, 3.3e38f,
                                 0.5f, 2.5f, -1.00390625f, 1.01171875f};
  for (int round = 0; round < 50; ++round) {
    const std::vector<float> x = values(16), y = values(16), z = values(16);
    const Vec16 a = round ? Vec16::load(x.data()) * Vec16::all(float(2 * round)) : Vec16::load(special);
    const Vec16 b = Vec16::load(y.data()), c = Vec16::load(z.data());
    print("add", a + b);
    print("subtract", a - b);
    print("multiply", a * b);
    print("divide", a / b);
    print("fma", fma(a, b, c));
    print("max", max(a, b));
    print("min", min(a, b));
    print("round_to_int", round_to_int(a));
    print("exp", exp(a));
    print("rounded", rounded(a, static_cast<const Bf16*>(nullptr)));
    print("first_lanes", first_lanes(round % 18, a, b));
    std::printf("any_nan %d\n", any_nan(a));
    std::printf("sum_lanes %a max_lanes %a\n", sum_lanes(b), max_lanes(b));
    float tail[kLanes] = {};
    store_first(load_first(x.data(), round % 17), tail, round % 17);
    print("tail", tail, sizeof tail);
    const std::vector<float> many = values(256);
    Vec16 rows[kLanes];
    for (int r = 0; r < kLanes; ++r) rows[r] = Vec16::load(&many[16 * r]);
    print("sum_lanes_of_16", sum_lanes_of_16(rows));
    for (int r = 0; r < kLanes; ++r)
      if (float lanes[kLanes]; sum_lanes_of_16(rows).store(lanes), lanes[r] != sum_lanes(rows[r]))
        std::printf("sum_lanes_of_16 differs from sum_lanes in row %d\n", r);
  }
  for (int n = -126; n <= 127; ++n) print("exp2_int", exp2_int(Vec16::all(float(n))));
}

template <class Make>
void check_linear(Dtype dtype, Make make) {
  for (int64_t num_rows : {1, 2, 3, 4, 5, 6, 7, 50}) {
    const int64_t num_groups = 2, num_out = 83, num_in = 70;
    const auto weight = make(num_groups * num_out * num_in), x = make(num_rows * num_groups * num_in);
    auto packed = make(num_groups * 96 * num_in);
    std::vector<float> out(num_rows * num_groups * num_out);
    pack_linear_cpu({weight.data(), packed.data(), num_groups, num_out, num_in, dtype});
    linear_cpu({x.data(), packed.data(), nullptr, out.data(), num_rows, num_groups, num_out, num_in,
                num_groups * num_in, num_in, dtype, kF32, 1});
    print("linear", out.data(), out.size() * sizeof(float));
  }
}

template <class Make>
void check_attention(Dtype dtype, Make make) {
  const int64_t num_rows = 6, num_heads = 3, latent_dim = 40, rope_dim = 10, num_slots = 150;
  const auto q_latent = make(num_rows * num_heads * latent_dim), q_rope = make(num_rows * num_heads * rope_dim);
  const auto cache = make(num_slots * (latent_dim + rope_dim));
  auto out = make(num_rows * num_heads * latent_dim);
  const int32_t stream[] = {0, 0, 0, 0, 0, 0}, node[] = {0, 1, 2, 3, 4, 5}, parent[] = {-1, 0, 0, 2, 3, 1},
                depth[] = {0, 1, 1, 2, 3, 2}, prefix_len[] = {125};
  verify_attn_cpu({q_latent.data(), q_rope.data(), cache.data(), stream, node, parent, depth, prefix_len, out.data(),
                   num_rows, num_heads, latent_dim, rope_dim, 1, num_slots, 6, 2.0f, dtype, 1});
  print("verify_attn", out.data(), out.size() * sizeof out[0]);
}

}  // namespace
}  // namespace kdtree

int main() {
  kdtree::check_vector();
  kdtree::check_linear(kdtree::kF32, kdtree::values);
  kdtree::check_linear(kdtree::kBF16, kdtree::rounded_values);
  kdtree::check_attention(kdtree::kF32, kdtree::values);
  kdtree::check_attention(kdtree::kBF16, kdtree::rounded_values);
  return 0;
}
