// Products of few rows with a matrix that is read once, for compute capability 9.0: output [rows, outputs] = x W^T.
//
// A CTA takes tiles of OUTPUTS rows of the matrix, over all inputs or, SPLIT, over a part of them: then output is
// [parts, rows, outputs] float32, and whoever reads it adds the parts. The matrix is the left operand of m16n8k16
// products. About eight warps, or more for larger tiles, work in groups of OUTPUTS / 32. In every stage each group has a
// block of its own, 128 bytes of each row: 64 inputs in bfloat16, 128 in FP8, 256 in INT4. The groups' sums meet in
// shared memory, in one order. One more warp keeps all stages in flight. It asks for weights before the kernel ahead
// has ended (they depend on none), and for x after it.
//
// EXPERTS: the matrix is one of many, those that rows of x chose. All rows are multiplied by each that one of them chose.
// GATED stores all these products, [chosen experts, rows, outputs], and what is not gated reads x as that and stores the
// products of those rows that chose, by slot. Choices are read before the kernel ahead has ended: they must be older; by
// NVFP4, in front of which nothing settles, after it.
//
// SETTLES: the next kernel starts only when this one knows that the kernel ahead has ended. Whatever starts behind this
// one then finds all complete that came before it (dependent_launch.py).
//
// Whoever compiles defines OUTPUTS: a multiple of 32 up to 352; ROWS: rows of x at most, a multiple of 8; STAGES; INT4:
// 0, or the scales of a row in 256 inputs (8, 4, 2, 1, of NVFP4 16); HALF_SCALES: whether these are float16; ZEROS: whether
// INT4's groups have zero points, else 8; NVFP4, of INT4: whether elements are e2m1, with scales of a byte; FP8, EXPERTS,
// SETTLES: 0 or 1; INT8, of FP8: whether elements are integers in its order; ROUNDS: of FP8, whether x is rounded to the
// precision of e4m3 as it is read; GATED: whether the second half of a tile holds the rows that those of the first, after
// GELU, are multiplied with; SPLIT: 0 or 1.

#ifndef NVFP4
#define NVFP4 0
#endif
#ifndef INT8
#define INT8 0
#endif
#define SCALES_OF_BLOCK INT4

#include "pipeline.cuh"
#include "zero_points_sm90.cuh"
#include "chosen_experts_sm90.cuh"
#include "product_output_sm90.cuh"

constexpr int GROUP = OUTPUTS;                // threads
// And blocks of inputs in a stage.
constexpr int GROUPS = OUTPUTS > 256 ? 1 : (256 + OUTPUTS / 2) / OUTPUTS;
constexpr int CONSUMERS = GROUPS * GROUP;     // threads
constexpr int BLOCKS = ROWS / 8;              // of columns of a product, which are rows of x
constexpr int HALF_ROWS = OUTPUTS / 2;        // of the matrix, in each half of a tile
constexpr int HALF_BYTES = HALF_ROWS * 128;   // of a block; all blocks of the first half come before the second's
constexpr int HALF_STAGE = GROUPS * HALF_BYTES;
constexpr int X_BOX_BYTES = ROWS * 128;       // 64 inputs of all rows
constexpr int X_BOXES = INT4 ? 4 : FP8 ? 2 : 1;    // of a block
constexpr int SCALE_BYTES = INT4 * HALF_ROWS * (NVFP4 ? 1 : 2);  // of a half of a block
constexpr int SCALE_STAGE = (GROUPS * SCALE_BYTES + 127) / 128 * 128;
constexpr int X_AT = 2 * HALF_STAGE;
constexpr int SCALES_AT = X_AT + GROUPS * X_BOXES * X_BOX_BYTES;
enum Zeros {
  ZERO_BYTES = ZERO_ROWS * HALF_ROWS,  // of a half of a block
  ZERO_STAGE = (GROUPS * ZERO_BYTES + 127) / 128 * 128,
  ZEROS_AT = SCALES_AT + 2 * SCALE_STAGE,
};
constexpr int LOADED_BYTES = SCALES_AT + 2 * GROUPS * (SCALE_BYTES + ZERO_BYTES);
constexpr int STAGE_BYTES = (ZEROS_AT + 2 * ZERO_STAGE + 1023) / 1024 * 1024;
constexpr int SUMS = 2 * BLOCKS;              // fragments of four sums in a thread
constexpr int SUMS_AT = STAGES * STAGE_BYTES;
constexpr int BARRIERS_AT = SUMS_AT + (GROUPS - 1) * GROUP * SUMS * 16;

