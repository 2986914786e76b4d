// Elements of NVFP4 matrices in registers. A word has eight of a row: nibble i of its low half is the first of pair i, of
// its high half the second.

#pragma once

#include "pipeline.cuh"

constexpr float PRODUCT_UNIT = 256.0f;  // what products with pairs are too small by

// A byte of five bits of exponent and three of mantissa -> the scale times 2^118, twice. 2^-126 times that is in range.
__device__ __forceinline__ u32 nvfp4_scale(unsigned char code) { return code * 0x00100010u + 0x75807580u; }

// Both elements of a pair times the scale and 2^-8, exactly. The bits of e2m1 in those of bfloat16 are 2^-126 times as
// large, with or without an exponent.
__device__ __forceinline__ u32 nvfp4_pair(u32 word, int i, u32 scale) {
  const u32 sizes = i < 2 ? word << (6 - 4 * i) : word >> (4 * i - 6), signs = word << (12 - 4 * i);
  u32 pair;
  asm("{\n.reg .b32 v;\nand.b32 v, %1, 0x01c001c0;\nlop3.b32 v, %2, 0x80008000, v, 0xea;\nmul.rn.bf16x2 %0, v, %3;\n}"
      : "=r"(pair)
      : "r"(sizes), "r"(signs), "r"(scale));
  return pair;
}
