// How all blocks of decode_layers meet: each says that it has come, then waits until all have. What a block wrote before it came
// is seen by every block afterwards. Blocks are launched cooperatively, so that all of them are there.
#pragma once
#include "cuda_common.cuh"

namespace kdtree {

class Meeting {
 public:
  // count: a multiple of num_blocks while no launch is under way; it only grows.
  __device__ __forceinline__ Meeting(unsigned long long* count, unsigned num_blocks) : count_(count), num_blocks_(num_blocks) {
    if (threadIdx.x == 0) target_ = look(count) / num_blocks * num_blocks;
  }

  // All threads of the block.
  __device__ __forceinline__ void come() {
    __syncthreads();
    if (threadIdx.x > 0) return;
    target_ += num_blocks_;
    __threadfence();
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], 1;" ::"l"(count_) : "memory");
  }
  __device__ __forceinline__ void wait() {
    if (threadIdx.x == 0) {
      while (look(count_) < target_) {}
      __threadfence();
    }
    __syncthreads();
  }

 private:
  unsigned long long* count_;
  unsigned num_blocks_;
  unsigned long long target_ = 0;  // of thread 0

  static __device__ __forceinline__ unsigned long long look(const unsigned long long* from) {
    unsigned long long value;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    return value;
  }
};

}  // namespace kdtree
