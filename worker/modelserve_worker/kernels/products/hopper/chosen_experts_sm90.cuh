// Which experts' matrices a launch of few rows multiplies by: those that its rows chose, each once.

#pragma once

#include "barriers_sm90.cuh"

constexpr int MOST_SLOTS = 64;  // choices of all rows together

// In shared memory, in the order of first choices.
struct ChosenExperts {
  int count;
  int expert[MOST_SLOTS];
  signed char slot[MOST_SLOTS][ROWS];  // by which each row chose it, or -1

  // By one warp; a barrier of all readers follows. choices [slots], each row's `top_k` beside one another; what is no
  // number of one of `experts` is nobody's choice. Read past the first cache, which may still hold what lay there.
  __device__ __forceinline__ void list(const int* choices, int slots, int top_k, int experts) {
    const int lane = threadIdx.x % 32;
    int chosen[2], first[2] = {MOST_SLOTS, MOST_SLOTS};
    u32 firsts[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int each = 32 * half + lane < slots ? __ldcg(choices + 32 * half + lane) : -1;
      chosen[half] = each < experts ? each : -1;
    }
    for (int other = 0; other < slots; other++) {
      const int expert = __shfl_sync(0xFFFFFFFFu, other < 32 ? chosen[0] : chosen[1], other % 32);
#pragma unroll
      for (int half = 0; half < 2; half++)
        if (expert == chosen[half]) first[half] = min(first[half], other);
    }
#pragma unroll
    for (int half = 0; half < 2; half++)
      firsts[half] = __ballot_sync(0xFFFFFFFFu, chosen[half] >= 0 && first[half] == 32 * half + lane);
    const auto place = [&](int at) {
      const u32 before = (1u << at % 32) - 1;
      return at < 32 ? __popc(firsts[0] & before) : __popc(firsts[0]) + __popc(firsts[1] & before);
    };
    for (int i = lane; i < MOST_SLOTS * ROWS; i += 32) slot[0][i] = -1;
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; half++) {
      if (chosen[half] < 0) continue;
      const int at = 32 * half + lane, listed = place(first[half]);
      expert[listed] = chosen[half];
      slot[listed][at / top_k] = (signed char)at;
    }
    if (lane == 0) count = __popc(firsts[0]) + __popc(firsts[1]);
  }
};
