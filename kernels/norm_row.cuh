// One row of rms_norm, as a block computes it: every thread holds up to four chunks of 8 elements. A row is read once, all
// of it at the same time, and its weight at the same time or before.
#pragma once
#include <initializer_list>

#include "cuda_rows.cuh"

namespace kdtree {

constexpr int kHeld = 4, kMaxNormWarps = 8, kMaxNormThreads = kMaxNormWarps * kWarp;

// Threads that share out a row of `dim` elements, a function of dim alone: chunk c of thread t is number t + c * threads of
// the row. c reaches kHeld only in rows of more than 8192 elements.
__host__ __device__ constexpr int norm_threads(int64_t dim) {
  const int64_t num_warps = (dim + kHeld * kChunk * kWarp - 1) / (kHeld * kChunk * kWarp);
  return static_cast<int>(num_warps < 1 ? 1 : num_warps > kMaxNormWarps ? kMaxNormWarps : num_warps) * kWarp;
}

// 8 elements as they lie in memory.
template <class Float>
struct Chunk {
  static constexpr int kPerWord = 4 / int(sizeof(Float)), kWords = kChunk / kPerWord;
  uint32_t words[kWords];

  __device__ float operator[](int k) const {
    if constexpr (kPerWord == 1) return __uint_as_float(words[k]);
    else return __uint_as_float(k % 2 ? words[k / 2] & 0xffff0000u : words[k / 2] << 16);  // a BF16 is half an FP32
  }

  // x * scale * weight, each product rounded in FP32, the last one to the type, too.
  __device__ void scale(float by, const Chunk& weight) {
    const auto product = [&](int k) { return __fmul_rn(__fmul_rn((*this)[k], by), weight[k]); };
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      if constexpr (kPerWord == 1) {
        words[w] = __float_as_uint(product(w));
      } else {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(product(2 * w), product(2 * w + 1));
        words[w] = reinterpret_cast<const uint32_t&>(pair);
      }
    }
  }

  // Elements i … i + 7 of a row, zeros past its end. kAligned: whole chunks at addresses aligned to 16. The same values.
  template <bool kAligned>
  __device__ void read(const Float* row, int i, int dim) {
    if constexpr (kAligned) {
#pragma unroll
      for (int w = 0; w < kWords; w += 4) {
        const uint4 four = i < dim ? *reinterpret_cast<const uint4*>(row + i + w * kPerWord) : uint4{};
        words[w] = four.x, words[w + 1] = four.y, words[w + 2] = four.z, words[w + 3] = four.w;
      }
    } else {
      using Bits = std::conditional_t<kPerWord == 1, uint32_t, uint16_t>;
      const Bits* bits = reinterpret_cast<const Bits*>(row);
      const auto element = [&](int k) { return i + k < dim ? uint32_t{bits[i + k]} : 0u; };
#pragma unroll
      for (int w = 0; w < kWords; ++w)
        words[w] = kPerWord == 1 ? element(w) : element(2 * w) | element(2 * w + 1) << 16;
    }
  }

  template <bool kAligned>
  __device__ void write(Float* row, int i, int dim) const {
    if constexpr (kAligned) {
#pragma unroll
      for (int w = 0; w < kWords; w += 4)
        if (i < dim)
          *reinterpret_cast<uint4*>(row + i + w * kPerWord) = {words[w], words[w + 1], words[w + 2], words[w + 3]};
    } else {
#pragma unroll
      for (int k = 0; k < kChunk; ++k)
        if (i + k < dim) row[i + k] = from_float<Float>((*this)[k]);
    }
  }
};

// squares + the sum of x^2 over a chunk, by fma in ascending order.
template <class Float>
__device__ __forceinline__ float add_squares(const Chunk<Float>& x, float squares) {
#pragma unroll
  for (int k = 0; k < kChunk; ++k) squares = __fmaf_rn(x[k], x[k], squares);
  return squares;
}

