// Elements of symmetric INT4 matrices in registers.

#pragma once

#include "sm90.cuh"

// Two nibbles in the low bits of both halves -> (nibble - 8) * scale of both, rounded once. `scale`: twice.
__device__ __forceinline__ u32 element_pair(u32 halves, u32 scale) {
  u32 pair;
  asm("{\n.reg .b32 v;\nlop3.b32 v, %1, 0x000f000f, 0x43004300, 0xea;\nadd.rn.bf16x2 v, v, %3;\n"
      "mul.rn.bf16x2 %0, v, %2;\n}"
      : "=r"(pair)
      : "r"(halves), "r"(scale), "r"(0xC308C308));  // 128 + nibble, less 136
  return pair;
}
