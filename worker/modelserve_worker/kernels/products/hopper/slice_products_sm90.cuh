// Products of a warpgroup with both operands in shared memory, whose sums run along rows: 64 rows times a multiple of 32.

#pragma once

#include "sm90.cuh"

#define R8(a, b, c, d, e, f, g, h) "%" #a ", %" #b ", %" #c ", %" #d ", %" #e ", %" #f ", %" #g ", %" #h
#define R16 R8(0, 1, 2, 3, 4, 5, 6, 7) ", " R8(8, 9, 10, 11, 12, 13, 14, 15)
#define R32 R16 ", " R8(16, 17, 18, 19, 20, 21, 22, 23) ", " R8(24, 25, 26, 27, 28, 29, 30, 31)
#define R48 R32 ", " R8(32, 33, 34, 35, 36, 37, 38, 39) ", " R8(40, 41, 42, 43, 44, 45, 46, 47)
#define R64 R48 ", " R8(48, 49, 50, 51, 52, 53, 54, 55) ", " R8(56, 57, 58, 59, 60, 61, 62, 63)
#define R80 R64 ", " R8(64, 65, 66, 67, 68, 69, 70, 71) ", " R8(72, 73, 74, 75, 76, 77, 78, 79)
#define R96 R80 ", " R8(80, 81, 82, 83, 84, 85, 86, 87) ", " R8(88, 89, 90, 91, 92, 93, 94, 95)
#define R112 R96 ", " R8(96, 97, 98, 99, 100, 101, 102, 103) ", " R8(104, 105, 106, 107, 108, 109, 110, 111)
#define R128 R112 ", " R8(112, 113, 114, 115, 116, 117, 118, 119) ", " R8(120, 121, 122, 123, 124, 125, 126, 127)

// sums [64, COLUMNS] += 16 inputs of 64 rows a times 16 inputs of COLUMNS rows b.
template <int COLUMNS>
__device__ __forceinline__ void multiply_slice(float (&sums)[COLUMNS / 2], u64 a, u64 b);

#define PRODUCT(COLUMNS, SUMS, A, B, ...)                                                                         \
  template <>                                                                                                  \
  __device__ __forceinline__ void multiply_slice<COLUMNS>(float (&s)[COLUMNS / 2], u64 a, u64 b) {                   \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32.bf16.bf16 {" SUMS "}, %" #A ", %" #B       \
                 ", 1, 1, 1, 0, 0;"                                                                            \
                 : __VA_ARGS__                                                                                 \
                 : "l"(a), "l"(b));                                                                            \
  }
PRODUCT(32, R16, 16, 17, PLUS_F16(s, 0))
PRODUCT(64, R32, 32, 33, PLUS_F16(s, 0), PLUS_F16(s, 16))
PRODUCT(96, R48, 48, 49, PLUS_F16(s, 0), PLUS_F16(s, 16), PLUS_F16(s, 32))
PRODUCT(128, R64, 64, 65, PLUS_F16(s, 0), PLUS_F16(s, 16), PLUS_F16(s, 32), PLUS_F16(s, 48))
PRODUCT(160, R80, 80, 81, PLUS_F16(s, 0), PLUS_F16(s, 16), PLUS_F16(s, 32), PLUS_F16(s, 48), PLUS_F16(s, 64))
PRODUCT(192, R96, 96, 97, PLUS_F16(s, 0), PLUS_F16(s, 16), PLUS_F16(s, 32), PLUS_F16(s, 48), PLUS_F16(s, 64),
        PLUS_F16(s, 80))
PRODUCT(224, R112, 112, 113, PLUS_F16(s, 0), PLUS_F16(s, 16), PLUS_F16(s, 32), PLUS_F16(s, 48), PLUS_F16(s, 64),
        PLUS_F16(s, 80), PLUS_F16(s, 96))
PRODUCT(256, R128, 128, 129, PLUS_F16(s, 0), PLUS_F16(s, 16), PLUS_F16(s, 32), PLUS_F16(s, 48), PLUS_F16(s, 64),
        PLUS_F16(s, 80), PLUS_F16(s, 96), PLUS_F16(s, 112))
