// What a product of few rows is stored as: sums of a part of the inputs as they are, which whoever reads them adds, else
// bfloat16. Whoever includes this defines SPLIT, 0 or 1.

#pragma once

#include "sm90.cuh"

#if SPLIT
typedef float Output;
__device__ __forceinline__ Output stored(float value) { return value; }
#else
typedef unsigned short Output;
__device__ __forceinline__ Output stored(float value) { return (Output)bf16_pair(value, 0.0f); }
#endif
