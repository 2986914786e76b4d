// What kernels that sum over ranks share: bfloat16 pairs, norms of rows, and waits for other GPUs.
//
// WIDTH elements of a row, 8 for each thread of a block; RANKS of the group.

#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int THREADS = WIDTH / 8;
constexpr int WARPS = THREADS / 32;
constexpr u32 SPINS = 1024;  // between two looks at the host's word

struct Buffers {
  u64 of[8];  // of every rank, as this one sees it
};

struct alignas(16) Words {
  u32 at[4];
};

// epoch: of the sum that comes next. arrived: blocks that are through with it. ended: nobody is waited for any more.
struct State {
  u32 epoch, arrived, ended, unused;
};

// Where kernels are launched to start while those ahead end: what comes next may start from here on, and all that went
// before is complete behind it. Constants alone are read earlier.
__device__ __forceinline__ void wait_for_prerequisites() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\ngriddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ u32 rounded(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ float rounded(float value) { return low(rounded(value, 0.0f)); }

// Sum over the block, the same on every thread; `shared` is used once per kernel.
__device__ __forceinline__ float block_sum(float value, float* shared) {
#pragma unroll
  for (int lane = 16; lane; lane /= 2) value += __shfl_xor_sync(0xffffffffu, value, lane);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  float total = 0.0f;
#pragma unroll
  for (int warp = 0; warp < WARPS; warp++) total += shared[warp];
  return total;
}

__device__ __forceinline__ void load8(const u32* pairs, float (&values)[8]) {
  const Words words = *(const Words*)pairs;
#pragma unroll
  for (int i = 0; i < 4; i++) values[2 * i] = low(words.at[i]), values[2 * i + 1] = high(words.at[i]);
}

__device__ __forceinline__ void store8(u32* pairs, const float (&values)[8]) {
  Words words;
#pragma unroll
  for (int i = 0; i < 4; i++) words.at[i] = rounded(values[2 * i], values[2 * i + 1]);
  *(Words*)pairs = words;
}

// values <- w * values / sqrt(mean(values^2) + eps), rounded to bfloat16
__device__ __forceinline__ void rms(float (&values)[8], const float (&weights)[8], float eps, float* shared) {
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; i++) squares += values[i] * values[i];
  const float scale = __fdiv_rn(1.0f, __fsqrt_rn(block_sum(squares, shared) * (1.0f / WIDTH) + eps));
#pragma unroll
  for (int i = 0; i < 8; i++) values[i] = rounded(values[i] * scale * weights[i]);
}
