// Products of one or two rows with an INT4, NVFP4 or INT8 matrix that is read once, for compute capability 9.0: output [rows, outputs]
// = x W^T.
//
// Unpacking binds a product of few rows, and what bfloat16 takes of it is most of the time: a pair of elements a shift and
// a logical operation. Integers of eight bits take one logical operation for four elements. So x becomes integers, too: of
// each 32 inputs a power of two times numbers of sixteen bits, which are two columns of m16n8k32 products, their high and
// their low bytes. Every element of x is within 2^-15 of the largest of its 32. The sum of 32 products is an exact integer
// of up to 32 x 240 x 127 x 256, which its conversion to float rounds to 24 bits, before the offset of the elements is taken
// off: to within 2^-24 of the sum with that offset.
//
// Where one of 32 inputs is infinite or no number, their products are no numbers (integer_products_sm90.cuh). Other kernels
// multiply such inputs as float does, so an infinite one may leave an infinite output there and none here.
//
// A CTA takes tiles of OUTPUTS rows of the matrix, over all inputs or, SPLIT, over a part of them: then output is
// [parts, rows, outputs] float32, and whoever reads it adds the parts. Warps work in groups of OUTPUTS / 32. In every stage
// each group has a block of 256 inputs. The groups' sums meet in shared memory, in one order. One more warp keeps all
// stages in flight. It asks for weights before the kernel ahead has ended: they depend on none.
//
// Whoever compiles defines OUTPUTS: a multiple of 32 up to 352; GROUPS, and blocks of inputs in a stage; ROWS: of x at
// most, 1 or 2; SCALES: of a row in 256 inputs, 8, 4, 2 or 1, of NVFP4 16; TILES: of 256 inputs that x has, or a part of
// it; GATED: whether the second half of a tile holds the rows that those of the first, after GELU, are multiplied with;
// SPLIT: 0 or 1; STAGES; NVFP4: whether elements are e2m1, with scales of a byte, and rows have scales of their own; INT8:
// whether elements take a byte and a block is of 128 inputs, of which SCALES are, or 0 where rows have scales;
// HALF_SCALES: of INT4 and INT8, whether they are float16; ZEROS: whether INT4's groups have zero points, else 8.

#ifndef NVFP4
#define NVFP4 0
#endif
#ifndef INT8
#define INT8 0
#endif
#define ROW_SCALES (NVFP4 || SCALES == 0)
#define SCALES_OF_BLOCK SCALES

#include "pipeline.cuh"
#include "zero_points_sm90.cuh"
#include "integer_products_sm90.cuh"
#include "product_output_sm90.cuh"

constexpr int PLANES = INT8 ? 4 : 8;       // of 32 inputs, in a block
constexpr int GROUP = OUTPUTS;             // threads
constexpr int CONSUMERS = GROUPS * GROUP;  // threads
constexpr int HALF_ROWS = OUTPUTS / 2;     // of the matrix, in each half of a tile
constexpr int HALF_BYTES = HALF_ROWS * 128;  // of a block; all blocks of the first half come before the second's
constexpr int HALF_STAGE = GROUPS * HALF_BYTES;
constexpr int SCALE_BYTES = SCALES * HALF_ROWS * (NVFP4 ? 1 : 2);  // of a half of a block
constexpr int SCALE_STAGE = (GROUPS * SCALE_BYTES + 127) / 128 * 128;
constexpr int SCALES_AT = 2 * HALF_STAGE;
enum Zeros {
  ZERO_BYTES = ZERO_ROWS * HALF_ROWS,  // of a half of a block
  ZERO_STAGE = (GROUPS * ZERO_BYTES + 127) / 128 * 128,
  ZEROS_AT = SCALES_AT + 2 * SCALE_STAGE,
};
constexpr int LOADED_BYTES = SCALES_AT + 2 * GROUPS * (SCALE_BYTES + ZERO_BYTES);
constexpr int STAGE_BYTES = (ZEROS_AT + 2 * ZERO_STAGE + 1023) / 1024 * 1024;
constexpr int PLANE_BYTES = ROWS * 64;     // of x: 32 high bytes and 32 low ones of each row
constexpr int X_AT = STAGES * STAGE_BYTES;
constexpr int UNITS_AT = X_AT + TILES * PLANES * PLANE_BYTES;
constexpr int SUMS_AT = UNITS_AT + TILES * PLANES * ROWS * 8;  // a unit takes eight bytes at most
constexpr int BARRIERS_AT = SUMS_AT + (GROUPS - 1) * GROUP * 16;

static_assert(STAGES >= 2, "a stage is held until the next has come");
static_assert(BARRIERS_AT + Stages<STAGES>::BYTES == SHARED_BYTES, "");
static_assert(ROWS == 1 || ROWS == 2, "columns of products are of four rows at most");

enum Barrier { SUMS_FULL = 1, SUMS_FREE, X_READ, X_WRITTEN };

struct Rows {
  const unsigned short* x;  // bfloat16 [rows, inputs], `stride` apart
  int rows, inputs, stride;
};

// Where each of four sets of two columns has sums of its own, of one row or two: those of a row on top of one another.
__device__ __forceinline__ void add_sets(float (&sums)[4]) {
#pragma unroll
  for (float& sum : sums) {
    if (ROWS == 1) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
  }
}

#if NVFP4
#include "nvfp4_integers_sm90.cuh"
#elif INT8
#include "int8_integers_sm90.cuh"
#else
#include "int4_integers_sm90.cuh"
#endif

struct Shape {
  int rows, outputs, second;  // second: rows from a tile's first half to its second
};