constexpr int CHOSEN_AT = BARRIERS_AT + Stages<STAGES>::BYTES;

static_assert(STAGES >= 2, "a stage is held until the next has come");
static_assert(CHOSEN_AT + EXPERTS * sizeof(ChosenExperts) == SHARED_BYTES, "");
static_assert(!EXPERTS || !((INT4 && !NVFP4) || FP8 || SPLIT), "");
static_assert(FP8 || !ROUNDS, "");

enum Barrier { SUMS_FULL = 1, SUMS_FREE };

__device__ __forceinline__ void load_16(u32 (&to)[4], const unsigned char* from) {
  uint4 value = *(const uint4*)from;
  to[0] = value.x, to[1] = value.y, to[2] = value.z, to[3] = value.w;
}

// Row of x that a column of eight is. INT4 lanes read x themselves: neighbours, four rows apart, meet in no bank.
__device__ __forceinline__ int row_of_column(int column) {
  return INT4 && !NVFP4 ? column / 2 + column % 2 * 4 : column;
}

#if INT8

// Sixteen-bit pairs of integers, two in a register, to bfloat16: the first elements of both, and the second. Seven bits of
// one become the mantissa of 128 + v, and the eighth that of what is too much, -128 or -256; their sum is exact.
__device__ __forceinline__ u32 integer_pair(u32 halves) {
  u32 pair;
  asm("{\n.reg .b32 v, excess, one;\nmov.b32 one, 0x3f803f80;\n"
      "lop3.b32 v, %1, 0x007f007f, 0x43004300, 0xea;\nlop3.b32 excess, %1, 0x00800080, 0xc300c300, 0xea;\n"
      "fma.rn.bf16x2 %0, v, one, excess;\n}"
      : "=r"(pair)
      : "r"(halves));
  return pair;
}

__device__ __forceinline__ void elements(u32& first, u32& second, u32 pairs) {
  first = integer_pair(pairs), second = integer_pair(pairs >> 8);
}

#elif FP8

// Sixteen-bit pairs of e4m3, two in a register, to bfloat16: the first elements of both, and the second. Sign and the
// other seven bits go to the top and the middle of bfloat16, whose exponent begins 120 lower; times 2^120 is exact.
__device__ __forceinline__ void elements(u32& first, u32& second, u32 pairs) {
  asm("{\n.reg .b32 v, t, unit, none;\nmov.b32 unit, 0x7b807b80;\nmov.b32 none, 0x80008000;\n"
      "shl.b32 v, %2, 8;\nshr.b32 t, v, 4;\nand.b32 t, t, 0x07f007f0;\nlop3.b32 t, v, 0x80008000, t, 0xea;\n"
      "fma.rn.bf16x2 %0, t, unit, none;\n"
      "shr.b32 t, %2, 4;\nand.b32 t, t, 0x07f007f0;\nlop3.b32 t, %2, 0x80008000, t, 0xea;\n"
      "fma.rn.bf16x2 %1, t, unit, none;\n}"
      : "=&r"(first), "=r"(second)
      : "r"(pairs));
}

#endif

#if FP8

