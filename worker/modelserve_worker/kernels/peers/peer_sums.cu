// Sums over the ranks of a tensor-parallel group through the memory of its GPUs, one kernel on every rank: each sends its
// own elements to all others, waits for theirs, and adds all in rank order, so every rank comes to the same bits.
//
// A message needs no barrier: it is cut into lines of 16 bytes, 8 of elements and twice the number of the sum ("epoch"),
// and a line is there when both of its numbers are the awaited one (stores of 8 bytes are atomic). Lines of even and odd
// epochs have buffers of their own. A rank that sends epoch e + 1 has received all of e, so its peer has begun e and is
// through with e - 1, whose buffer is now written.
//
// NORMS: the sum is not stored but normed, added to the residual and normed again, as `residual_norm` does.

#include "peer.cuh"

constexpr int LINE = 16;

__device__ __forceinline__ void send(u64 line, u32 first, u32 second, u32 epoch) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %2};" ::"l"(line), "r"(first), "r"(epoch), "r"(second)
               : "memory");
}

// Waits for a line; false when the group has ended.
__device__ __forceinline__ bool receive(u64 line, u32 epoch, const u32* ended, u32& first, u32& second) {
  for (u32 spins = 1;; spins++) {
    u32 a, b;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(first), "=r"(a), "=r"(second), "=r"(b)
                 : "l"(line)
                 : "memory");
    if (a == epoch && b == epoch) return true;
    if (spins % SPINS == 0 && *(const volatile u32*)ended) return false;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) rank_sum(
    const u32* __restrict__ partial,       // [count] bfloat16
    u32* __restrict__ sum,                 // [count]: the sum, or with NORMS the residual, which takes it up
    const u32* __restrict__ delta_weight,  // [WIDTH], with NORMS
    const unsigned short* __restrict__ scalar,  // [1] or null
    const u32* __restrict__ next_weight,   // [WIDTH] or null
    u32* __restrict__ normed,              // [count], with a next_weight
    State* __restrict__ state,
    const u32* __restrict__ ended,         // in the host's memory
    const __grid_constant__ Buffers buffers,
    long long region,                      // bytes between the buffers of two ranks, and of two epochs / RANKS
    int count,
    int rank,
    float eps) {
#if NORMS
  __shared__ float first_sums[WARPS], second_sums[WARPS];
#endif
  const int thread = threadIdx.x;
  const long long at = ((long long)blockIdx.x * THREADS + thread) * 8;
  const bool inside = at < count;
#if NORMS
  float kept[8], weights[8], next_weights[8] = {};
  load8(delta_weight + thread * 4, weights);
  if (next_weight) load8(next_weight + thread * 4, next_weights);
  const float factor = scalar ? __uint_as_float((u32)*scalar << 16) : 1.0f;
#endif
  wait_for_prerequisites();
  const u32 epoch = ((const volatile State*)state)->epoch;
  bool alive = !((const volatile State*)state)->ended;
  const u64 line = (u64)blockIdx.x * (2 * THREADS * LINE) + (u64)thread * LINE;
  const u64 slots = (u64)(epoch & 1) * RANKS * region;
  Words own = {};
  float sums[8];
  if (inside) {
    own = *(const Words*)(partial + at / 2);
#pragma unroll
    for (int step = 1; step < RANKS; step++) {
      const u64 place = buffers.of[(rank + step) % RANKS] + slots + rank * region + line;
      send(place, own.at[0], own.at[1], epoch);
      send(place + THREADS * LINE, own.at[2], own.at[3], epoch);
    }
  }
#if NORMS
  load8(sum + at / 2, kept);
#endif
  if (inside) {
#pragma unroll
    for (int source = 0; source < RANKS; source++) {
      Words words = own;
      if (source != rank && alive) {
        const u64 place = buffers.of[rank] + slots + source * region + line;
        alive = receive(place, epoch, ended, words.at[0], words.at[1]) &&
                receive(place + THREADS * LINE, epoch, ended, words.at[2], words.at[3]);
      }
#pragma unroll
      for (int i = 0; i < 4; i++) {
        sums[2 * i] = source ? sums[2 * i] + low(words.at[i]) : low(words.at[i]);
        sums[2 * i + 1] = source ? sums[2 * i + 1] + high(words.at[i]) : high(words.at[i]);
      }
    }
  }
#if NORMS
#pragma unroll
  for (int i = 0; i < 8; i++) sums[i] = rounded(sums[i]);
  rms(sums, weights, eps, first_sums);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    sums[i] = rounded(kept[i] + sums[i]);
    if (scalar) sums[i] = rounded(sums[i] * factor);
  }
#endif
  if (inside) store8(sum + at / 2, sums);
#if NORMS
  if (next_weight) {
    rms(sums, next_weights, eps, second_sums);
    store8(normed + at / 2, sums);
  }
#endif
  if (!alive) state->ended = 1;
  __syncthreads();  // every thread has read the epoch
  if (thread == 0 && atomicAdd(&state->arrived, 1) == gridDim.x - 1) {
    state->arrived = 0;
    state->epoch = epoch == 0xffffffffu ? 2 : epoch + 1;  // 0 is what fresh buffers hold, and parities must alternate
  }
}
