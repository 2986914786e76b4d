// Scales of groups, of two bytes: bfloat16 or, where whoever compiles defines HALF_SCALES as 1, float16.

#pragma once

#include "sm90.cuh"

#ifndef HALF_SCALES
#define HALF_SCALES 0
#endif

__device__ __forceinline__ float scale_of(u32 bits) {
#if HALF_SCALES
  float scale;
  asm("cvt.f32.f16 %0, %1;" : "=f"(scale) : "h"((unsigned short)bits));
  return scale;
#else
  return __uint_as_float(bits << 16);
#endif
}