// Both to four significant bits, ties to even, with bfloat16's exponents: 17 x, rounded to its eight bits, has no more than that
// of x's own four, and the difference to x gives them back. Above 2^123 it is no number.
__device__ __forceinline__ u32 e4m3_precision(u32 pair) {
  u32 nearest;
  asm("{\n.reg .b32 wide, rest, sixteen, one, minus;\n"
      "mov.b32 sixteen, 0x41804180;\nmov.b32 one, 0x3f803f80;\nmov.b32 minus, 0xbf80bf80;\n"
      "fma.rn.bf16x2 wide, %1, sixteen, %1;\nfma.rn.bf16x2 rest, wide, minus, %1;\nfma.rn.bf16x2 %0, rest, one, wide;\n}"
      : "=r"(nearest)
      : "r"(pair));
  return nearest;
}

// Of every 64 inputs, the first elements of pairs are inputs 0 to 31 and the second 32 to 63.
__device__ __forceinline__ void consume(float (&sums)[SUMS][4], const unsigned char* stage, int group, int warp,
                                        int lane) {
  const u32 weights = shared_address(stage) + group * HALF_BYTES;
  const u32 inputs = shared_address(stage) + X_AT + group * X_BOXES * X_BOX_BYTES;
#pragma unroll
  for (int box = 0; box < 2; box++) {
    u32 x[2][BLOCKS][4];
#pragma unroll
    for (int plane = 0; plane < 2; plane++)
#pragma unroll
      for (int block = 0; block < BLOCKS; block++) {
        load_matrices(x[plane][block], inputs + box * X_BOX_BYTES + piece(8 * block + lane % 8, 4 * plane + lane / 8));
        if (ROUNDS)
#pragma unroll
          for (u32& pair : x[plane][block]) pair = e4m3_precision(pair);
      }
#pragma unroll
    for (int step = 0; step < 2; step++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        u32 pairs[4], a[2][4];
        load_matrices(pairs, weights + half * HALF_STAGE +
                                 piece(16 * warp + lane % 16, 4 * box + 2 * step + lane / 16));
#pragma unroll
        for (int i = 0; i < 4; i++) elements(a[0][i], a[1][i], pairs[i]);
#pragma unroll
        for (int plane = 0; plane < 2; plane++)
#pragma unroll
          for (int block = 0; block < BLOCKS; block++)
            multiply(sums[half * BLOCKS + block], a[plane], x[plane][block][2 * step], x[plane][block][2 * step + 1]);
      }
  }
}

#elif INT4 == 0

// The products of a group's block: 16 rows of each half per warp.
__device__ __forceinline__ void consume(float (&sums)[SUMS][4], const unsigned char* stage, int group, int warp,
                                        int lane) {
  const u32 weights = shared_address(stage) + group * HALF_BYTES;
  const u32 inputs = shared_address(stage) + X_AT + group * X_BOX_BYTES;
#pragma unroll
  for (int step = 0; step < 4; step += 2) {  // of 16 inputs
    u32 x[BLOCKS][4], w[2][2][4];
#pragma unroll
    for (int each = 0; each < 2; each++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        load_matrices(w[each][half], weights + half * HALF_STAGE +
                                         piece(16 * warp + lane % 16, 2 * (step + each) + lane / 16));
#pragma unroll
    for (int block = 0; block < BLOCKS; block++)
      load_matrices(x[block], inputs + piece(8 * block + lane % 8, 2 * step + lane / 8));
#pragma unroll
    for (int each = 0; each < 2; each++)
#pragma unroll
      for (int half = 0; half < 2; half++)
#pragma unroll
        for (int block = 0; block < BLOCKS; block++)
          multiply(sums[half * BLOCKS + block], w[each][half], x[block][2 * each], x[block][2 * each + 1]);
  }
}

#elif NVFP4

#include "nvfp4_rows_sm90.cuh"

#else

#include "int4_rows_sm90.cuh"

#endif

// What sums are multiplied by, where rows have scales.
__device__ __forceinline__ float row_scale(float scale) {
#if NVFP4
  return scale * PRODUCT_UNIT;
#else
  return scale;
#endif
}

struct Shape {
  int rows, outputs, second, last;  // second: rows from a tile's first half to its second; last: of the matrix
  const signed char* slots;         // of rows in `output`, -1: they are not stored; null: the rows themselves
};

// `output`: of the part, or the expert, that the sums are of.
__device__ __forceinline__ void store(float (&sums)[SUMS][4], Output* output, const float* row_scales,
                                      const Shape& shape, int tile, int warp, int lane) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int column = 16 * warp + lane / 4 + i / 2 * 8;
    const int n = tile * (GATED ? HALF_ROWS : OUTPUTS) + column, other = n + shape.second;
    if (FP8 || NVFP4) {
      const float first = row_scale(row_scales[min(n, shape.last)]), second = row_scale(row_scales[min(other, shape.last)]);
#pragma unroll
      for (int block = 0; block < BLOCKS; block++) sums[block][i] *= first, sums[BLOCKS + block][i] *= second;
    }
#pragma unroll
    for (int block = 0; block < BLOCKS; block++) {
      const int row = 8 * block + row_of_column(lane % 4 * 2 + i % 2);
      if (row >= shape.rows) continue;
      const int place = shape.slots ? shape.slots[row] : row;
      if (place < 0) continue;
      Output* to = output + (long long)place * shape.outputs;
      const float first = sums[block][i], second = sums[BLOCKS + block][i];
      if (GATED) {
        if (n < shape.outputs) to[n] = stored(rounded(gelu(rounded(first))) * rounded(second));
      } else {
        if (n < shape.outputs) to[n] = stored(first);
        if (other < shape.outputs) to[other] = stored(second);
      }
    }
  }
}

