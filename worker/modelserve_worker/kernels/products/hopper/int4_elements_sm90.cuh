// Elements of symmetric INT4 matrices in registers.

#pragma once

#include "pipeline.cuh"

constexpr u32 EXCESS = 0xC308C308;  // -136 twice: what 128 + nibble is too large by

// Two nibbles in the low bits of both halves -> 128 + nibble of both.
__device__ __forceinline__ u32 nibble_pair(u32 halves) {
  u32 pair;
  asm("lop3.b32 %0, %1, 0x000f000f, 0x43004300, 0xea;" : "=r"(pair) : "r"(halves));
  return pair;
}

// (nibble - 8) * scale of both, rounded once. `scale`: twice.
__device__ __forceinline__ u32 element_pair(u32 halves, u32 scale) {
  u32 pair;
  asm("{\n.reg .b32 v;\nadd.rn.bf16x2 v, %1, %3;\nmul.rn.bf16x2 %0, v, %2;\n}"
      : "=r"(pair)
      : "r"(nibble_pair(halves)), "r"(scale), "r"(EXCESS));
  return pair;
}
