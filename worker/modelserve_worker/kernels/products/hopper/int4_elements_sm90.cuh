// Elements of INT4 matrices in registers.

#pragma once

#include "group_scales_sm90.cuh"
#include "pipeline.cuh"
#include "zero_points_sm90.cuh"

constexpr u32 EXCESS = 0xC308C308;  // -136 twice: what 128 + nibble is too large by, where 8 stands for zero

// The same where another number up to 15 does: -128 less it, exactly.
__device__ __forceinline__ u32 excess_of(u32 zero) { return zero * 0x00010001u + 0xC300C300u; }

// Two nibbles in the low bits of both halves -> 128 + nibble of both.
__device__ __forceinline__ u32 nibble_pair(u32 halves) {
  u32 pair;
  asm("lop3.b32 %0, %1, 0x000f000f, 0x43004300, 0xea;" : "=r"(pair) : "r"(halves));
  return pair;
}

// What elements of a row and group are multiplied by, twice in each word. The eleven bits of float16 are a sum of two
// numbers of bfloat16, of which the second has three at most: its product with an element is exact.
struct ElementScale {
  u32 scale;
#if HALF_SCALES
  u32 rest;
#endif
#if ZEROS
  u32 excess;  // of 128 + nibble, twice
#endif
};

__device__ __forceinline__ ElementScale element_scale(unsigned short bits) {
#if HALF_SCALES
  const float whole = scale_of(bits);
  const u32 scale = bf16_pair(whole, whole);
  const float rest = whole - __uint_as_float(scale << 16);
  return {scale, bf16_pair(rest, rest)};
#else
  return {__byte_perm(bits, 0, 0x1010)};
#endif
}

// (nibble - zero) * scale of both, rounded once.
__device__ __forceinline__ u32 element_pair(u32 halves, const ElementScale& by) {
  u32 pair;
#if ZEROS
  const u32 excess = by.excess;
#else
  const u32 excess = EXCESS;
#endif
#if HALF_SCALES
  asm("{\n.reg .b32 v, t;\nadd.rn.bf16x2 v, %1, %4;\nmul.rn.bf16x2 t, v, %3;\nfma.rn.bf16x2 %0, v, %2, t;\n}"
      : "=r"(pair)
      : "r"(nibble_pair(halves)), "r"(by.scale), "r"(by.rest), "r"(excess));
#else
  asm("{\n.reg .b32 v;\nadd.rn.bf16x2 v, %1, %3;\nmul.rn.bf16x2 %0, v, %2;\n}"
      : "=r"(pair)
      : "r"(nibble_pair(halves)), "r"(by.scale), "r"(excess));
#endif
  return pair;
}