#if EXPERTS
#define ENTRY chosen_rows
#else
#define ENTRY linear_rows
#endif

extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 1)
    ENTRY(const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap inputs,
                const __grid_constant__ TensorMap scales, const float* row_scales, Output* output, int rows,
                int outputs, int second, int tiles, int parts, int stages, const int* choices, int top_k, int experts
#if ZEROS
                , const __grid_constant__ TensorMap zeros
#endif
                ) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 shared = shared_address(memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Stages<STAGES> barriers = {shared + BARRIERS_AT};
  ChosenExperts& chosen = *(ChosenExperts*)(memory + CHOSEN_AT);
  if (!SETTLES) launch_dependents();
  if (threadIdx.x == 0) {
    check_memory(shared);
    barriers.init(1, CONSUMERS / 32);
    mbarrier_init_fence();
  }
  if (EXPERTS && NVFP4) wait_for_prerequisites();
  if (EXPERTS && warp == CONSUMERS / 32) chosen.list(choices, rows * top_k, top_k, experts);
  __syncthreads();
  // An item is a tile of one part of the inputs, or of one expert.
  const int items = tiles * (EXPERTS ? chosen.count : SPLIT ? parts : 1);
  const auto tile_of = [&](int item) { return EXPERTS ? item % tiles : SPLIT ? item / parts : item; };

  if (warp == CONSUMERS / 32) {
    if (lane != 0) return;
    // Of weights and of x, which follow them: where the next stage's come from and go to.
    struct Place {
      int item, at;
      Ring<STAGES> ring;
      __device__ void next(int stages) {
        ring.advance();
        if (++at == stages) at = 0, item += gridDim.x;
      }
    };
    const auto block_of = [&](const Place& place) {  // the first of a stage's, of the matrix's inputs
      return ((SPLIT ? place.item % parts * stages : 0) + place.at) * GROUPS;
    };
    auto load_weights = [&](const Place& place) {
      u32 to = shared + place.ring.place * STAGE_BYTES, barrier = barriers.full(place.ring.place);
      mbarrier_expect(barrier, LOADED_BYTES);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        int row = tile_of(place.item) * (GATED ? HALF_ROWS : OUTPUTS) + half * second;
        int block = block_of(place);
        // The blocks of an expert's inputs, of NVFP4 `parts`, follow those of the expert before; x has nothing past them.
        if (EXPERTS && NVFP4) block += chosen.expert[place.item / tiles] * parts;
        if (EXPERTS && !NVFP4) row += chosen.expert[place.item / tiles] * outputs * (1 + GATED);
        load_own_box(&weights, to + half * HALF_STAGE, barrier, 0, row, block);
        // Scales of a byte, and zero points, are copied two at a time.
        if (INT4)
          load_own_box(&scales, to + SCALES_AT + half * SCALE_STAGE, barrier, NVFP4 ? row / 2 : row, 0, block);
#if ZEROS
        load_own_box(&zeros, to + ZEROS_AT + half * ZERO_STAGE, barrier, row / 2, 0, block);
#endif
      }
    };
    auto load_inputs = [&](const Place& place) {
      const int row = EXPERTS && !GATED ? place.item / tiles * rows : 0;
      load_own_box(&inputs, shared + place.ring.place * STAGE_BYTES + X_AT, barriers.full(place.ring.place), 0, row,
                   block_of(place) * X_BOXES);
    };
    const int count = (items - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x * stages;
    const int ahead = count < STAGES ? count : STAGES;
    Place of_weights = {(int)blockIdx.x, 0}, of_inputs = of_weights;
    for (int i = 0; i < ahead; i++, of_weights.next(stages)) load_weights(of_weights);
    wait_for_prerequisites();
    if (SETTLES) launch_dependents();
    for (int i = 0; i < ahead; i++, of_inputs.next(stages)) load_inputs(of_inputs);
    for (int i = ahead; i < count; i++, of_weights.next(stages)) {
      barriers.wait_empty(of_weights.ring);
      load_weights(of_weights);
      load_inputs(of_weights);
    }
    return;
  }

  wait_for_prerequisites();  // what is written below may still be read by a kernel ahead
  Shape shape = {rows, outputs, second, GATED ? 2 * outputs - 1 : outputs - 1, nullptr};
  const int group = warp / (GROUP / 32), thread = threadIdx.x % GROUP;
  float4* exchanged = (float4*)(memory + SUMS_AT);
  Ring<STAGES> ring;
  Held held;
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    float sums[SUMS][4];
#pragma unroll
    for (int i = 0; i < SUMS; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) sums[i][j] = 0.0f;
    for (int at = 0; at < stages; at++) {
      barriers.wait_full(ring);
      held.exchange(barriers.empty(ring.place));
      consume(sums, memory + ring.place * STAGE_BYTES, group, warp % (GROUP / 32), lane);
      ring.advance();
    }
    if (group != 0) {
      if (item != blockIdx.x) barrier_sync(SUMS_FREE, CONSUMERS);
#pragma unroll
      for (int i = 0; i < SUMS; i++)
        exchanged[((group - 1) * SUMS + i) * GROUP + thread] =
            make_float4(sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
      barrier_arrive(SUMS_FULL, CONSUMERS);
      continue;
    }
    barrier_sync(SUMS_FULL, CONSUMERS);
#pragma unroll 1
    for (int other = 0; other < GROUPS - 1; other++)
#pragma unroll
      for (int i = 0; i < SUMS; i++) {
        float4 value = exchanged[(other * SUMS + i) * GROUP + thread];
        sums[i][0] += value.x;
        sums[i][1] += value.y;
        sums[i][2] += value.z;
        sums[i][3] += value.w;
      }
    // Of parts and of gated experts' outputs, the one that the sums are of.
    const int part = EXPERTS && GATED ? item / tiles : SPLIT ? item % parts : 0;
    if (EXPERTS && !GATED) shape.slots = chosen.slot[item / tiles];
    const float* scales_of_rows = row_scales;
    if (EXPERTS && NVFP4) scales_of_rows += (long long)chosen.expert[item / tiles] * outputs * (1 + GATED);
    store(sums, output + (long long)part * rows * outputs, scales_of_rows, shape, tile_of(item), warp, lane);
    // After the stores, which need all that was read above: to arrive does not wait for reads on their way.
    if (item + gridDim.x < items) barrier_arrive(SUMS_FREE, CONSUMERS);
  }
}
