// Sums over the ranks of a tensor-parallel group for many rows, with the norms that follow, one kernel on every rank.
// Rank r owns rows [r x share, (r + 1) x share). Each rank sends every other the rows that this one owns; an owner adds
// them in rank order, norms, adds to the residual, norms again, and sends the normed row to all. So each element crosses
// the links twice whatever the number of ranks, and each rank norms its own rows alone: the residual of the other rows
// is not kept.
//
// A row is announced by the number of the sum ("epoch") behind a fence. Rows that are received are read before the
// owner's normed row is sent, and a kernel ends when all normed rows are there, so the next kernel finds `inbox` free on
// all ranks. It writes `normed` of a rank only when that rank has begun it too, and so is through with what reads the
// last one. All blocks run at once (the launch sees to it), since they wait for each other's counterparts.

#include "peer.cuh"

// A rank's buffer: normed [rows, WIDTH]; inbox [RANKS, share, WIDTH]; then u32 flags: of normed [rows], of inbox
// [RANKS, share]. Offsets are in bytes, for the most rows, and the same on all ranks.
struct Layout {
  long long inbox, normed_flags, inbox_flags;
  int most_share;
};

__device__ __forceinline__ void announce(u64 flag, u32 epoch) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(epoch) : "memory");
}

__device__ __forceinline__ bool wait_for(u64 flag, u32 epoch, const u32* ended) {
  for (u32 spins = 1;; spins++) {
    u32 found;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(found) : "l"(flag) : "memory");
    if (found == epoch) return true;
    if (spins % SPINS == 0 && *(const volatile u32*)ended) return false;
  }
}

__device__ __forceinline__ void store16(u64 address, const Words& words) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(words.at[0]), "r"(words.at[1]),
               "r"(words.at[2]), "r"(words.at[3])
               : "memory");
}

__device__ __forceinline__ Words load16(u64 address) {  // past the first-level cache
  Words words;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.at[0]), "=r"(words.at[1]), "=r"(words.at[2]), "=r"(words.at[3])
               : "l"(address)
               : "memory");
  return words;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) rank_rows(
    const u32* __restrict__ partial,       // [rows, WIDTH] bfloat16
    u32* __restrict__ residual,            // [rows, WIDTH]
    const u32* __restrict__ delta_weight,  // [WIDTH]
    const unsigned short* __restrict__ scalar,  // [1] or null
    const u32* __restrict__ next_weight,   // [WIDTH]
    State* __restrict__ state,
    const u32* __restrict__ ended,  // in the host's memory
    const __grid_constant__ Buffers buffers,
    const __grid_constant__ Layout layout,
    int rows,
    int rank,
    float eps) {
  __shared__ float sums_of_delta[WARPS], sums_of_row[WARPS];
  constexpr u64 ROW = 2 * WIDTH;
  const int thread = threadIdx.x, blocks = gridDim.x;
  const int share = (rows + RANKS - 1) / RANKS;
  const int first = rank * share, own = max(0, min(share, rows - first));
  float delta_weights[8], next_weights[8];
  load8(delta_weight + thread * 4, delta_weights);
  load8(next_weight + thread * 4, next_weights);
  const float factor = scalar ? __uint_as_float((u32)*scalar << 16) : 1.0f;
  wait_for_prerequisites();
  const u32 epoch = ((const volatile State*)state)->epoch;
  bool alive = !((const volatile State*)state)->ended;

  for (int index = blockIdx.x; index < share * (RANKS - 1); index += blocks) {
    const int owner = (rank + 1 + index % (RANKS - 1)) % RANKS, row = index / (RANKS - 1);
    if (owner * share + row >= rows) continue;
    const Words words = *(const Words*)(partial + (u64)(owner * share + row) * (WIDTH / 2) + thread * 4);
    const u64 place = (u64)rank * layout.most_share + row;
    store16(buffers.of[owner] + layout.inbox + place * ROW + thread * 16, words);
    __syncthreads();  // the release that follows is of the whole block's stores
    if (thread == 0) announce(buffers.of[owner] + layout.inbox_flags + place * 4, epoch);
  }

  for (int row = blockIdx.x; row < own; row += blocks) {
    const u64 at = (u64)(first + row) * (WIDTH / 2) + thread * 4;
    const Words mine = *(const Words*)(partial + at);
    float kept[8], values[8];
    load8(residual + at, kept);
    if (thread < RANKS && thread != rank && alive) {
      const u64 place = (u64)thread * layout.most_share + row;
      alive = wait_for(buffers.of[rank] + layout.inbox_flags + place * 4, epoch, ended);
    }
    __syncthreads();
#pragma unroll
    for (int source = 0; source < RANKS; source++) {
      Words words = mine;
      if (source != rank) {
        const u64 place = (u64)source * layout.most_share + row;
        words = load16(buffers.of[rank] + layout.inbox + place * ROW + thread * 16);
      }
#pragma unroll
      for (int i = 0; i < 4; i++) {
        values[2 * i] = source ? values[2 * i] + low(words.at[i]) : low(words.at[i]);
        values[2 * i + 1] = source ? values[2 * i + 1] + high(words.at[i]) : high(words.at[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < 8; i++) values[i] = rounded(values[i]);
    rms(values, delta_weights, eps, sums_of_delta);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      values[i] = rounded(kept[i] + values[i]);
      if (scalar) values[i] = rounded(values[i] * factor);
    }
    store8(residual + at, values);
    rms(values, next_weights, eps, sums_of_row);
    Words words;
#pragma unroll
    for (int i = 0; i < 4; i++) words.at[i] = rounded(values[2 * i], values[2 * i + 1]);
#pragma unroll
    for (int step = 0; step < RANKS; step++)
      store16(buffers.of[(rank + step) % RANKS] + (u64)(first + row) * ROW + thread * 16, words);
    __syncthreads();  // the release that follows is of the whole block's stores
    if (thread < RANKS && thread != rank)
      announce(buffers.of[thread] + layout.normed_flags + (u64)(first + row) * 4, epoch);
  }

  for (int row = blockIdx.x * THREADS + thread; row < rows && alive; row += blocks * THREADS)
    if (row < first || row >= first + own)
      alive = wait_for(buffers.of[rank] + layout.normed_flags + (u64)row * 4, epoch, ended);
  if (!alive) state->ended = 1;
  __syncthreads();  // every thread has read the epoch
  if (thread == 0 && atomicAdd(&state->arrived, 1) == blocks - 1) {
    state->arrived = 0;
    state->epoch = epoch == 0xffffffffu ? 1 : epoch + 1;  // 0 is what fresh flags hold
  }
}
