// Zero points of INT4's groups in a stage: those of two neighbouring groups in a byte, the first in the low half. Whoever
// includes this defines ZEROS, 1 where a matrix has them, and SCALES_OF_BLOCK, its groups of 256 inputs.

#pragma once

#include "sm90.cuh"

#ifndef ZEROS
#define ZEROS 0
#endif

#define ZERO_ROWS (ZEROS ? (SCALES_OF_BLOCK + 1) / 2 : 0)  // of bytes, in a block

// Of group `number`. `zeros`: of the first group's byte, from which the next is `apart` bytes.
__device__ __forceinline__ u32 zero_point(const unsigned char* zeros, int number, int apart) {
  return zeros[number / 2 * apart] >> number % 2 * 4 & 15;
}
