// Products of tens of rows with a bfloat16 matrix that is read once, for compute capability 9.0: output = x W^T.
//
// Rows of x are the left operand of warpgroups' products, 64 for each, and a tile of the matrix is the right one. A
// cluster has a tile, and each of its CTAs an equal part of the inputs. Their sums meet through shared memory: each CTA
// reads its share of the outputs from all, beginning with its own, so that what is added in which order depends on the
// number of rows, the matrix and its division alone. One more warp keeps all stages in flight. It asks for weights
// before the kernel ahead has ended (they depend on none), and for x after it.
//
// Whoever compiles defines ROWS: of x at most, 64 or 128; TILE: rows of the matrix, a multiple of 32 up to 256; PARTS;
// STAGES; GATED: whether a tile has eight rows of one half of the matrix beside eight of the other in turn, and output
// is gelu(first) * second.

#include "pipeline.cuh"
#include "slice_products_sm90.cuh"

constexpr int CONSUMERS = 2 * ROWS;  // threads
constexpr int X_BYTES = ROWS * 128;  // of a stage: 64 inputs
constexpr int STAGE_BYTES = X_BYTES + TILE * 128;
constexpr int PITCH = TILE + 8;      // floats from one row of sums to the next: no two lanes of a store meet in a bank
constexpr int SUMS_BYTES = ROWS * PITCH * 4;
constexpr int WIDTH = GATED ? TILE / 2 : TILE;  // outputs of a tile
// Sums lie where stages were.
constexpr int BARRIERS_AT = STAGES * STAGE_BYTES > SUMS_BYTES ? STAGES * STAGE_BYTES : SUMS_BYTES;

static_assert(BARRIERS_AT + Stages<STAGES>::BYTES == SHARED_BYTES, "");

enum Barrier { STAGES_READ = 1 };

// The sums of a thread's two rows of x go to its CTA's shared memory.
__device__ __forceinline__ void leave_sums(const float (&sums)[TILE / 2], float* to) {
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
  for (int i = 0; i < TILE / 2; i += 2)
    *(float2*)(to + (row + i % 4 / 2 * 8) * PITCH + i / 4 * 8 + threadIdx.x % 4 * 2) = make_float2(sums[i], sums[i + 1]);
}

// Four sums at a place in shared memory, over all parts, this CTA's first.
__device__ __forceinline__ float4 add_parts(const float* at, int rank) {
  float4 sum = *(const float4*)at, others[PARTS];
#pragma unroll
  for (int i = 1; i < PARTS; i++)
    others[i] = load_of_cluster(shared_address(at), rank + i < PARTS ? rank + i : rank + i - PARTS);
#pragma unroll
  for (int i = 1; i < PARTS; i++)
    sum.x += others[i].x, sum.y += others[i].y, sum.z += others[i].z, sum.w += others[i].w;
  return sum;
}

__device__ __forceinline__ float opened(float gate, float up) { return rounded(gelu(rounded(gate))) * rounded(up); }

// This CTA's share of a tile: every PARTS-th piece of so many as there are threads, of four outputs each.
__device__ __forceinline__ void store_share(unsigned short* output, const float* sums, int rank, int tile, int rows, int outputs) {
  for (int i = rank * CONSUMERS + threadIdx.x; i < rows * (WIDTH / 4); i += PARTS * CONSUMERS) {
    const int row = i / (WIDTH / 4), place = i % (WIDTH / 4), column = tile * WIDTH + place * 4;
    if (column >= outputs) continue;
    const float* at = sums + row * PITCH + (GATED ? place / 2 * 16 + place % 2 * 4 : place * 4);
    float4 sum = add_parts(at, rank);
    if (GATED) {
      const float4 up = add_parts(at + 8, rank);
      sum = make_float4(opened(sum.x, up.x), opened(sum.y, up.y), opened(sum.z, up.z), opened(sum.w, up.w));
    }
    *(uint2*)(output + (long long)row * outputs + column) = make_uint2(bf16_pair(sum.x, sum.y), bf16_pair(sum.z, sum.w));
  }
}

extern "C" __global__ void __cluster_dims__(PARTS, 1, 1) __launch_bounds__(CONSUMERS + 32, 1)
    cluster_rows(const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap inputs,
                 unsigned short* output, int rows, int outputs, int blocks) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 shared = shared_address(memory);
  const Stages<STAGES> stages = {shared + BARRIERS_AT};
  const int rank = PARTS > 1 ? (int)cluster_rank() : 0, tile = blockIdx.x / PARTS;
  const int begin = blocks * rank / PARTS, count = blocks * (rank + 1) / PARTS - begin;  // of 64 inputs
  launch_dependents();
  if (threadIdx.x == 0) {
    check_memory(shared);
    stages.init(1, CONSUMERS / 32);
    mbarrier_init_fence();
  }
  __syncthreads();

  if (threadIdx.x >= CONSUMERS) {
    if (threadIdx.x == CONSUMERS) {
      const int x_bytes = (rows + 7) / 8 * 1024;
      const auto load_weights = [&](const Ring<STAGES>& ring, int at) {
        const u32 to = shared + ring.place * STAGE_BYTES + X_BYTES, barrier = stages.full(ring.place);
        mbarrier_expect(barrier, x_bytes + TILE * 128);
#if GATED
        load_group_box(&weights, to, barrier, (begin + at) * 64, tile * (TILE / 16), 0);
#else
        load_own_box(&weights, to, barrier, 0, tile * TILE, begin + at);
#endif
      };
      const auto load_inputs = [&](const Ring<STAGES>& ring, int at) {
        load_own_box(&inputs, shared + ring.place * STAGE_BYTES, stages.full(ring.place), 0, 0, begin + at);
      };
      const int ahead = min(count, STAGES);
      Ring<STAGES> of_weights, of_inputs;
      for (int at = 0; at < ahead; at++, of_weights.advance()) load_weights(of_weights, at);
      wait_for_prerequisites();
      for (int at = 0; at < ahead; at++, of_inputs.advance()) load_inputs(of_inputs, at);
      for (int at = ahead; at < count; at++, of_weights.advance()) {
        stages.wait_empty(of_weights);
        load_weights(of_weights, at);
        load_inputs(of_weights, at);
      }
    }
    __syncwarp();
  } else {
    wait_for_prerequisites();  // what is written below may still be read by a kernel ahead
    float sums[TILE / 2];
#pragma unroll
    for (int i = 0; i < TILE / 2; i++) sums[i] = 0.0f;
    Ring<STAGES> ring;
    int held = -1;  // the stage whose products are under way
#pragma unroll 1
    for (int at = 0; at < count; at++, ring.advance()) {
      stages.wait_full(ring);
      const u32 stage = of_warp((shared + ring.place * STAGE_BYTES) / 16);
      const u64 a = row_descriptor(0) + stage + of_warp(threadIdx.x / 128) * (64 * 128 / 16);
      const u64 b = row_descriptor(0) + stage + X_BYTES / 16;
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; step++) multiply_slice<TILE>(sums, a + 2 * step, b + 2 * step);
      wgmma_commit();
      wgmma_wait<1>();
      if (held >= 0) release(stages.empty(held));
      held = ring.place;
    }
    wgmma_wait<0>();
    pin(sums);
    barrier_sync(STAGES_READ, CONSUMERS);
    leave_sums(sums, (float*)memory);
  }
  if (PARTS > 1)
    cluster_sync();
  else
    __syncthreads();
  if (threadIdx.x < CONSUMERS) store_share(output, (const float*)memory, rank, tile, rows, outputs);
  __syncwarp();
  if (PARTS > 1) cluster_sync();  // no CTA ends while others read its sums
}
