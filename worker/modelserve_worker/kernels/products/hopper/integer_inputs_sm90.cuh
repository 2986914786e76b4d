// x as integers where eight neighbouring inputs are a lane's, for integer_rows_sm90.cu.

#pragma once

// What the threads that multiply make of inputs from `first` on, for all groups: a Unit of each plane of 32 inputs, as
// `unit_of` (integers, plane) says. LANES of eight inputs have one in common.
template <int LANES, class Unit, class UnitOf>
__device__ __forceinline__ void make_eights(unsigned char* memory, const Rows& of, int first, const UnitOf& unit_of) {
  constexpr int PIECES = TILES * PLANES * 4;  // of eight inputs, in a row
  constexpr int TOGETHER = 4;                 // loads of a thread that are under way
  for (int from = 0; from < of.rows * PIECES; from += TOGETHER * CONSUMERS) {
    uint4 loaded[TOGETHER];
#pragma unroll
    for (int each = 0; each < TOGETHER; each++) {
      const int number = from + each * CONSUMERS + threadIdx.x, row = number / PIECES;
      const int input = first + number % PIECES * 8;
      loaded[each] = make_uint4(0, 0, 0, 0);
      if (row < of.rows && input < of.inputs)
        loaded[each] = __ldcg((const uint4*)(of.x + (long long)row * of.stride + input));
    }
#pragma unroll
    for (int each = 0; each < TOGETHER; each++) {
      const int number = from + each * CONSUMERS + threadIdx.x, row = number / PIECES;
      const int plane = number % PIECES / 4, quarter = number % 4;
      const Integers integers = integers_of<LANES>(loaded[each]);
      if (row >= of.rows) continue;
      unsigned char* to = memory + X_AT + plane * PLANE_BYTES + row * 64 + quarter * 8;
      *(uint2*)to = integers.high;
      *(uint2*)(to + 32) = integers.low;
      if (quarter == 0) ((Unit*)(memory + UNITS_AT))[plane * ROWS + row] = unit_of(integers, plane);
    }
  }
}
