// Dimensions of verify_attn with mma.sync, what lies where in its shared memory, and the copies of keys into it.
#pragma once
#include "mma_bf16.cuh"
#include "verify_attn_begin.cuh"

namespace kdtree {

constexpr int kMmaThreads = 256, kMmaMaxQueries = 64, kQuarters = 4;

template <int kLatent_, int kRope_, int kKeys_, int kStages_>
struct MmaShape {
  static constexpr int kLatent = kLatent_, kRope = kRope_, kKeys = kKeys_, kStages = kStages_;
  static constexpr int kRowBytes = 2 * (kLatent + kRope), kPitch = kRowBytes + 16;  // 16: no bank conflicts
  static constexpr int kSteps = (kLatent + kRope) / 16, kQuarterSteps = (kSteps + kQuarters - 1) / kQuarters;
  static constexpr int kWarpColumns = kLatent >= 128 ? kLatent / 8 : 16, kValueWarps = kLatent / kWarpColumns;
  static constexpr int kKeyBlocks = kKeys / 16, kTileBytes = kKeys * kPitch;
  static constexpr int kSlices = kMmaMaxQueries / 8;
  // shared memory
  static constexpr int kExchange = kStages * kTileBytes;  // partial scores [slice][quarter][key block][lane][4]
  static constexpr int kExchangeSlice = kQuarters * kKeyBlocks * 512;
  static constexpr int kProbs = kExchange + kSlices * kExchangeSlice;  // P, twice: [slice][8 keys][8 queries][8 keys]
  static constexpr int kProbsSlice = kKeys / 8 * 128, kProbsBytes = kSlices * kProbsSlice;
  static constexpr int kAlpha = kProbs + 2 * kProbsBytes;           // rescaling factors, twice: [query]
  static constexpr int kFlags = kAlpha + 2 * kMmaMaxQueries * 4;    // slice needs rescaling, twice: [slice]
  static constexpr int kPlan = kFlags + 2 * kSlices;
  static constexpr int kWork = kPlan + int(sizeof(AttnPlan) + 7) / 8 * 8;
  static constexpr int kSharedBytes = kWork + int(sizeof(AttnWork));
  static_assert(kLatent % 16 == 0 && kRope % 16 == 0 && kLatent % kWarpColumns == 0 && kValueWarps <= 8);
  static_assert(kStages * kTileBytes >= 4 * kMaxPath && kPlan % 8 == 0);
};

// A value computed anew for each item: the compiler must not keep what follows from it in registers between items.
template <class Int>
__device__ __forceinline__ Int for_this_item(Int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// A thread's share of a tile of keys: some 16-byte pieces of one key.
template <class S>
struct MmaKeys {
  static constexpr int kThreadsPerKey = kMmaThreads / S::kKeys, kPieces = S::kRowBytes / 16;

  const AttnWork& work;
  const int key, piece;
  const uint32_t to;

  __device__ __forceinline__ MmaKeys(const AttnWork& work, int thread, uint32_t base)
      : work(work), key(thread / kThreadsPerKey), piece(thread % kThreadsPerKey), to(base + key * S::kPitch + piece * 16) {}

  __device__ __forceinline__ const char* address(int tile, int& num_bytes) const {
    const AttnItem& item = work.item;
    const int position = item.begin + tile * S::kKeys + key;
    int slot = position;
    num_bytes = 16;
    if (position - key + S::kKeys > item.plain_end) {  // the same for all threads
      const bool used = position < item.end;
      slot = !used ? 0 : position < item.prefix ? position : item.prefix + work.path[position - item.prefix];
      num_bytes = used ? 16 : 0;  // 0: nothing is read, zeros are written
    }
    return item.keys + int64_t(slot) * S::kRowBytes + piece * 16;
  }

  __device__ __forceinline__ void load_tile(int tile, int num_tiles, uint32_t stage) const {
    if (tile < num_tiles) {
      int num_bytes;
      const char* from = address(tile, num_bytes);
#pragma unroll
      for (int j = 0; j < kPieces; j += kThreadsPerKey)
        if (j + kThreadsPerKey <= kPieces || j + piece < kPieces) cp_async16(to + stage + j * 16, from + j * 16, num_bytes);
    }
    cp_async_commit();
  }
};

}  // namespace kdtree
