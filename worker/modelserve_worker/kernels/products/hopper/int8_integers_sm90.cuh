// The products of a stage of INT8 in integers, for integer_rows_sm90.cu, which includes this where they are its own.
//
// Elements are integers already, and the 128 inputs of a block have one unit, so that products of inputs with one scale
// are added as integers: of 128 x 128 x 127 x 256 at most, below 2^31. Where all of a block have one, they may be multiplied
// in any order: a lane takes 32 bytes that lie beside each other, which no other lane's meet in a bank.

#pragma once

#include "group_scales_sm90.cuh"
#include "integer_inputs_sm90.cuh"

struct Tables {};
typedef float Unit;  // how much an integer's one is

__device__ __forceinline__ void make_integers(unsigned char* memory, const Rows& of, int first) {
  make_eights<16, Unit>(memory, of, first, [](const Integers& of_block, int) { return of_block.unit; });
}

constexpr int OF_SCALE = PLANES / (SCALES ? SCALES : 1);  // planes
constexpr bool ANY_ORDER = OF_SCALE == PLANES;

// sums of outputs n and n + 8 in each half, of row lane % 4. Of every 64 bytes, the first ones of pairs are elements 0 to
// 31, and the second ones 32 to 63.
__device__ __forceinline__ void consume(float (&sums)[4], const unsigned char* memory, const unsigned char* stage,
                                        int tile, int group, int warp, int lane, const Tables&) {
  const int row = 16 * warp + lane / 4, t = lane % 4;
  const unsigned char* x = memory + X_AT + tile * PLANES * PLANE_BYTES + lane / 8 % ROWS * 64 + lane / 4 % 2 * 32;
  const Unit unit = ((const Unit*)(memory + UNITS_AT))[tile * PLANES * ROWS + t % ROWS];
  const unsigned short* scales = (const unsigned short*)(stage + SCALES_AT + group * SCALE_BYTES) + row;
  int products[2][4] = {};
#pragma unroll
  for (int step = 0; step < 2; step++) {
    const int piece_of_lane = ANY_ORDER ? 2 * t + step : 4 * step + t;  // of sixteen bytes
    u32 a[2][2][4];
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int second = 0; second < 2; second++) {
        const uint4 pairs = *(const uint4*)(stage + half * HALF_STAGE + group * HALF_BYTES +
                                            piece(row + 8 * second, piece_of_lane));
#pragma unroll
        for (int plane = 0; plane < 2; plane++) {
          const u32 places = plane ? 0x7531 : 0x6420;
          a[half][plane][second] = __byte_perm(pairs.x, pairs.y, places);
          a[half][plane][2 + second] = __byte_perm(pairs.z, pairs.w, places);
        }
      }
#pragma unroll
    for (int plane = 0; plane < 2; plane++) {
      const uint2 columns =
          *(const uint2*)(x + (piece_of_lane / 4 * 2 + plane) * PLANE_BYTES + piece_of_lane % 4 * 8);
      const int done = 2 * step + plane + 1;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        add_integers(products[half], a[half][plane], columns);
        if (done % OF_SCALE) continue;
#pragma unroll
        for (int second = 0; second < 2; second++) {
          int(&two)[4] = products[half];
          const u32 scale =
              SCALES ? scales[half * (SCALE_STAGE / 2) + (done / OF_SCALE - 1) * HALF_ROWS + 8 * second] : 0;
          const float product = (float)(two[2 * second] * 256 + two[2 * second + 1]) * unit;
          sums[2 * half + second] += SCALES ? scale_of(scale) * product : product;
          two[2 * second] = two[2 * second + 1] = 0;
        }
      }
    }
  }
}

// A lane's sums are of all inputs.
__device__ __forceinline__ void all_groups(float (&)[4]) {}
