// What products of bytes take from integer_mma_sm90.cuh, group_scales_sm90.cuh and CUDA, on a CPU.

#pragma once

#include "emulated_sm90.h"

#ifndef HALF_SCALES
#define HALF_SCALES 0
#endif

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

// Of float16, whose exponent begins 112 above float32's, or of bfloat16.
static float scale_of(u32 bits) {
  if (!HALF_SCALES) return __uint_as_float(bits << 16);
  return ldexpf(__uint_as_float((bits & 0x8000u) << 16 | (bits & 0x7FFFu) << 13), 112);
}

// Of bytes a with or without sign.
template <class A>
static void add_products(int (&sums)[4], const u32 (&a)[4], uint2 b) {
  const u32 mine[6] = {a[0], a[1], a[2], a[3], b.x, b.y};
  memcpy(shown()[lane()], mine, sizeof(mine));
  meet_warp();
  for (int i = 0; i < 4; i++) {
    const int row = lane() / 4 + i / 2 * 8, column = lane() % 4 * 2 + i % 2;
    for (int k = 0; k < 32; k++)
      sums[i] += (int)(A)(shown()[row % 8 * 4 + k % 16 / 4][row / 8 + k / 16 * 2] >> k % 4 * 8) *
                 (signed char)(shown()[column * 4 + k % 16 / 4][4 + k / 16] >> k % 4 * 8);
  }
  meet_warp();
}

static void add_unsigned_integers(int (&sums)[4], const u32 (&a)[4], uint2 b) { add_products<unsigned char>(sums, a, b); }

static void add_integers(int (&sums)[4], const u32 (&a)[4], uint2 b) { add_products<signed char>(sums, a, b); }

static void multiply_integers(int (&sums)[4], const u32 (&a)[4], uint2 b) {
  memset(sums, 0, sizeof(sums));
  add_products<unsigned char>(sums, a, b);
}

static u32 upper_half(u32 word, u32) { return word >> 16; }

static u32 in_register(u32 value) { return value; }

static u32 permuted_bytes(u32 low, u32 high, u32 places) {
  const u64 octets = (u64)high << 32 | low;
  u32 found = 0;
  for (int i = 0; i < 4; i++) {
    const u32 place = places >> 4 * i & 15, octet = (u32)(octets >> (place & 7) * 8 & 0xFF);
    found |= (place & 8 ? (octet & 0x80 ? 0xFFu : 0u) : octet) << 8 * i;
  }
  return found;
}
