// Rows sorted by expert times the matrices of their experts, for compute capability 9.0: output [rows, outputs] = x W^T.
//
// The matrix is the left operand of warpgroups' products, rows of x the right one: a CTA's tile is 128 rows of a matrix,
// 64 for each of two warpgroups, times a slice of one expert's rows. They are cut into as few slices as there must be, of
// equal length, and a slice is multiplied in the next multiple of 32 rows. Which output sums what in which order depends
// on the matrix alone. One more warp keeps all stages in flight.
//
// How many slices there are is known on the device only: every CTA counts them, and takes each so-many-eth of slices
// times tiles. What a warpgroup has multiplied it rounds, and stores while the next products are under way.
//
// A dense matrix that takes other rows, one slice of them, may be multiplied beside experts' by the same launch: each of
// the first CTAs begins with a tile of it, and takes nothing else while the others have as many turns as that lasts.
//
// GATED settles: the next launch starts only when the kernel ahead of this one has ended (dependent_launch.py). What is
// not gated stands behind one that is, or behind one that ends before it: it reads where experts' rows end, and asks for
// its first weights, before the kernel ahead has ended.
//
// Whoever compiles defines GATED: whether a tile has 64 rows of each half of a matrix, and output is gelu(first) * second;
// SLICE: rows of x of a slice at most, 128 or 256; STAGES.

#include "pipeline.cuh"
#include "slice_products_sm90.cuh"
#include "staged_rows_sm90.cuh"

constexpr int TILE = 128;                          // rows of a matrix
constexpr int CONSUMERS = 256;                     // threads: two warpgroups
constexpr int BOX = 32;                            // rows of x that are loaded at a time
constexpr int MOST_EXPERTS = 256;
constexpr int TOGETHER = 2;                        // parts of products that one turn stores; a matrix has 8 stages or more
[[maybe_unused]] constexpr int INPUTS = 64;        // of a stage
constexpr int W_BYTES = TILE * 128;
constexpr int BOX_BYTES = BOX * 128;
constexpr int STAGE_BYTES = W_BYTES + SLICE * 128;
constexpr int STAGED_AT = STAGES * STAGE_BYTES;
constexpr int SLICES_AT = STAGED_AT + 2 * STAGED_BYTES;
constexpr int BARRIERS_AT = SLICES_AT + (2 * MOST_EXPERTS + 2) * 4;

static_assert(BARRIERS_AT + Stages<STAGES>::BYTES == SHARED_BYTES, "");

// Rows of x of one expert that are multiplied together.
struct Slice {
  int expert, begin, end;
  __device__ __forceinline__ int boxes() const { return (end - begin + BOX - 1) / BOX; }
};

// Where experts' rows end, and how many slices those up to and before each have; both from 0 for "before the first".
struct Slices {
  int* ends;
  int* counts;

  // By one warp, behind the kernels that `from` is of; past the first cache, which may still hold what lay there.
  __device__ __forceinline__ void count(const int* from, int experts) {
    const int lane = threadIdx.x % 32;
    int counted = 0, last = 0;
    if (lane == 0) ends[0] = counts[0] = 0;
    for (int first = 0; first < experts; first += 32) {
      const int end = __ldcg(from + min(first + lane, experts - 1)), before = __shfl_up_sync(0xFFFFFFFFu, end, 1);
      int slices = (end - (lane == 0 ? last : before) + SLICE - 1) / SLICE;
#pragma unroll
      for (int by = 1; by < 32; by *= 2) {
        const int left = __shfl_up_sync(0xFFFFFFFFu, slices, by);
        if (lane >= by) slices += left;
      }
      if (first + lane < experts) ends[first + lane + 1] = end, counts[first + lane + 1] = counted + slices;
      counted += __shfl_sync(0xFFFFFFFFu, slices, 31), last = __shfl_sync(0xFFFFFFFFu, end, 31);
    }
  }

  // Slice number `number`, of the expert of `at` or of one behind it.
  __device__ __forceinline__ Slice find(int number, int at) const {
    while (counts[at + 1] <= number) at++;
    const int rows = ends[at + 1] - ends[at], count = counts[at + 1] - counts[at];
    const int length = ((rows + count - 1) / count + BOX - 1) / BOX * BOX, begin = (number - counts[at]) * length;
    return {at, ends[at] + begin, ends[at] + min(begin + length, rows)};
  }
};

// What a warpgroup has multiplied and not stored yet: pairs of sums, rounded, of the rows that `rows` has left. The first
// TOGETHER parts are stored and the others move up: each stored from where it lies, in tiles of every length, would be
// code that takes twice as long to compile and is slower for most numbers of rows.
struct Products {
  u32 pairs[SLICE / 4];
  OutputRows rows = {0, 0, 0, 0};
  unsigned short* output = nullptr;

