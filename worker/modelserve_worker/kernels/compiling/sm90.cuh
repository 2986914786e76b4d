// PTX of compute capability 9.0 (sm_90a): the copy engine, and products of warpgroups and of warps on bfloat16 blocks whose
// rows are 128 bytes, swizzled by 128. Addresses are of shared memory, in bytes.

#pragma once

#include "barriers_sm90.cuh"

struct alignas(64) TensorMap {
  u64 words[16];
};

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return (u32)__cvta_generic_to_shared(pointer);
}

// To the place in the CTA `rank` of the cluster that `to` is in this one; that CTA's barrier counts the eight bytes.
__device__ __forceinline__ void send_pair(u32 to, u32 barrier, u32 rank, float first, float second) {
  asm volatile(
      "{\n.reg .b32 place, counted;\nmapa.shared::cluster.u32 place, %0, %2;\nmapa.shared::cluster.u32 counted, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [place], {%3, %4}, [counted];\n}" ::"r"(to),
      "r"(barrier), "r"(rank), "f"(first), "f"(second)
      : "memory");
}

// Four numbers at the place in the CTA `rank` of the cluster that `at` is in this one.
__device__ __forceinline__ float4 load_of_cluster(u32 at, u32 rank) {
  float4 value;
  asm volatile(
      "{\n.reg .b32 place;\nmapa.shared::cluster.u32 place, %4, %5;\n"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [place];\n}"
      : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
      : "r"(at), "r"(rank)
      : "memory");
  return value;
}

// One box of a map to the same place in every CTA of the cluster; each CTA's barrier counts its bytes.
__device__ __forceinline__ void load_box(const TensorMap* map, u32 to, u32 barrier, int x, int y, int z) {
  chaos();
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"((unsigned short)((1 << CLUSTER) - 1))
      : "memory");
}

// One box of a map to this CTA alone.
__device__ __forceinline__ void load_own_box(const TensorMap* map, u32 to, u32 barrier, int x, int y, int z) {
  chaos();
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(
          to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// One box of a map of four dimensions, whole in the first and third, likewise.
__device__ __forceinline__ void load_rows(const TensorMap* map, u32 to, u32 barrier, int y, int w) {
  chaos();
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %3, %5}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(0), "r"(y), "r"(w)
      : "memory");
}

// One box of a map of five dimensions, whole in the second and third, likewise.
__device__ __forceinline__ void load_group_box(const TensorMap* map, u32 to, u32 barrier, int x, int w, int v) {
  chaos();
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %4, %5, %6}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(0), "r"(w), "r"(v)
      : "memory");
}

__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Ordinary writes of shared memory before it are seen by products and copies after it.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// A number that is never negative is known before what is volatile after it: the assembler would wait for products first
// and compute under them nothing.
__device__ __forceinline__ void done_before(float number) {
  asm volatile("{\n.reg .pred p;\nsetp.lt.f32 p, %0, 0f00000000;\n@p nanosleep.u32 1;\n}" ::"f"(number) : "memory");
}
// Keeps reads and writes of accumulators on their side of a wait.
template <int COUNT>
__device__ __forceinline__ void pin(float (&values)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(values[i])::"memory");
}

// Descriptors of operands in blocks of 64 columns, whose rows are eight to a group of 1,024 bytes; a block's next group
// is `group_bytes` further.
__device__ __forceinline__ u64 descriptor(u32 address, int leading_bytes, int group_bytes = 1024) {
  return (u64)((address & 0x3FFFF) >> 4) | (u64)(leading_bytes >> 4) << 16 | (u64)(group_bytes >> 4) << 32 |
         (u64)1 << 62;
}
// Lane 0's number, which the assembler then keeps in a register of the whole warp: descriptors made of others take it
// longer than the products that they are for.
__device__ __forceinline__ u32 of_warp(u32 number) { return __shfl_sync(0xFFFFFFFFu, number, 0); }
__device__ __forceinline__ u64 row_descriptor(u32 address) { return descriptor(address, 16); }  // sums run along rows
__device__ __forceinline__ u64 column_descriptor(u32 address, int block_bytes) {  // they run down columns
  return descriptor(address, block_bytes);
}

#define PLUS_F4(a, i) "+f"(a[i]), "+f"(a[i + 1]), "+f"(a[i + 2]), "+f"(a[i + 3])
#define PLUS_F16(a, i) PLUS_F4(a, i), PLUS_F4(a, i + 4), PLUS_F4(a, i + 8), PLUS_F4(a, i + 12)
#define ACCUMULATORS_128 \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}"

