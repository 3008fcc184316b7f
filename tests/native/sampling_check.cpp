// Prints, for words of the generator and for scaled logits, the bits of noise and mass. Compiled by test_sampling_math.py
// once per instruction set.
#include "sampling.h"

#include <cstdio>
#include <initializer_list>

int main() {
  const auto print_word = [](uint32_t word) {
    std::printf("noise %08x %08x %08x\n", word, kdtree::bits_of(kdtree::gumbel(word)),
                kdtree::bits_of(kdtree::gumbel_bound(word)));
  };
  for (uint32_t k = 0; k < 3000; ++k)
    for (const uint32_t word : {k, ~k, 0x7fffffffu - k, 0x80000000u + k}) print_word(word);
  for (uint64_t word = 0; word < uint64_t{1} << 32; word += 99991) print_word(uint32_t(word));
  for (int power = 0; power < 32; ++power) print_word(1u << power), print_word(~(1u << power));
  for (int k = 0; k < 30000; ++k) {
    const float scaled = -float(k) * 1e-3f;
    std::printf("mass %08x %llx\n", kdtree::bits_of(scaled),
                static_cast<unsigned long long>(kdtree::probability_mass(scaled)));
  }
}
