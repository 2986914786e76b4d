// The products of a stage of INT4 in integers, for integer_rows_sm90.cu, which includes this where they are its own.
//
// A byte of a word has elements of two planes, and its four bytes those of eight. They stay where they are: a column of a
// product has x of one plane at that plane's place in every four bytes, and zeros beside it, so that one product of all
// four bytes is of as many planes as there are sets of columns. Each lane then has sums of a plane of its own to scale.

#pragma once

#include "group_scales_sm90.cuh"
#include "integer_inputs_sm90.cuh"

constexpr int PASSES = ROWS;  // of the same bytes, by which all four places have their columns
constexpr int PLACES = 4 / PASSES;

// Of 32 inputs of a row: how much an integer's one is, and what a zero point of one, or the matrix's zero, adds to their
// products, as an integer or in all.
struct Unit {
  float unit;
#if ZEROS
  int zero;
#else
  float zero;
#endif
};

// Of permutations: byte i of four to the place that is the lane's, with zeros beside.
struct Tables {
  u32 byte_to_place[4];
  __device__ __forceinline__ Tables() {
    const int place = threadIdx.x % 32 / 8 / ROWS * 4;
#pragma unroll
    for (u32 i = 0; i < 4; i++) byte_to_place[i] = 0x4444 - ((4 - i) << place);
  }
};

__device__ __forceinline__ void make_integers(unsigned char* memory, const Rows& of, int first) {
  // Elements of every other plane are the upper nibbles of bytes, sixteen times as large.
  make_eights<4, Unit>(memory, of, first, [](const Integers& of_32, int plane) -> Unit {
#if ZEROS
    return {of_32.unit * (plane % 2 ? 0.0625f : 1.0f), plane % 2 ? of_32.sum * -16 : -of_32.sum};
#else
    return {of_32.unit * (plane % 2 ? 0.0625f : 1.0f), (float)of_32.sum * -8.0f * of_32.unit};
#endif
  });
}

// sums of outputs n and n + 8 in each half: of a row and of some planes of its inputs, whose sum `all_groups` makes.
__device__ __forceinline__ void consume(float (&sums)[4], const unsigned char* memory, const unsigned char* stage,
                                        int tile, int group, int warp, int lane, const Tables& tables) {
  const int row = 16 * warp + lane / 4, t = lane % 4, set = lane / 8;
  u32 words[2][2][8];  // of halves and outputs: eight neighbours
#pragma unroll
  for (int half = 0; half < 2; half++)
#pragma unroll
    for (int second = 0; second < 2; second++)
#pragma unroll
      for (int four = 0; four < 2; four++) {
        const uint4 loaded = *(const uint4*)(stage + half * HALF_STAGE + group * HALF_BYTES +
                                             piece(row + 8 * second, 2 * t + four));
        u32* to = words[half][second] + 4 * four;
        to[0] = loaded.x, to[1] = loaded.y, to[2] = loaded.z, to[3] = loaded.w;
      }
  // A set of columns is of a row and of a place, in each pass another; a lane's sums are of set t.
  const unsigned char* x = memory + X_AT + (tile * PLANES + set / ROWS * 2) * PLANE_BYTES + set % ROWS * 64 +
                           lane / 4 % 2 * 32 + t * 8;
  const int mine = t / ROWS * 2;  // the first plane of the lane's sums
  const Unit* units = (const Unit*)(memory + UNITS_AT) + (tile * PLANES + mine) * ROWS + t % ROWS;
  const int first = mine * SCALES / PLANES;  // its group of inputs
  const unsigned short* scales = (const unsigned short*)(stage + SCALES_AT + group * SCALE_BYTES) + first * HALF_ROWS + row;
#if ZEROS
  const unsigned char* zeros = stage + ZEROS_AT + group * ZERO_BYTES + first / 2 * HALF_ROWS + row;
#endif
  float parts[PASSES][4];  // of groups of more than a plane, before they are scaled
#pragma unroll
  for (int nibble = 0; nibble < 2; nibble++) {
    int products[PASSES][2][4];
    uint2 bytes[PASSES];
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++)
      bytes[pass] = *(const uint2*)(x + (2 * PLACES * pass + nibble) * PLANE_BYTES);
#pragma unroll
    for (int step = 0; step < 4; step++) {  // of eight words: two of each lane
      uint2 columns[PASSES];
#pragma unroll
      for (int pass = 0; pass < PASSES; pass++) {
        const u32 four = step / 2 ? bytes[pass].y : bytes[pass].x;
        columns[pass].x = __byte_perm(four, 0, tables.byte_to_place[step % 2 * 2]) << 8 * PLACES * pass;
        columns[pass].y = __byte_perm(four, 0, tables.byte_to_place[step % 2 * 2 + 1]) << 8 * PLACES * pass;
      }
#pragma unroll
      for (int half = 0; half < 2; half++) {
        u32 a[4];
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = words[half][i % 2][2 * step + i / 2] & (nibble ? 0xF0F0F0F0 : 0x0F0F0F0F);
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++)
          if (step == 0)
            multiply_integers(products[pass][half], a, columns[pass]);
          else
            add_unsigned_integers(products[pass][half], a, columns[pass]);
      }
    }
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
      const int plane = 2 * PLACES * pass + nibble, behind = plane * SCALES / PLANES;  // of the first plane and group
      const Unit unit = units[plane * ROWS];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int half = i / 2, second = i % 2;
        int(&two)[4] = products[pass][half];
        int product = two[2 * second] * 256 + two[2 * second + 1];
#if ZEROS
        const u32 both = zeros[half * ZERO_STAGE + behind / 2 * HALF_ROWS + 8 * second];
        product += (int)(both >> (first + behind) % 2 * 4 & 15) * unit.zero;
        const float value = (float)product * unit.unit;
#else
        const float value = (float)product * unit.unit + unit.zero;
#endif
        float& part = parts[pass][i];
        part = SCALES < PLANES && nibble ? part + value : value;
        if (SCALES < PLANES && !nibble) continue;
        const u32 scale = scales[half * (SCALE_STAGE / 2) + behind * HALF_ROWS + 8 * second];
        sums[i] += scale_of(scale) * part;
      }
    }
  }
}

// Lanes that have the same row's sums of other planes add them.
__device__ __forceinline__ void all_groups(float (&sums)[4]) { add_sets(sums); }