// s [64, 32] (+)= 16 columns of rows a times rows b.
__device__ __forceinline__ void multiply_rows(float (&s)[16], u64 a, u64 b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, p, 1, 1, 0, 0;\n}"
      : PLUS_F16(s, 0)
      : "l"(a), "l"(b), "r"(accumulate));
}

// s [64, 64] (+)= the same.
__device__ __forceinline__ void multiply_rows(float (&s)[32], u64 a, u64 b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%32, %33, p, 1, 1, 0, 0;\n}"
      : PLUS_F16(s, 0), PLUS_F16(s, 16)
      : "l"(a), "l"(b), "r"(accumulate));
}

// o [64, 256] += a fragment of 16 columns in registers times 16 rows.
__device__ __forceinline__ void multiply_columns(float (&o)[128], const u32* a, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 " ACCUMULATORS_128
      ", {%128, %129, %130, %131}, %132, 1, 1, 1, 1;"
      : PLUS_F16(o, 0), PLUS_F16(o, 16), PLUS_F16(o, 32), PLUS_F16(o, 48), PLUS_F16(o, 64), PLUS_F16(o, 80),
        PLUS_F16(o, 96), PLUS_F16(o, 112)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// The same with the first operand in shared memory.
__device__ __forceinline__ void multiply_columns(float (&o)[128], u64 a, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 " ACCUMULATORS_128 ", %128, %129, 1, 1, 1, 0, 1;"
      : PLUS_F16(o, 0), PLUS_F16(o, 16), PLUS_F16(o, 32), PLUS_F16(o, 48), PLUS_F16(o, 64), PLUS_F16(o, 80),
        PLUS_F16(o, 96), PLUS_F16(o, 112)
      : "l"(a), "l"(b));
}

// Products of a warp: sum [16, 8] = from + 16 columns of rows a times 16 rows b.
// Volatile, or the compiler could move it to where its sums are read, a branch of some threads.
__device__ __forceinline__ void multiply(float (&sum)[4], const float (&from)[4], const u32* a, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %11, %12, %13};"
      : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(from[0]), "f"(from[1]), "f"(from[2]),
        "f"(from[3]));
}

__device__ __forceinline__ void multiply(float (&sum)[4], const u32* a, u32 b0, u32 b1) {
  multiply(sum, sum, a, b0, b1);
}

__device__ __forceinline__ void load_matrices(u32 (&to)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address));
}

// The same of each matrix's transpose.
__device__ __forceinline__ void load_transposed(u32 (&to)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address));
}

// An 8 x 8 matrix of 16-bit numbers, of which each lane has two of row lane / 4 -> its transpose, likewise.
__device__ __forceinline__ u32 transposed(u32 pair) {
  u32 to;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(to) : "r"(pair));
  return to;
}

// Where a 16-byte piece of a row of a swizzled box lies.
__device__ __forceinline__ int piece(int row, int number) { return row * 128 + ((number ^ (row & 7)) << 4); }

__device__ __forceinline__ u32 bf16_pair(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// To the nearest bfloat16.
__device__ __forceinline__ float rounded(float value) { return __uint_as_float(bf16_pair(0.0f, value) & 0xFFFF0000u); }

// Four 8 x 8 matrices in the order of an A operand: 16 rows of this warp, 16 columns from `column` of a block.
__device__ __forceinline__ void store_fragment(u32 block, int column, u32 a, u32 b, u32 c, u32 d) {
  int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16, chunk = column / 8 + lane / 16;
  u32 address = block + row * 128 + ((chunk ^ (row & 7)) << 4);
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

constexpr float LOG2_E = 1.4426950408889634f;
#define NO_KEY (-__int_as_float(0x7F800000))  // the score of a key that is not seen

__device__ __forceinline__ float power_of_two(float exponent) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
  return power;
}

// The tanh form. Its quotient is within two units of the last place, as Triton's is: both give the same bits.
__device__ __forceinline__ float gelu(float x) {
  const float u = 0.7978845608028654f * (x + 0.044715f * x * x * x);
  float quotient;
  asm("div.full.f32 %0, %1, %2;" : "=f"(quotient) : "f"(x), "f"(1.0f + __expf(-2.0f * u)));
  return quotient;
}

__device__ __forceinline__ float quad_maximum(float value) {
  value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFFu, value, 1));
  return fmaxf(value, __shfl_xor_sync(0xFFFFFFFFu, value, 2));
}

__device__ __forceinline__ float quad_sum(float value) {
  value += __shfl_xor_sync(0xFFFFFFFFu, value, 1);
  return value + __shfl_xor_sync(0xFFFFFFFFu, value, 2);
}