  __device__ __forceinline__ bool left() const { return rows.begin < rows.end; }

  __device__ __forceinline__ void store(int part, unsigned char* staged, int& half) {
    if (rows.begin + part * TURNED < rows.end)
      store_part<GATED>(pairs + part * (TURNED / 4), part, output, rows, staged, half);
  }
  __device__ __forceinline__ void move_up() {
    rows.begin += TOGETHER * TURNED;
#pragma unroll
    for (int i = 0; i < (SLICE - TOGETHER * TURNED) / 4; i++) pairs[i] = pairs[i + TOGETHER * TURNED / 4];
  }
};

struct Reader {
  u32 shared;
  Ring<STAGES> ring;
  int held = -1;  // the stage whose products are under way
};

// Products of one stage are begun; `meanwhile` is done; those of the stage before are over.
template <int ROWS, class Work>
__device__ __forceinline__ void multiply_stage(float (&sums)[ROWS / 2], Reader& reader, Work meanwhile) {
  const Stages<STAGES> stages = {reader.shared + BARRIERS_AT};
  stages.wait_full(reader.ring);
  const u32 stage = of_warp((reader.shared + reader.ring.place * STAGE_BYTES) / 16);
  const u64 a = row_descriptor(0) + stage + threadIdx.x / 128 * (W_BYTES / 2 / 16);
  const u64 b = row_descriptor(0) + stage + W_BYTES / 16;
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < 4; step++) multiply_slice<ROWS>(sums, a + 2 * step, b + 2 * step);
  wgmma_commit();
  meanwhile();
  wgmma_wait<1>();
  if (reader.held >= 0) release(stages.empty(reader.held));
  reader.held = reader.ring.place;
  reader.ring.advance();
}

template <int ROWS>
__device__ __forceinline__ void multiply_tile(Reader& reader, Products& products, int blocks, const OutputRows& rows,
                                              unsigned short* output, unsigned char* staged, int& half) {
  float sums[ROWS / 2];
#pragma unroll
  for (int i = 0; i < ROWS / 2; i++) sums[i] = 0.0f;  // or products of other slices are kept in memory
  int at = 0;
#pragma unroll 1
  for (; products.left(); at += TOGETHER) {
#pragma unroll
    for (int part = 0; part < TOGETHER; part++)
      multiply_stage<ROWS>(sums, reader, [&] { products.store(part, staged, half); });
    products.move_up();
  }
#pragma unroll 1
  for (; at < blocks; at++) multiply_stage<ROWS>(sums, reader, [] {});
  wgmma_wait<0>();
  pin(sums);
  release(reader.shared + BARRIERS_AT + (STAGES + reader.held) * 8);
  reader.held = -1;
#pragma unroll
  for (int i = 0; i < ROWS / 4; i++) products.pairs[i] = bf16_pair(sums[2 * i], sums[2 * i + 1]);
  products.rows = rows, products.output = output;
}

// A dense matrix beside experts': all rows of x in one slice, tiles of it, and how many turns of others one of them lasts.
struct Dense {
  int rows, outputs, tiles, blocks, turns;
};

// What a CTA computes next, or nothing: a tile of the dense matrix in its first turn, then of experts'.
struct Item {
  Slice slice = {0, 0, 0};
  int turn = 0, tile = 0;
  bool dense = false;

  __device__ __forceinline__ bool first(const Slices& slices, const Dense& beside, int items, int tiles) {
    dense = blockIdx.x < beside.tiles;
    if (!dense) return find(slices, beside, items, tiles);
    slice.end = beside.rows, tile = blockIdx.x, turn = beside.turns - 1;
    return true;
  }
  __device__ __forceinline__ bool next(const Slices& slices, const Dense& beside, int items, int tiles) {
    dense = false, turn++;
    return find(slices, beside, items, tiles);
  }
  __device__ __forceinline__ bool find(const Slices& slices, const Dense& beside, int items, int tiles) {
    const int others = gridDim.x - beside.tiles, later = turn - beside.turns;
    const int number = later < 0 ? turn * others + (int)blockIdx.x - beside.tiles
                                 : beside.turns * others + later * (int)gridDim.x + (int)blockIdx.x;
    if (number >= items) return false;
    slice = slices.find(number / tiles, slice.expert), tile = number % tiles;
    return true;
  }
};

