// The products of a stage of INT4, for linear_rows_sm90.cu, which includes this where they are its own.

#pragma once

#include "int4_elements_sm90.cuh"

constexpr int PLANES_OF_SCALE = 8 / INT4;

// What a lane reads: inputs 8 t .. 8 t + 7 of each plane of 32, as neighbours; t = lane % 4.
struct Words {
  const unsigned char *stage, *inputs;
  int group, row, t, x_row;

  // Pairs of words of two rows of a half of the tile: nibbles 0 to 3, or with `high` 4 to 7.
  __device__ __forceinline__ void read(u32 (&halves)[2][4], int half, int high) const {
#pragma unroll
    for (int second = 0; second < 2; second++) {
      u32 words[2][4];
      const unsigned char* at = stage + half * HALF_STAGE + group * HALF_BYTES;
      load_16(words[0], at + piece(row + 8 * second, 2 * t));
      load_16(words[1], at + piece(row + 8 * second, 2 * t + 1));
#pragma unroll
      for (int pair = 0; pair < 4; pair++)
        halves[second][pair] = __byte_perm(words[pair / 2][pair % 2 * 2], words[pair / 2][pair % 2 * 2 + 1],
                                           high ? 0x7632 : 0x5410);
    }
  }
  __device__ __forceinline__ void read_inputs(u32 (&x)[4], int plane, int block) const {
    load_16(x, inputs + plane / 2 * X_BOX_BYTES + piece(8 * block + x_row, plane % 2 * 4 + t));
  }
  __device__ __forceinline__ const unsigned short* scales(int plane, int half) const {
    return (const unsigned short*)(stage + SCALES_AT + half * SCALE_STAGE + group * SCALE_BYTES) +
           plane / PLANES_OF_SCALE * HALF_ROWS + row;
  }
#if ZEROS
  // What elements of a plane and row of a half are too large by, as 128 + nibble.
  __device__ __forceinline__ u32 excess(int plane, int half, int second) const {
    const unsigned char* zeros = stage + ZEROS_AT + half * ZERO_STAGE + group * ZERO_BYTES + row + 8 * second;
    return excess_of(zero_point(zeros, plane / PLANES_OF_SCALE, HALF_ROWS));
  }
#endif
};

#if ROWS == 8

constexpr int TOGETHER = 2;  // planes whose products are under way at a time

// Pairs of words of two rows, eight words each -> the operands of a plane's two products, 128 + nibble.
__device__ __forceinline__ void plane_operands(u32 (&a)[8], const u32 (&halves)[2][4], int nibble) {
#pragma unroll
  for (int pair = 0; pair < 4; pair++)
#pragma unroll
    for (int row = 0; row < 2; row++) a[2 * pair + row] = nibble_pair(halves[row][pair] >> (4 * nibble));
}

// For so few columns it costs less to scale sums than elements.
__device__ __forceinline__ void multiply_words(float (&sums)[SUMS][4], const Words& words) {
#if ZEROS
  constexpr int OFFSETS = 2;  // rows of both halves have their own
#else
  constexpr int OFFSETS = 1;
  const u32 excess[4] = {EXCESS, EXCESS, EXCESS, EXCESS};
#endif
#pragma unroll
  for (int high = 0; high < 2; high++) {
    u32 halves[2][2][4];
#pragma unroll
    for (int half = 0; half < 2; half++) words.read(halves[half], half, high);
#pragma unroll
    for (int nibble = 0; nibble < 4; nibble += TOGETHER) {
      float extra[TOGETHER][OFFSETS][4] = {}, inside[TOGETHER][2][4];
      u32 x[TOGETHER][4], a[TOGETHER][2][8];
#pragma unroll
      for (int each = 0; each < TOGETHER; each++) {
        words.read_inputs(x[each], 4 * high + nibble + each, 0);
#pragma unroll
        for (int half = 0; half < 2; half++) plane_operands(a[each][half], halves[half], nibble + each);
      }
      // What sums of 128 + nibble are too large by, then these on top.
#pragma unroll
      for (int step = 0; step < 2; step++)
#pragma unroll
        for (int each = 0; each < TOGETHER; each++)
#pragma unroll
          for (int half = 0; half < OFFSETS; half++) {
#if ZEROS
            const int plane = 4 * high + nibble + each;
            const u32 first = words.excess(plane, half, 0), second = words.excess(plane, half, 1);
            const u32 excess[4] = {first, second, first, second};
#endif
            multiply(extra[each][half], excess, x[each][2 * step], x[each][2 * step + 1]);
          }
#pragma unroll
      for (int step = 0; step < 2; step++)
#pragma unroll
        for (int each = 0; each < TOGETHER; each++)
#pragma unroll
          for (int half = 0; half < 2; half++) {
            float(&sum)[4] = inside[each][half];
            multiply(sum, step ? sum : extra[each][half % OFFSETS], a[each][half] + 4 * step, x[each][2 * step], x[each][2 * step + 1]);
          }
#pragma unroll
      for (int each = 0; each < TOGETHER; each++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const unsigned short* scales = words.scales(4 * high + nibble + each, half);
          const float first = scale_of(scales[0]), second = scale_of(scales[8]);
          float(&sum)[4] = sums[half];
          float(&part)[4] = inside[each][half];
          sum[0] += first * part[0];
          sum[1] += first * part[1];
          sum[2] += second * part[2];
          sum[3] += second * part[3];
        }
    }
  }
}

#else

__device__ __forceinline__ void multiply_words(float (&sums)[SUMS][4], const Words& words) {
#pragma unroll
  for (int high = 0; high < 2; high++) {
    u32 halves[2][2][4];
    ElementScale scale[2][2];
#pragma unroll
    for (int half = 0; half < 2; half++) words.read(halves[half], half, high);
#pragma unroll
    for (int nibble = 0; nibble < 4; nibble++) {
      const int plane = 4 * high + nibble;
      u32 x[BLOCKS][4], a[2][8];
#pragma unroll
      for (int block = 0; block < BLOCKS; block++) words.read_inputs(x[block], plane, block);
#pragma unroll
      for (int half = 0; half < 2; half++)
#pragma unroll
        for (int second = 0; second < 2; second++) {
          if (nibble == 0 || plane % PLANES_OF_SCALE == 0) {
            scale[half][second] = element_scale(words.scales(plane, half)[8 * second]);
#if ZEROS
            scale[half][second].excess = words.excess(plane, half, second);
#endif
          }
#pragma unroll
          for (int pair = 0; pair < 4; pair++)
            a[half][2 * pair + second] = element_pair(halves[half][second][pair] >> 4 * nibble, scale[half][second]);
        }
#pragma unroll
      for (int step = 0; step < 2; step++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
          for (int block = 0; block < BLOCKS; block++)
            multiply(sums[half * BLOCKS + block], a[half] + 4 * step, x[block][2 * step], x[block][2 * step + 1]);
    }
  }
}

#endif

__device__ __forceinline__ void consume(float (&sums)[SUMS][4], const unsigned char* stage, int group, int warp,
                                        int lane) {
  const unsigned char* inputs = stage + X_AT + group * X_BOXES * X_BOX_BYTES;
  multiply_words(sums, {stage, inputs, group, 16 * warp + lane / 4, lane % 4, row_of_column(lane / 4)});
}
