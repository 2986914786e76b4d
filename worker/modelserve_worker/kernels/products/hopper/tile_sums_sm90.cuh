// Sums of warpgroups on their way from products to the output, for linear_int4_sm90.cu, which says what the words mean.
// Whoever includes it defines COLUMNS (of a product: 64, 128, 192 or 256), GATED, SPLIT and NVFP4.

#pragma once

#include "pipeline.cuh"
#include "staged_rows_sm90.cuh"

constexpr int OUTPUTS = 128;                                 // of a tile
constexpr int CONSUMERS = 256;                               // threads: two warpgroups
constexpr int SUMS = COLUMNS / 2;                            // floats of a thread

enum Barrier { PARTIAL = 1 };

#define R1 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define R2 R1 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define R3 R2 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
              ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define R4 R3 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
              ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define R5 R4 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
              ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define PLUS_F32(s, i) PLUS_F16(s, i), PLUS_F16(s, i + 16)
#if COLUMNS == 64
#define PRODUCT(tail) "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" R2 "}, " tail
#define OPERANDS "{%32, %33, %34, %35}, %36"
#define ALL(s) PLUS_F32(s, 0)
#elif COLUMNS == 128
#define PRODUCT(tail) "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" R3 "}, " tail
#define OPERANDS "{%64, %65, %66, %67}, %68"
#define ALL(s) PLUS_F32(s, 0), PLUS_F32(s, 32)
#elif COLUMNS == 192
#define PRODUCT(tail) "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {" R4 "}, " tail
#define OPERANDS "{%96, %97, %98, %99}, %100"
#define ALL(s) PLUS_F32(s, 0), PLUS_F32(s, 32), PLUS_F32(s, 64)
#else
#define PRODUCT(tail) "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" R5 "}, " tail
#define OPERANDS "{%128, %129, %130, %131}, %132"
#define ALL(s) PLUS_F32(s, 0), PLUS_F32(s, 32), PLUS_F32(s, 64), PLUS_F32(s, 96)
#endif