extern "C" __global__ void __launch_bounds__(CONSUMERS + 128, 1)
    grouped_rows(const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap inputs,
                 const __grid_constant__ TensorMap dense_weights, const __grid_constant__ TensorMap dense_inputs,
                 const int* ends, unsigned short* output, unsigned short* dense_output, int experts, int outputs,
                 int tiles, int blocks, int dense_rows, int dense_outputs, int dense_tiles, int dense_blocks,
                 int dense_turns) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 shared = shared_address(memory);
  const Stages<STAGES> stages = {shared + BARRIERS_AT};
  Slices slices = {(int*)(memory + SLICES_AT), (int*)(memory + SLICES_AT) + MOST_EXPERTS + 1};
  if (!GATED) launch_dependents();
  if (threadIdx.x == 0) {
    check_memory(shared);
    stages.init(1, CONSUMERS / 32);
    mbarrier_init_fence();
  }
  if (GATED) {
    wait_for_prerequisites();
    launch_dependents();
  }
  if (threadIdx.x < 32) slices.count(ends, experts);
  __syncthreads();
  const int items = slices.counts[experts] * tiles;
  const Dense beside = {dense_rows, dense_outputs, dense_tiles, dense_blocks, dense_turns};
  Item item;

  if (threadIdx.x >= CONSUMERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x != CONSUMERS) {
      if (!GATED) wait_for_prerequisites();
      return;
    }
    const auto load_inputs = [&](int at, int place) {
      for (int box = 0; box < item.slice.boxes(); box++)
        load_own_box(item.dense ? &dense_inputs : &inputs, shared + place * STAGE_BYTES + W_BYTES + box * BOX_BYTES,
                     stages.full(place), 0, item.slice.begin + box * BOX, at);
    };
    Ring<STAGES> ring;
    bool waited = GATED;
    for (bool more = item.first(slices, beside, items, tiles); more; more = item.next(slices, beside, items, tiles)) {
      const TensorMap* from = item.dense ? &dense_weights : &weights;
      const int count = item.dense ? beside.blocks : blocks;
      for (int at = 0; at < count; at++, ring.advance()) {
        stages.wait_empty(ring);
        const u32 to = shared + ring.place * STAGE_BYTES, barrier = stages.full(ring.place);
        mbarrier_expect(barrier, W_BYTES + item.slice.boxes() * BOX_BYTES);
#if GATED
        load_group_box(from, to, barrier, at * INPUTS, item.tile * (TILE / 16), item.slice.expert);
#else
        load_own_box(from, to, barrier, 0, item.slice.expert * outputs + item.tile * TILE, at);
#endif
        if (waited) {
          load_inputs(at, ring.place);
        } else if (at == STAGES - 1) {  // all stages have their weights: a matrix has at least as many
          wait_for_prerequisites();
          for (int early = 0; early < STAGES; early++) load_inputs(early, early);
          waited = true;
        }
      }
    }
    if (!waited) wait_for_prerequisites();
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  if (!GATED) wait_for_prerequisites();  // what is written below may still be read by a kernel ahead
  const int warpgroup = threadIdx.x / 128;
  unsigned char* staged = memory + STAGED_AT + warpgroup * STAGED_BYTES;
  Reader reader = {shared};
  Products products;
  int half = 0;
  for (bool more = item.first(slices, beside, items, tiles); more; more = item.next(slices, beside, items, tiles)) {
    constexpr int WIDTH = GATED ? TILE / 4 : TILE / 2;  // outputs of a warpgroup
    const OutputRows rows = {item.slice.begin, item.slice.end, item.dense ? beside.outputs : outputs,
                             (item.tile * 2 + warpgroup) * WIDTH};
    unsigned short* to = item.dense ? dense_output : output;
    const int count = item.dense ? beside.blocks : blocks;
    switch (item.slice.boxes()) {
      case 1: multiply_tile<32>(reader, products, count, rows, to, staged, half); break;
      case 2: multiply_tile<64>(reader, products, count, rows, to, staged, half); break;
      case 3: multiply_tile<96>(reader, products, count, rows, to, staged, half); break;
#if SLICE > 128
      case 4: multiply_tile<128>(reader, products, count, rows, to, staged, half); break;
      case 5: multiply_tile<160>(reader, products, count, rows, to, staged, half); break;
      case 6: multiply_tile<192>(reader, products, count, rows, to, staged, half); break;
      case 7: multiply_tile<224>(reader, products, count, rows, to, staged, half); break;
#endif
      default: multiply_tile<SLICE>(reader, products, count, rows, to, staged, half);
    }
  }
#pragma unroll 1
  while (products.left()) {
#pragma unroll
    for (int part = 0; part < TOGETHER; part++) products.store(part, staged, half);
    products.move_up();
  }
}