// First output of a thread in a tile.
__device__ __forceinline__ int first_output(int tile, int warp, int lane) {
  return tile * (GATED ? HALF_ROWS : OUTPUTS) + 16 * warp + lane / 4;
}

// Of matrices whose rows have scales.
__device__ __forceinline__ void scale_rows(float (&sums)[4], const float* row_scales, const Shape& shape, int tile,
                                           int warp, int lane) {
  const int last = GATED ? 2 * shape.outputs - 1 : shape.outputs - 1;
#pragma unroll
  for (int i = 0; i < 4; i++)
    sums[i] *= row_scales[min(first_output(tile, warp, lane) + i % 2 * 8 + i / 2 * shape.second, last)];
}

__device__ __forceinline__ void store(const float (&sums)[4], Output* output, const Shape& shape, int tile, int warp,
                                      int lane) {
  if (lane % 4 >= shape.rows) return;
  Output* to = output + (long long)(lane % 4) * shape.outputs;
#pragma unroll
  for (int second = 0; second < 2; second++) {
    const int n = first_output(tile, warp, lane) + 8 * second, other = n + shape.second;
    if (GATED) {
      if (n < shape.outputs) to[n] = stored(rounded(gelu(rounded(sums[second]))) * rounded(sums[2 + second]));
    } else {
      if (n < shape.outputs) to[n] = stored(sums[second]);
      if (other < shape.outputs) to[other] = stored(sums[2 + second]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 1)
    integer_rows(const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap scales,
                 const unsigned short* x, Output* output, int rows, int inputs, int stride, int outputs, int second,
                 int tiles, int parts, int stages
#if ROW_SCALES
                 , const float* row_scales
#endif
#if ZEROS
                 , const __grid_constant__ TensorMap zeros
#endif
                 ) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 shared = shared_address(memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Stages<STAGES> barriers = {shared + BARRIERS_AT};
  launch_dependents();
  if (threadIdx.x == 0) {
    check_memory(shared);
    barriers.init(1, CONSUMERS / 32);
    mbarrier_init_fence();
  }
  __syncthreads();
  const int items = tiles * (SPLIT ? parts : 1);

  if (warp == CONSUMERS / 32) {
    if (lane != 0) return;
    Ring<STAGES> ring;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
      const int tile = SPLIT ? item / parts : item, first = SPLIT ? item % parts * stages : 0;
      for (int at = 0; at < stages; at++, ring.advance()) {
        const u32 to = shared + ring.place * STAGE_BYTES, barrier = barriers.full(ring.place);
        barriers.wait_empty(ring);
        mbarrier_expect(barrier, LOADED_BYTES);
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int row = tile * (GATED ? HALF_ROWS : OUTPUTS) + half * second;
          load_own_box(&weights, to + half * HALF_STAGE, barrier, 0, row, (first + at) * GROUPS);
          // Scales of a byte, and zero points, are copied two at a time.
          if (SCALES)
            load_own_box(&scales, to + SCALES_AT + half * SCALE_STAGE, barrier, NVFP4 ? row / 2 : row, 0,
                         (first + at) * GROUPS);
#if ZEROS
          load_own_box(&zeros, to + ZEROS_AT + half * ZERO_STAGE, barrier, row / 2, 0, (first + at) * GROUPS);
#endif
        }
      }
    }
    wait_for_prerequisites();
    return;
  }

  wait_for_prerequisites();  // what is written below may still be read by a kernel ahead
  const Rows of = {x, rows, inputs, stride};
  const Shape shape = {rows, outputs, second};
  const int group = warp / (GROUP / 32), thread = threadIdx.x % GROUP;
  float4* exchanged = (float4*)(memory + SUMS_AT);
  Ring<STAGES> ring;
  Held held;
  const Tables tables;
  int made = -1;  // the part of which x is there
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const int part = SPLIT ? item % parts : 0;
    if (part != made) {
      if (made >= 0) barrier_sync(X_READ, CONSUMERS);
      make_integers(memory, of, part * TILES * PLANES * 32);
      barrier_sync(X_WRITTEN, CONSUMERS);
      made = part;
    }
    float sums[4] = {};
    for (int at = 0; at < stages; at++) {
      barriers.wait_full(ring);
      held.exchange(barriers.empty(ring.place));
      consume(sums, memory, memory + ring.place * STAGE_BYTES, at * GROUPS + group, group, warp % (GROUP / 32), lane,
              tables);
      ring.advance();
    }
    all_groups(sums);
    if (group != 0) {
      if (item != blockIdx.x) barrier_sync(SUMS_FREE, CONSUMERS);
      exchanged[(group - 1) * GROUP + thread] = make_float4(sums[0], sums[1], sums[2], sums[3]);
      barrier_arrive(SUMS_FULL, CONSUMERS);
      continue;
    }
    if (GROUPS > 1) barrier_sync(SUMS_FULL, CONSUMERS);
#pragma unroll
    for (int other = 0; other < GROUPS - 1; other++) {
      const float4 value = exchanged[other * GROUP + thread];
      sums[0] += value.x, sums[1] += value.y, sums[2] += value.z, sums[3] += value.w;
    }
#if ROW_SCALES
    scale_rows(sums, row_scales, shape, SPLIT ? item / parts : item, warp % (GROUP / 32), lane);
#endif
    store(sums, output + (long long)part * rows * outputs, shape, SPLIT ? item / parts : item, warp, lane);
    // After the stores, which need all that was read above: to arrive does not wait for reads on their way.
    if (GROUPS > 1 && item + gridDim.x < items) barrier_arrive(SUMS_FREE, CONSUMERS);
  }
}
