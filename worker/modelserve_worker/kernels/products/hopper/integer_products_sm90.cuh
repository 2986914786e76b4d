// Integers of eight bits in place of four-bit elements and of bfloat16, for integer_rows_sm90.cu.

#pragma once

#include "integer_mma_sm90.cuh"

// Eight inputs of a lane: 256 * high + low, times `unit`, which its neighbours have in common; `sum` of 32 integers.
struct Integers {
  uint2 high, low;
  int sum;
  float unit;
};

constexpr float MOST = 32512.0f;           // 127 * 256: the largest integer whose nearest high byte has a sign bit to spare
constexpr float ROUNDING = 12582912.0f;    // 1.5 * 2^23: a sum with it ends in the nearest integer
constexpr float LEAST_UNIT = 7.888609e-31f;  // 2^-100, whose inverse is a number

// Without signs, order is that of numbers, and what is no number is largest.
__device__ __forceinline__ u32 larger_bits(u32 pair) { return max(pair & 0x7FFF, pair >> 16 & 0x7FFF); }

// Of so many neighbours, all of which call it.
template <int LANES = 4>
__device__ __forceinline__ u32 most_of_neighbours(u32 most) {
#pragma unroll
  for (int apart = 1; apart < LANES; apart *= 2) most = max(most, __shfl_xor_sync(0xFFFFFFFFu, most, apart));
  return most;
}

// What integers of numbers whose bits are `most` at most are multiplied by: no number, where they are not all finite.
struct Power {
  float unit, inverse;
};

__device__ __forceinline__ Power power_of(u32 most) {
  const float least = fmaxf(__uint_as_float(most << 16) * (1.0f / MOST), LEAST_UNIT);
  const u32 power = (__float_as_uint(least) + 0x7FFFFF) & 0x7F800000;  // the next power of two
  return {most < 0x7F80 ? __uint_as_float(power) : __uint_as_float(0x7FC00000), __uint_as_float(0x7F000000 - power)};
}

__device__ __forceinline__ int integer_of(float value, float inverse) {
  return (int)__float_as_uint(value * inverse + ROUNDING) - (int)0x4B400000;
}

// All lanes of a warp. Where one input of the neighbours is infinite or no number, `unit` is no number.
template <int LANES>
__device__ __forceinline__ Integers integers_of(uint4 loaded) {
  const u32 pairs[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
  u32 most = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) most = max(most, larger_bits(pairs[i]));
  const Power power = power_of(most_of_neighbours<LANES>(most));
  u32 bytes[2][8];
  int sum = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float value = __uint_as_float(i % 2 ? pairs[i / 2] & 0xFFFF0000u : pairs[i / 2] << 16);
    const int integer = integer_of(value, power.inverse);
    sum += integer;
    bytes[0][i] = (u32)(integer + 128) >> 8 & 0xFF, bytes[1][i] = (u32)integer & 0xFF;
  }
  sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
  sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
  u32 words[2][2];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const u32* four = bytes[i / 2] + i % 2 * 4;
    words[i / 2][i % 2] = four[0] | four[1] << 8 | four[2] << 16 | four[3] << 24;
  }
  return {make_uint2(words[0][0], words[0][1]), make_uint2(words[1][0], words[1][1]), sum, power.unit};
}
