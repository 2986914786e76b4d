// The products of a stage of NVFP4, for linear_rows_sm90.cu, which includes this where they are its own.

#pragma once

#include "nvfp4_elements_sm90.cuh"

__device__ __forceinline__ void consume(float (&sums)[SUMS][4], const unsigned char* stage, int group, int warp,
                                        int lane) {
  const int row = 16 * warp + lane / 4, t = lane % 4;
  const u32 inputs = shared_address(stage) + X_AT + group * X_BOXES * X_BOX_BYTES;
  const unsigned char* scales = stage + SCALES_AT + group * SCALE_BYTES + row;
#pragma unroll
  for (int four = 0; four < 2; four++) {  // planes together
    u32 words[2][2][4];                   // of halves and rows
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int second = 0; second < 2; second++)
        load_16(words[half][second],
                stage + half * HALF_STAGE + group * HALF_BYTES + piece(row + 8 * second, 2 * t + four));
#pragma unroll
    for (int each = 0; each < 4; each++) {
      const int plane = 4 * four + each;
      u32 x[BLOCKS][4];
#pragma unroll
      for (int block = 0; block < BLOCKS; block++)
        load_matrices(x[block], inputs + plane / 2 * X_BOX_BYTES + piece(8 * block + lane % 8, plane % 2 * 4 + lane / 8));
#pragma unroll
      for (int step = 0; step < 2; step++)  // of 16 inputs
#pragma unroll
        for (int half = 0; half < 2; half++) {
          u32 a[4];
#pragma unroll
          for (int second = 0; second < 2; second++) {
            const u32 scale =
                nvfp4_scale(scales[half * SCALE_STAGE + (2 * plane + step) * HALF_ROWS + 8 * second]);
#pragma unroll
            for (int pair = 0; pair < 2; pair++)
              a[2 * pair + second] = nvfp4_pair(words[half][second][each], 2 * step + pair, scale);
          }
#pragma unroll
          for (int block = 0; block < BLOCKS; block++)
            multiply(sums[half * BLOCKS + block], a, x[block][2 * step], x[block][2 * step + 1]);
        }
    }
  }
}
