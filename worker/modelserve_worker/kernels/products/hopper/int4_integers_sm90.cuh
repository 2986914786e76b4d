// The products of a stage of INT4 in integers, for integer_rows_sm90.cu, which includes this where they are its own.

#pragma once

#include "group_scales_sm90.cuh"
#include "integer_inputs_sm90.cuh"

// Of 32 inputs of a row: how much an integer's one is, and what their products are too large by for the matrix's zero.
struct Tables {};

struct Unit {
  float unit, zero;
};

__device__ __forceinline__ void make_integers(unsigned char* memory, const Rows& of, int first) {
  // Elements of every other plane are the upper nibbles of bytes, sixteen times as large.
  make_eights<4, Unit>(memory, of, first, [](const Integers& of_32, int plane) -> Unit {
    return {of_32.unit * (plane % 2 ? 0.0625f : 1.0f), (float)of_32.sum * -8.0f * of_32.unit};
  });
}

// sums of outputs n and n + 8 in each half, of row lane % 4.
__device__ __forceinline__ void consume(float (&sums)[4], const unsigned char* memory, const unsigned char* stage,
                                        int tile, int group, int warp, int lane, const Tables&) {
  const int row = 16 * warp + lane / 4, t = lane % 4;
  u32 bytes[2][2][2][4];  // of halves and outputs: of four inputs and of the next four, four pairs of planes
#pragma unroll
  for (int half = 0; half < 2; half++)
#pragma unroll
    for (int second = 0; second < 2; second++)
#pragma unroll
      for (int four = 0; four < 2; four++)
        transpose_bytes(bytes[half][second][four], *(const uint4*)(stage + half * HALF_STAGE + group * HALF_BYTES +
                                                                   piece(row + 8 * second, 2 * t + four)));
  const unsigned char* x = memory + X_AT + tile * PLANES * PLANE_BYTES + lane / 8 % ROWS * 64 + lane / 4 % 2 * 32 + t * 8;
  const Unit* units = (const Unit*)(memory + UNITS_AT) + tile * PLANES * ROWS + t % ROWS;
  const unsigned short* scales = (const unsigned short*)(stage + SCALES_AT + group * SCALE_BYTES) + row;
#pragma unroll
  for (int plane = 0; plane < PLANES; plane++) {
    const uint2 columns = *(const uint2*)(x + plane * PLANE_BYTES);
    const Unit unit = units[plane * ROWS];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      u32 a[4];
#pragma unroll
      for (int i = 0; i < 4; i++) a[i] = bytes[half][i % 2][i / 2][plane / 2] & (plane % 2 ? 0xF0F0F0F0 : 0x0F0F0F0F);
      int products[4];
      multiply_integers(products, a, columns);
#pragma unroll
      for (int second = 0; second < 2; second++) {
        const float product =
            (float)(products[2 * second] * 256 + products[2 * second + 1]) * unit.unit + unit.zero;
        const u32 scale = scales[half * (SCALE_STAGE / 2) + plane / (PLANES / SCALES) * HALF_ROWS + 8 * second];
        sums[2 * half + second] += scale_of(scale) * product;
      }
    }
  }
}

// A lane's sums are of all inputs.
__device__ __forceinline__ void all_groups(float (&)[4]) {}
