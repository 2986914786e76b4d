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

// The same on top of what sums are.
__device__ __forceinline__ void add_unsigned_integers(int (&sums)[4], const u32 (&a)[4], uint2 b) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
}

// Of bytes with sign, and on top of what sums are.
__device__ __forceinline__ void add_integers(int (&sums)[4], const u32 (&a)[4], uint2 b) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
}

// A constant in a register. One that is known to be the same in all lanes is kept in a uniform register, and moved before
// every use. All lanes of a warp.
__device__ __forceinline__ u32 in_register(u32 value) {
  u32 held;
  asm volatile("shfl.sync.idx.b32 %0, %1, 0, 31, 0xffffffff;" : "=r"(held) : "r"(value));
  return held;
}

// The upper half of a word, as a sum of products: shifts have to wait where integers are permuted.
__device__ __forceinline__ u32 upper_half(u32 word, u32 second) {
  u32 half;
  asm("dp2a.lo.u32.u32 %0, %1, %2, %3;" : "=r"(half) : "r"(word), "r"(second), "r"(0));
  return half;
}

// Of eight bytes the four that the low four nibbles of `places` say, where a nibble's highest bit is set the sign of that
// byte in all eight bits.
__device__ __forceinline__ u32 permuted_bytes(u32 low, u32 high, u32 places) {
  u32 found;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(found) : "r"(low), "r"(high), "r"(places));
  return found;
}
