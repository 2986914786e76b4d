// Products with an INT4 or NVFP4 matrix and more than a few rows of x, for compute capability 9.0: output [rows, outputs] = x W^T.
//
// The matrix is the left operand of warpgroups' products, from registers: an element is unpacked, scaled and rounded to
// bfloat16 once for COLUMNS rows of x. A CTA's tile is 128 outputs, 64 for each of two warpgroups; a cluster of two CTAs
// has neighbouring tiles and shares x, of which each loads half for both. Blocks of 256 inputs of the matrix go through
// a ring of stages, x through another.
//
// An item is 256 outputs by a slice of COLUMNS rows or, SPLIT, by a part of the inputs. Every cluster takes one item in
// a wave; what is left then, less than two waves, is dealt out in runs of blocks of equal length. Where a run begins
// inside of an item, its sums go through memory to the cluster that has the item's beginning, which adds them in order:
// they were made first and are wanted last. SPLIT: items are whole, output is [parts, rows, outputs] float32, and
// whoever reads it adds the parts.
//
// Whoever compiles defines COLUMNS: 64, 128, 192 or 256; NVFP4: whether elements are e2m1, with scales of a byte, and rows
// have scales of their own; HALF_SCALES: whether INT4's scales are float16; ZEROS: whether its groups have zero points,
// else 8; SCALES of a row in a block: 8, 4, 2 or 1, of NVFP4 16; GATED: whether a tile has 64 rows of each half of the
// matrix, and the output is gelu(first) * second; SPLIT; W_STAGES and X_STAGES.

#ifndef NVFP4
#define NVFP4 0
#endif
#define SCALES_OF_BLOCK SCALES

#if NVFP4
#include "nvfp4_elements_sm90.cuh"
#else
#include "int4_elements_sm90.cuh"
#endif
#include "tile_sums_sm90.cuh"
#include "zero_points_sm90.cuh"

constexpr int PLANES = 8;                                            // of 32 inputs, in a block
constexpr int X_BOXES = COLUMNS > 128 ? 1 : COLUMNS == 128 ? 2 : 4;  // of 64 inputs, in a stage of x
constexpr int X_PLANES = 2 * X_BOXES;
constexpr int X_BOX_BYTES = COLUMNS * 128;
constexpr int X_STAGE_BYTES = X_BOXES * X_BOX_BYTES;
constexpr int HALVES = GATED ? 2 : 1;                                // of a tile, from two places of the matrix
constexpr int HALF_ROWS = OUTPUTS / HALVES;
constexpr int WORD_BYTES = OUTPUTS * 128;
constexpr int SCALE_BYTES = SCALES * OUTPUTS * (NVFP4 ? 1 : 2);
enum Zeros {
  ZEROS_AT = WORD_BYTES + SCALE_BYTES,  // in a stage
  ZERO_BYTES = ZERO_ROWS * OUTPUTS,
  ZERO_HALF = (ZERO_BYTES / HALVES + 127) / 128 * 128,  // from those of one half to the other's, as copies want it
};
constexpr int W_STAGE_BYTES = (ZEROS_AT + HALVES * ZERO_HALF + 1023) / 1024 * 1024;
constexpr int X_AT = W_STAGES * W_STAGE_BYTES;
constexpr int STAGED_AT = X_AT + X_STAGES * X_STAGE_BYTES;
constexpr int WORD_BARRIERS_AT = STAGED_AT + (COLUMNS >= 128 ? 2 * STAGED_BYTES : 0);
constexpr int X_BARRIERS_AT = WORD_BARRIERS_AT + Stages<W_STAGES>::BYTES;

static_assert(X_BARRIERS_AT + Stages<X_STAGES>::BYTES == SHARED_BYTES, "");

__device__ __forceinline__ Stages<W_STAGES> word_barriers(u32 shared) { return {shared + WORD_BARRIERS_AT}; }
__device__ __forceinline__ Stages<X_STAGES> x_barriers(u32 shared) { return {shared + X_BARRIERS_AT}; }

