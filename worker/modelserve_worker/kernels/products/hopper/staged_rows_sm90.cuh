// Sums of a warpgroup's products [64 rows of a matrix, rows of x], rounded, turned in shared memory and written to rows of
// the output, 16 bytes at a time: 32 rows of x together.

#pragma once

#include "barriers_sm90.cuh"
#include "sm90.cuh"

constexpr int TURNED = 32;                  // rows of x
constexpr int STAGED_BYTES = 64 * 2 * TURNED * 2;  // of a warpgroup: two times so many rows on their way

enum StagedBarrier { STAGED = 2 };  // and the next one: of each warpgroup

// A pair of gates and a pair of what they open, bfloat16 each.
__device__ __forceinline__ u32 opened(u32 gates, u32 ups) {
  const float low = rounded(gelu(__uint_as_float(gates << 16))) * __uint_as_float(ups << 16);
  const float high = rounded(gelu(__uint_as_float(gates & 0xFFFF0000u))) * __uint_as_float(ups & 0xFFFF0000u);
  return bf16_pair(low, high);
}

// Rows [begin, end) of an output of so many columns; a warpgroup's columns begin at `first`.
struct OutputRows {
  int begin, end, outputs, first;
};

// Part `part` of so many rows of x, from eight pairs of sums of neighbouring rows of x each. A thread has outputs n and
// n + 8 of its warp's 16 or, OPENED, output n of its warp's 8, the second pair being of the other half of the matrix.
// `staged`: STAGED_BYTES of the warpgroup's, of which `half` was not written last.
template <bool OPENED>
__device__ __forceinline__ void store_part(const u32* pairs, int part, unsigned short* output, const OutputRows& rows,
                                           unsigned char* staged, int& half) {
  const int warpgroup = threadIdx.x / 128, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  constexpr int PIECES = (OPENED ? 32 : 64) / 8;  // of 16 bytes, in a row of the warpgroup's outputs
  staged += half * (STAGED_BYTES / 2);  // the barrier below says of the other half that it has been read
  half ^= 1;
  const u32 buffer = shared_address(staged);
#pragma unroll
  for (int at = 0; at < TURNED; at += OPENED ? 32 : 16) {
    u32 turned[4];
#pragma unroll
    for (int i = 0; i < 4; i++) turned[i] = OPENED ? opened(pairs[2 * i], pairs[2 * i + 1]) : pairs[at / 4 + i];
    const int row = at + lane % 8 + (OPENED ? lane / 8 : lane / 16) * 8;
    const int piece = OPENED ? warp ^ (row / 2 % 4) : (2 * warp + lane / 8 % 2) ^ (row % 8);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     buffer + (row * PIECES + piece) * 16),
                 "r"(turned[0]), "r"(turned[1]), "r"(turned[2]), "r"(turned[3])
                 : "memory");
  }
  barrier_sync(STAGED + warpgroup, 128);
#pragma unroll
  for (int i = thread; i < TURNED * PIECES; i += 128) {
    const int at = i / PIECES, piece = i % PIECES, row = rows.begin + part * TURNED + at;
    const int column = rows.first + piece * 8, swizzled = piece ^ (OPENED ? at / 2 % 4 : at % 8);
    if (row < rows.end && column < rows.outputs)
      *(uint4*)(output + (long long)row * rows.outputs + column) =
          *(const uint4*)(staged + (at * PIECES + swizzled) * 16);
  }
}