// sums [64, COLUMNS] += a fragment of 16 inputs in registers times 16 inputs of x, whose sums run along rows.
__device__ __forceinline__ void multiply(float (&sums)[SUMS], const u32* a, u64 b) {
  asm volatile(PRODUCT(OPERANDS ", 1, 1, 1, 0;")
               : ALL(sums)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

struct Run {
  int begin, end;
};

// What is multiplied and who does what, in blocks of inputs: item i has blocks [i * blocks, (i + 1) * blocks).
struct Work {
  int rows, outputs;  // of the output
  int pairs;          // of tiles of outputs
  int slices;         // of COLUMNS rows; SPLIT: parts of the inputs
  int together;       // slices that have a pair one after the other
  int blocks;         // of an item
  int items;
  int waves;          // of items that every cluster has one of, before the rest is dealt out in runs
  int clusters;
  int grain;          // a run begins at a multiple of it

  __device__ __forceinline__ Run run(int cluster, int wave) const {
    const int dealt = waves * clusters;
    if (wave < waves) return {(wave * clusters + cluster) * blocks, (wave * clusters + cluster + 1) * blocks};
    const long long units = (long long)(items - dealt) * blocks;
    return {dealt * blocks + (int)(units * cluster / clusters / grain) * grain,
            dealt * blocks + (int)(units * (cluster + 1) / clusters / grain) * grain};
  }
  __device__ __forceinline__ int slice(int item) const {
    const int group = item / (pairs * together);
    return group * together + item % (pairs * together) % min(together, slices - group * together);
  }
  __device__ __forceinline__ int tile(int item) const {
    const int group = item / (pairs * together);
    return item % (pairs * together) / min(together, slices - group * together) * CLUSTER + (int)cluster_rank();
  }
};

#if NVFP4
// Rows have scales. A thread's sums are of rows as `store` says.
__device__ __forceinline__ void scale_rows(float (&sums)[SUMS], const float* row_scales, const Work& work, int tile) {
  const int warp = threadIdx.x / 32, last = GATED ? 2 * work.outputs - 1 : work.outputs - 1;
  const int first = tile * (GATED ? OUTPUTS / 2 : OUTPUTS) + warp * (GATED ? 8 : 16) + threadIdx.x % 32 / 4;
  float scale[2];
#pragma unroll
  for (int second = 0; second < 2; second++)
    scale[second] = row_scales[min(first + second * (GATED ? work.outputs : 8), last)] * PRODUCT_UNIT;
#pragma unroll
  for (int i = 0; i < SUMS; i++) sums[i] *= scale[i % 4 / 2];
}
#endif

// A thread has outputs n and n + 8 of its warp's 16, or of a gated tile output n of its warp's 8, the second
// being of the other half of the matrix. `staged` and `half` as `store_part` says.
__device__ __forceinline__ void store(const float (&sums)[SUMS], void* output, const Work& work, unsigned char* staged,
                                      int& half, int tile, int slice) {
  const int warpgroup = threadIdx.x / 128;
  constexpr int WIDTH = GATED ? OUTPUTS / 4 : OUTPUTS / 2;  // outputs of a warpgroup
  const int first = (tile * 2 + warpgroup) * WIDTH;
#if SPLIT || COLUMNS < 128
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, n = first + warp * (WIDTH / 4) + lane / 4;
#pragma unroll
  for (int i = 0; i < SUMS; i += GATED && i % 4 == 1 ? 3 : 1) {
    const int row = (SPLIT ? 0 : slice * COLUMNS) + i / 4 * 8 + lane % 4 * 2 + i % 2, column = n + i % 4 / 2 * 8;
    if (row >= work.rows || column >= work.outputs) continue;
    const long long at = (long long)row * work.outputs + column;
    if (SPLIT)
      ((float*)output)[(long long)slice * work.rows * work.outputs + at] = sums[i];
    else
      ((unsigned short*)output)[at] = (unsigned short)(
          GATED ? opened(bf16_pair(sums[i], 0.0f), bf16_pair(sums[i + 2], 0.0f)) : bf16_pair(sums[i], 0.0f));
  }
#else
  const OutputRows rows = {slice * COLUMNS, work.rows, work.outputs, first};
#pragma unroll
  for (int part = 0; part < COLUMNS / TURNED; part++) {
    u32 pairs[TURNED / 4];
#pragma unroll
    for (int i = 0; i < TURNED / 4; i++) {
      const float* s = sums + part * (TURNED / 2) + 2 * i;
      pairs[i] = bf16_pair(s[0], s[1]);
    }
    if (rows.begin + part * TURNED < rows.end) store_part<GATED>(pairs, part, (unsigned short*)output, rows, staged, half);
  }
#endif
}

// Partial sums of a CTA: of each four of a thread's, all threads' beside one another.
__device__ __forceinline__ float4* partial_sums(float4* partial, int cta) {
  return partial + cta * (SUMS / 4) * CONSUMERS + threadIdx.x;
}

__device__ __forceinline__ void leave_partial_sums(const float (&sums)[SUMS], float4* partial, int* arrivals) {
  float4* const to = partial_sums(partial, blockIdx.x);
#pragma unroll
  for (int i = 0; i < SUMS; i += 4)
    __stcg(to + i / 4 * CONSUMERS, make_float4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]));
  __threadfence();
  barrier_sync(PARTIAL, CONSUMERS);
  if (threadIdx.x == 0)
    asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(arrivals + blockIdx.x), "r"(1) : "memory");
}

// Adds what the clusters behind this one made of the rest of an item whose blocks end at `end`.
__device__ __forceinline__ void add_partial_sums(float (&sums)[SUMS], float4* partial, int* arrivals, const Work& work,
                                                 int cluster, int end) {
  for (int other = cluster + 1; other < work.clusters && work.run(other, work.waves).begin < end; other++) {
    const int cta = other * CLUSTER + (int)cluster_rank();
    if (threadIdx.x == 0) {
      word_wait(arrivals + cta);
      arrivals[cta] = 0;  // as the next launch wants it
    }
    barrier_sync(PARTIAL, CONSUMERS);
#pragma unroll
    for (int i = 0; i < SUMS; i += 4) {
      const float4 value = __ldcg(partial_sums(partial, cta) + i / 4 * CONSUMERS);
      sums[i] += value.x, sums[i + 1] += value.y, sums[i + 2] += value.z, sums[i + 3] += value.w;
    }
  }
}