// What a thread reads, and what it still holds. Its second row of the matrix is eight rows behind the first or, in a
// gated tile, has the same place in the other half.
struct Reader {
  u32 shared;
  int row;  // its first, of the tile; of its half where tiles are gated
  Ring<W_STAGES> words;
  Ring<X_STAGES> x;
  int held = -1;  // the stage of x whose products are under way

  __device__ __forceinline__ void release_x() {
    if (held >= 0 && threadIdx.x % 32 == 0) mbarrier_arrive_cluster(x_barriers(shared).empty(held));
  }
};

// The second row of a thread: from the first one, and its scales from that one's.
constexpr int SECOND = GATED ? HALF_ROWS : 8, SECOND_SCALE = GATED ? SCALES * HALF_ROWS : 8;
enum { SECOND_ZERO = GATED ? ZERO_HALF : 8 };  // and its zero points

// A thread's share of a block of the matrix: of both rows the inputs 8 i + 2 t and the next of each plane.
struct Block {
  const unsigned char* scales;
#if NVFP4
  u32 words[2][8];

  __device__ __forceinline__ void read(const unsigned char* stage, int row, int t) {
    scales = stage + WORD_BYTES + row;
#pragma unroll
    for (int second = 0; second < 2; second++)
#pragma unroll
      for (int four = 0; four < 2; four++) {
        const int piece = (2 * t + four) ^ (row % 8);
        const uint4 loaded = *(const uint4*)(stage + (row + second * SECOND) * 128 + piece * 16);
        u32* to = words[second] + 4 * four;
        to[0] = loaded.x, to[1] = loaded.y, to[2] = loaded.z, to[3] = loaded.w;
      }
  }
  // The operands of a plane's two products.
  __device__ __forceinline__ void operands(u32 (&a)[8], int plane) const {
#pragma unroll
    for (int step = 0; step < 2; step++)
#pragma unroll
      for (int second = 0; second < 2; second++) {
        const u32 scale = nvfp4_scale(scales[(2 * plane + step) * HALF_ROWS + second * SECOND_SCALE]);
#pragma unroll
        for (int pair = 2 * step; pair < 2 * step + 2; pair++)
          a[2 * pair + second] = nvfp4_pair(words[second][plane], pair, scale);
      }
  }
#else
  static constexpr int PLANES_OF_SCALE = PLANES / SCALES;
  u32 halves[2][4][2];  // of two rows, of neighbours in a plane, of nibbles 0 to 3 and 4 to 7
  ElementScale scale[2];
#if ZEROS
  const unsigned char* zeros;
#endif

  __device__ __forceinline__ void read(const unsigned char* stage, int row, int t) {
    scales = stage + WORD_BYTES + 2 * row;
#if ZEROS
    zeros = stage + ZEROS_AT + row;
#endif
#pragma unroll
    for (int second = 0; second < 2; second++)
#pragma unroll
      for (int quarter = 0; quarter < 4; quarter++) {
        const int piece = (2 * quarter + t / 2) ^ (row % 8);
        const uint2 both = *(const uint2*)(stage + (row + second * SECOND) * 128 + piece * 16 + t % 2 * 8);
        halves[second][quarter][0] = __byte_perm(both.x, both.y, 0x5410);
        halves[second][quarter][1] = __byte_perm(both.x, both.y, 0x7632);
      }
  }
  __device__ __forceinline__ void operands(u32 (&a)[8], int plane) {
    if (plane % PLANES_OF_SCALE == 0)
#pragma unroll
      for (int second = 0; second < 2; second++) {
        scale[second] = element_scale(
            ((const unsigned short*)scales)[plane / PLANES_OF_SCALE * HALF_ROWS + second * SECOND_SCALE]);
#if ZEROS
        scale[second].excess =
            excess_of(zero_point(zeros + second * SECOND_ZERO, plane / PLANES_OF_SCALE, HALF_ROWS));
#endif
      }
#pragma unroll
    for (int i = 0; i < 8; i++)
      a[i] = element_pair(halves[i % 2][i / 2][plane / 4] >> plane % 4 * 4, scale[i % 2]);
  }
#endif
};

