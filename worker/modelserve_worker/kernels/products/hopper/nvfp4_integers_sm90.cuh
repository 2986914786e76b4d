// The products of a stage of NVFP4 in integers, for integer_rows_sm90.cu, which includes this where they are its own.
//
// Twice an element is an integer of 12 at most, by its size one of eight bytes. A byte permutation finds four; where their
// nibbles have the sign, it makes the byte's own sign of all eight bits. So an element is the sum of two: of one that is not
// negative the size and one more, of one that is nothing; then less the size, or less one, which is the sign of all sizes
// but nothing. Groups of 16 inputs have scales of their own: a column of a product has x of one group, and zeros in place
// of the other's.

#pragma once

constexpr int TOGETHER_PLANES = ROWS == 1 ? 2 : 1;  // whose groups are columns of one product
constexpr u32 SIGNS = 0x88888888;

typedef float Unit;  // how much an integer's one is

// Of permutations: elements without sign, and with it; four each.
struct Tables {
  u32 above[2], below[2], second, place;
  __device__ __forceinline__ Tables() {
    above[0] = in_register(0x04030200), above[1] = in_register(0x0D090705);
    below[0] = in_register(0xFDFEFF00), below[1] = in_register(0xF4F8FAFC);
    second = in_register(0x0100), place = in_register(1 << 20);
  }
};

// What the threads that multiply make of inputs from `first` on, for all groups of warps: of each plane, a lane's pairs
// 8 i + 2 t, first elements before second ones.
__device__ __forceinline__ void make_integers(unsigned char* memory, const Rows& of, int first) {
  constexpr int PIECES = TILES * PLANES * 4;  // of four pairs, in a row
  constexpr int TOGETHER = 4;                 // whose loads are under way
  for (int from = 0; from < of.rows * PIECES; from += TOGETHER * CONSUMERS) {
    u32 loaded[TOGETHER][4];
#pragma unroll
    for (int each = 0; each < TOGETHER; each++) {
      const int number = from + each * CONSUMERS + threadIdx.x, row = number / PIECES;
      const int input = first + number % PIECES / 4 * 32 + number % 4 * 2;
#pragma unroll
      for (int i = 0; i < 4; i++)
        loaded[each][i] = row < of.rows && input < of.inputs
                              ? __ldcg((const u32*)(of.x + (long long)row * of.stride + input + 8 * i))
                              : 0;
    }
#pragma unroll
    for (int each = 0; each < TOGETHER; each++) {
      const int number = from + each * CONSUMERS + threadIdx.x, row = number / PIECES;
      const int plane = number % PIECES / 4, t = number % 4;
      const u32(&pairs)[4] = loaded[each];
      u32 most = 0;
#pragma unroll
      for (int i = 0; i < 4; i++) most = max(most, larger_bits(pairs[i]));
      const Power power = power_of(most_of_neighbours(most));
      u32 high[2] = {}, low[2] = {};
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int second = 0; second < 2; second++) {
          const int integer =
              integer_of(__uint_as_float(second ? pairs[i] & 0xFFFF0000u : pairs[i] << 16), power.inverse);
          high[second] |= ((u32)(integer + 128) >> 8 & 0xFF) << 8 * i, low[second] |= ((u32)integer & 0xFF) << 8 * i;
        }
      if (row >= of.rows) continue;
      unsigned char* to = memory + X_AT + plane * PLANE_BYTES + row * 64 + t * 8;
      *(uint2*)to = make_uint2(high[0], high[1]);
      *(uint2*)(to + 32) = make_uint2(low[0], low[1]);
      if (t == 0) ((Unit*)(memory + UNITS_AT))[plane * ROWS + row] = power.unit * 0.5f;
    }
  }
}

// sums of outputs n and n + 8 in each half: of a row and of some groups of its inputs, whose sum `all_groups` makes.
__device__ __forceinline__ void consume(float (&sums)[4], const unsigned char* memory, const unsigned char* stage,
                                        int tile, int group, int warp, int lane, const Tables& tables) {
  const int row = 16 * warp + lane / 4, t = lane % 4, set = lane / 8;  // two columns have the high and the low bytes
  u32 words[2][2][8];
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
  // A set of columns has x of a group: of every other plane or, of two rows, of its row.
  const u32 of_group = (ROWS == 1 ? set % 2 : set / 2) ? 0xFFFF0000u : 0x0000FFFFu;
  const unsigned char* x = memory + X_AT + tile * PLANES * PLANE_BYTES + (ROWS == 1 ? 0 : set % 2 * 64) +
                           lane / 4 % 2 * 32 + t * 8;
  const int mine = ROWS == 1 ? t : t / 2;  // group, of those that the sums of a product are of
  const Unit* units = (const Unit*)(memory + UNITS_AT) + tile * PLANES * ROWS + (ROWS == 1 ? t / 2 : t % 2);
  const unsigned char* scales = stage + SCALES_AT + group * SCALE_BYTES + mine * HALF_ROWS + row;
#pragma unroll
  for (int first = 0; first < PLANES; first += TOGETHER_PLANES) {
    const Unit unit = units[first * ROWS];
    int products[2][4] = {};
#pragma unroll
    for (int each = 0; each < TOGETHER_PLANES; each++) {
      const int plane = first + each;
      uint2 columns = *(const uint2*)(x + plane * PLANE_BYTES);
      const u32 mask = ROWS == 1 && set / 2 != each ? 0 : of_group;
      columns.x &= mask, columns.y &= mask;
#pragma unroll
      for (int sign = 0; sign < 2; sign++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          u32 a[4];
#pragma unroll
          for (int second = 0; second < 2; second++) {
            const u32 places = words[half][second][plane] ^ (sign ? SIGNS : 0);
            const u32(&from)[2] = sign ? tables.below : tables.above;
            a[second] = permuted_bytes(from[0], from[1], places);
            a[2 + second] = permuted_bytes(from[0], from[1], upper_half(places, tables.second));
          }
          add_integers(products[half], a, columns);
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int second = 0; second < 2; second++) {
        const float product = (float)(products[half][2 * second] * 256 + products[half][2 * second + 1]) * unit;
        const u32 code = scales[half * (SCALE_STAGE) + first * 2 * HALF_ROWS + 8 * second];
        sums[2 * half + second] += __uint_as_float(code * tables.place + 0x3A800000u) * product;
      }
  }
}

// Lanes that have the same row's sums of other groups add them.
__device__ __forceinline__ void all_groups(float (&sums)[4]) { add_sets(sums); }
