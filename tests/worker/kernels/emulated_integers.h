// What products of bytes take from integer_mma_sm90.cuh and from CUDA, on a CPU.

#pragma once

#include "emulated_sm90.h"

static float __uint_as_float(u32 bits) { return __int_as_float((int)bits); }
static u32 __float_as_uint(float value) {
  u32 bits;
  memcpy(&bits, &value, 4);
  return bits;
}
static u32 __byte_perm(u32 low, u32 high, u32 places) {
  const u64 octets = (u64)high << 32 | low;
  u32 found = 0;
  for (int i = 0; i < 4; i++) found |= (u32)(octets >> (places >> 4 * i & 7) * 8 & 0xFF) << 8 * i;
  return found;
}

static void multiply_integers(int (&sums)[4], const u32 (&a)[4], uint2 b) {
  const u32 mine[6] = {a[0], a[1], a[2], a[3], b.x, b.y};
  memcpy(shown()[lane()], mine, sizeof(mine));
  meet_warp();
  for (int i = 0; i < 4; i++) {
    const int row = lane() / 4 + i / 2 * 8, column = lane() % 4 * 2 + i % 2;
    sums[i] = 0;
    for (int k = 0; k < 32; k++)
      sums[i] += (int)(shown()[row % 8 * 4 + k % 16 / 4][row / 8 + k / 16 * 2] >> k % 4 * 8 & 0xFF) *
                 (signed char)(shown()[column * 4 + k % 16 / 4][4 + k / 16] >> k % 4 * 8);
  }
  meet_warp();
}