__device__ __forceinline__ void multiply_block(float (&sums)[SUMS], Reader& reader, const unsigned char* memory) {
  const Stages<W_STAGES> barriers = word_barriers(reader.shared);
  barriers.wait_full(reader.words);
  Block block;
  block.read(memory + reader.words.place * W_STAGE_BYTES, reader.row, threadIdx.x % 4);
  u32 a[2][8], stage;
#pragma unroll
  for (int plane = 0; plane < PLANES; plane++) {
    block.operands(a[plane % 2], plane);
    Ring<X_STAGES>& x = reader.x;
    if (plane % X_PLANES == 0) {
      x_barriers(reader.shared).wait_full(x);
      stage = of_warp((reader.shared + X_AT + x.place * X_STAGE_BYTES) / 16);
    }
    const u64 inputs = row_descriptor(0) + (stage + plane % X_PLANES / 2 * (X_BOX_BYTES / 16) + plane % 2 * 4);
    wgmma_fence();
    multiply(sums, a[plane % 2], inputs);
    multiply(sums, a[plane % 2] + 4, inputs + 2);
    wgmma_commit();
    wgmma_wait<1>();
    if (plane % X_PLANES == 0) {  // the products of the stage before are over
      reader.release_x();
      reader.held = x.place;
    }
    if (plane % X_PLANES == X_PLANES - 1) x.advance();
  }
  release(barriers.empty(reader.words.place));  // behind a wait for products that need all that was read above
  reader.words.advance();
}

__device__ __forceinline__ void consume(const Work& work, unsigned char* memory, void* output, float4* partial,
                                        int* arrivals, int cluster, const float* row_scales) {
  const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32;
  int half = 0;
  Reader reader;
  reader.shared = shared_address(memory);
  reader.row = warp * (GATED ? 8 : 16) + threadIdx.x % 32 / 4;
  for (int wave = 0; wave <= work.waves; wave++) {
    const Run run = work.run(cluster, wave);
    for (int unit = run.begin; unit < run.end;) {
      const int item = unit / work.blocks, from = unit - item * work.blocks;
      const int count = min(work.blocks - from, run.end - unit);
      unit += count;
      float sums[SUMS];
#pragma unroll
      for (int i = 0; i < SUMS; i++) sums[i] = 0.0f;
      for (int i = 0; i < count; i++) multiply_block(sums, reader, memory);
      wgmma_wait<0>();
      pin(sums);
      reader.release_x();
      reader.held = -1;
      if (from > 0) {
        leave_partial_sums(sums, partial, arrivals);
        continue;
      }
      if (count < work.blocks) add_partial_sums(sums, partial, arrivals, work, cluster, (item + 1) * work.blocks);
#if NVFP4
      scale_rows(sums, row_scales, work, work.tile(item));
#endif
      store(sums, output, work, memory + STAGED_AT + warpgroup * STAGED_BYTES, half, work.tile(item),
            work.slice(item));
    }
  }
}

