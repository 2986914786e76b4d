// PTX of compute capability 8.0 and up: products of a warp on bytes.

#pragma once

#include "sm90.cuh"

// sums [16, 8] = 32 columns of bytes without sign a times 32 bytes with sign b.
__device__ __forceinline__ void multiply_integers(int (&sums)[4], const u32 (&a)[4], uint2 b) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
      : "=r"(sums[0]), "=r"(sums[1]), "=r"(sums[2]), "=r"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y), "r"(0));
}