// The sum over a block, the same in every thread: warp_sum, then the warps in pairs, ((0+1)+(2+3))+((4+5)+(6+7)); those that
// the block does not have count as +0.
__device__ __forceinline__ float sum_in_pairs(float x) {
  __shared__ __align__(16) float of_warp[kMaxNormWarps];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, num_warps = blockDim.x / kWarp;
  x = warp_sum(x);
  if (lane == 0) of_warp[warp] = x;
  if (warp == 0 && lane >= num_warps && lane < kMaxNormWarps) of_warp[lane] = 0.0f;
  __syncthreads();
  const float4 a = reinterpret_cast<const float4*>(of_warp)[0], b = reinterpret_cast<const float4*>(of_warp)[1];
  return ((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w));
}

// Norms one row of `dim` elements, in a block of norm_threads(dim) threads or more: read_weight and read_row, then write.
template <bool kAligned, class Float>
class RowNorm {
 public:
  __device__ explicit RowNorm(int dim)
      : dim_(dim), step_(norm_threads(dim) * kChunk),
        first_(threadIdx.x * kChunk < step_ ? int(threadIdx.x) * kChunk : dim) {}

  __device__ void read_weight(const Float* weight) { read(weight_ = weight, held_weight_); }
  __device__ void read_row(const Float* x) { read(x_ = x, held_); }

  // out = x / sqrt(mean(x^2) + eps) * weight; nothing is written where out is null. All threads of the block must call it.
  __device__ void write(Float* out, float eps) {
    float squares[kHeld];
#pragma unroll
    for (int c = 0; c < kHeld; ++c) squares[c] = add_squares(held_[c], 0.0f);
    for (int64_t begin = first_ + kHeld * step_; begin < dim_; begin += kHeld * step_)
#pragma unroll
      for (int c = 0; c < kHeld; ++c) squares[c] = add_squares(chunk_at(x_, begin + c * step_), squares[c]);
    const float mine = __fadd_rn(__fadd_rn(squares[0], squares[1]), __fadd_rn(squares[2], squares[3]));
    const float mean = __fdiv_rn(sum_in_pairs(mine), float(dim_));
    const float scale = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, eps)));
    if (out == nullptr) return;
#pragma unroll
    for (int c = 0; c < kHeld; ++c) {
      held_[c].scale(scale, held_weight_[c]);
      held_[c].template write<kAligned>(out, first_ + c * step_, dim_);
    }
    for (int64_t i = first_ + kHeld * step_; i < dim_; i += step_) {
      Chunk<Float> x = chunk_at(x_, i);
      x.scale(scale, chunk_at(weight_, i));
      x.template write<kAligned>(out, i, dim_);
    }
  }

 private:
  __device__ void read(const Float* row, Chunk<Float> (&held)[kHeld]) const {
#pragma unroll
    for (int c = 0; c < kHeld; ++c) held[c].template read<kAligned>(row, first_ + c * step_, dim_);
  }
  __device__ Chunk<Float> chunk_at(const Float* row, int i) const {
    Chunk<Float> chunk;
    chunk.template read<kAligned>(row, i, dim_);
    return chunk;
  }

  int dim_, step_, first_;  // in elements; a thread that is not needed begins at the end
  const Float *weight_, *x_;
  Chunk<Float> held_weight_[kHeld], held_[kHeld];
};

constexpr int64_t kMaxNormDim = INT32_MAX / 2;  // elements of a row are counted in 32 bits

// Whether RowNorm may be kAligned: addresses of rows, and their strides and lengths in elements.
inline bool in_whole_chunks(std::initializer_list<const void*> rows, std::initializer_list<int64_t> sizes) {
  for (const void* row : rows)
    if (reinterpret_cast<uintptr_t>(row) % 16 != 0) return false;
  for (const int64_t size : sizes)
    if (size % kChunk != 0) return false;
  return true;
}

}  // namespace kdtree