// Calls `load` with each block of the cluster's runs: its item, its place in the inputs, its part, and a stage once
// that is free.
template <int STAGES, int PARTS, class Load>
__device__ __forceinline__ void produce(const Work& work, Stages<STAGES> barriers, int cluster, Load load) {
  Ring<STAGES> ring;
  for (int wave = 0; wave <= work.waves; wave++) {
    const Run run = work.run(cluster, wave);
    int item = run.begin / work.blocks, block = run.begin % work.blocks;
    for (int unit = run.begin; unit < run.end; unit++) {
      const int at = (SPLIT ? work.slice(item) * work.blocks : 0) + block;
#pragma unroll
      for (int part = 0; part < PARTS; part++, ring.advance()) {
        barriers.wait_empty(ring);
        load(item, at, part, ring.place);
      }
      if (++block == work.blocks) block = 0, item++;
    }
  }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(CONSUMERS + 128, 1)
    linear_int4(const __grid_constant__ TensorMap words, const __grid_constant__ TensorMap scales,
                const __grid_constant__ TensorMap inputs, void* output, float4* partial, int* arrivals, int rows,
                int outputs, int second, int pairs, int slices, int together, int blocks, int items, int waves,
                int clusters, int grain
#if NVFP4
                , const float* row_scales
#endif
#if ZEROS
                , const __grid_constant__ TensorMap zeros
#endif
                ) {  // second: rows of the matrix from its first half to its second
  extern __shared__ __align__(1024) unsigned char memory[];
#if !NVFP4
  const float* row_scales = nullptr;
#endif
  const u32 shared = shared_address(memory);
  const int cluster = blockIdx.x / CLUSTER, rank = (int)cluster_rank();
  const Work work = {rows, outputs, pairs, slices, together, blocks, items, waves, clusters, grain};
  launch_dependents();
  const Stages<W_STAGES> of_words = word_barriers(shared);
  const Stages<X_STAGES> of_x = x_barriers(shared);
  if (threadIdx.x == 0) {
    check_memory(shared);
    of_words.init(2, CONSUMERS / 32);  // words, and scales with zero points
    of_x.init(1, CLUSTER * CONSUMERS / 32);
    mbarrier_init_fence();
  }
  cluster_sync();

  if (threadIdx.x >= CONSUMERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    const int warp = (threadIdx.x - CONSUMERS) / 32;
    if (threadIdx.x % 32 != 0) {
    } else if (warp < 2) {  // words; scales. They depend on no kernel ahead
      const TensorMap* map = warp == 0 ? &words : &scales;
      const int offset = warp == 0 ? 0 : WORD_BYTES, bytes = warp == 0 ? WORD_BYTES : SCALE_BYTES;
      produce<W_STAGES, 1>(work, of_words, cluster, [&](int item, int at, int, int stage) {
        const u32 to = shared + stage * W_STAGE_BYTES + offset, barrier = of_words.full(stage);
        mbarrier_expect(barrier, bytes + (warp == 0 ? 0 : ZERO_BYTES));
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
          const int row = work.tile(item) * HALF_ROWS + half * second;
          // Scales of a byte, and zero points, are copied two at a time.
          load_own_box(map, to + half * bytes / HALVES, barrier, warp == 0 ? 0 : NVFP4 ? row / 2 : row,
                       warp == 0 ? row : 0, at);
#if ZEROS
          if (warp != 0)
            load_own_box(&zeros, shared + stage * W_STAGE_BYTES + ZEROS_AT + half * ZERO_HALF, barrier, row / 2, 0, at);
#endif
        }
      });
    } else if (warp == 2) {
      wait_for_prerequisites();
      constexpr int PARTS = PLANES / X_PLANES;
      produce<X_STAGES, PARTS>(work, of_x, cluster, [&](int item, int at, int part, int stage) {
        // This CTA's half of the stage: of its boxes or, where it is one box, of the box's rows.
        const u32 to = shared + X_AT + stage * X_STAGE_BYTES + rank * (X_STAGE_BYTES / CLUSTER);
        const int box = (at * PARTS + part) * X_BOXES + (X_BOXES > 1 ? rank * (X_BOXES / CLUSTER) : 0);
        const int row = (SPLIT ? 0 : work.slice(item) * COLUMNS) + (X_BOXES > 1 ? 0 : rank * (COLUMNS / CLUSTER));
        mbarrier_expect(of_x.full(stage), X_STAGE_BYTES);
        load_box(&inputs, to, of_x.full(stage), 0, row, box);
      });
    }
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    wait_for_prerequisites();  // what is written below may still be read by a kernel ahead
    consume(work, memory, output, partial, arrivals, cluster, row_scales);
  }
  cluster_sync();  // no CTA ends while another may still write to it
}
