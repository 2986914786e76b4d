// What kernels of decodes take from sm90.cuh and from CUDA, on a CPU: one cluster at a time, its threads as fibers that
// take turns. Shared memory begins as NaN. Addresses of shared memory are offsets in the thread block's own.

#pragma once

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <vector>

typedef unsigned int u32;
typedef unsigned long long u64;
using std::max;
using std::min;

#define WAITING_AT
#define HERE
#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __cluster_dims__(...)
#define __launch_bounds__(...)
#define __shfl_xor_sync(mask, value, distance) shuffled_xor(value, distance)
#define __shfl_sync(mask, value, from) shuffled(value, from)

struct Dim {
  int x, y;
};
struct uint4 {
  u32 x, y, z, w;
};
struct uint2 {
  u32 x, y;
};
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
struct TensorMap {
  const unsigned char* base;  // of the plane in page 0: rows of 128 bytes for each part
  long long page_bytes;
  int parts = 4, rows = 8;  // of a box
  // Or of a matrix [matrix_rows, blocks of 128 bytes] boxes of so many rows and blocks.
  long long row_bytes = 0;
  int matrix_rows = 0, blocks = 0, box_rows = 0, box_blocks = 0;
  long long block_bytes = 128;  // from a block to the next
  int columns = 0, box_columns = 0;  // of 16 bits, where a box is of part of a row: as it lies, not swizzled
};

struct Meeting {  // of `size` threads, again and again
  int size = 0, here = 0;
  u64 times = 0;
};
struct ThreadBlock {
  int rank;
  std::vector<unsigned char> shared;
  Meeting all, named[16], warps[32];
  u32 shown[32][32][8];  // what lanes of a warp show each other
};
struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  ThreadBlock* block;
  int thread;
  u64 cluster_phase = 0;
  bool done = false;
};

static std::vector<ThreadBlock> blocks;
static std::vector<Fiber> fibers;
static Fiber* current;
static ucontext_t scheduler;
static Meeting cluster, prerequisites;
static void (*kernel_ahead)();
static Dim gridDim;
struct {
  struct {
    int first;  // of the cluster
    operator int() const { return first + current->block->rank; }
  } x;
  int y;
} static blockIdx;
struct {
  struct {
    operator int() const { return current->thread; }
  } x;
} static threadIdx;

static void yield() { swapcontext(&current->context, &scheduler); }
static void arrive(Meeting& meeting) {
  if (++meeting.here == meeting.size) meeting.here = 0, meeting.times++;
}
static void meet(Meeting& meeting) {
  const u64 before = meeting.times;
  arrive(meeting);
  while (meeting.times == before) yield();
}
static int lane() { return current->thread % 32; }
static u32 (*shown())[8] { return current->block->shown[current->thread / 32]; }
static void meet_warp() { meet(current->block->warps[current->thread / 32]); }
static unsigned char* at(u32 address) { return current->block->shared.data() + address; }

static void __syncwarp() { meet_warp(); }
static void __syncthreads() { meet(current->block->all); }
static void __trap() { abort(); }
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
template <class Value>
static Value __ldcg(const Value* from) {
  return *from;
}
static Meeting& meeting(int name, int threads) {
  current->block->named[name].size = threads;
  return current->block->named[name];
}
static void barrier_sync(int name, int threads) { meet(meeting(name, threads)); }
static void barrier_arrive(int name, int threads) { arrive(meeting(name, threads)); }
static float __int_as_float(int bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
template <class Value>
static Value shuffled(Value value, int from) {
  memcpy(&shown()[lane()][0], &value, 4);
  meet_warp();
  memcpy(&value, &shown()[from][0], 4);
  meet_warp();
  return value;
}
template <class Value>
static Value shuffled_xor(Value value, int distance) { return shuffled(value, lane() ^ distance); }
static u32 __ballot_sync(u32, bool value) {
  shown()[lane()][0] = value;
  meet_warp();
  u32 bits = 0;
  for (int i = 0; i < 32; i++) bits |= shown()[i][0] << i;
  meet_warp();
  return bits;
}
static int __popc(u32 bits) { return __builtin_popcount(bits); }
static float quad_maximum(float value) {
  value = fmaxf(value, shuffled_xor(value, 1));
  return fmaxf(value, shuffled_xor(value, 2));
}
static float quad_sum(float value) {
  value += shuffled_xor(value, 1);
  return value + shuffled_xor(value, 2);
}

static unsigned char* shared_memory() { return current->block->shared.data(); }
static u32 shared_address(const void* pointer) { return (u32)((const unsigned char*)pointer - shared_memory()); }
static u32 cluster_rank() { return current->block->rank; }
static void launch_dependents() {}
// What the kernel ahead writes is there only when all threads wait for it, after whatever was read before, or when those
// that do not have come as far as they could.
static void wait_for_prerequisites() {
  if (prerequisites.times == 0) {
    if (prerequisites.here + 1 == prerequisites.size) kernel_ahead();
    meet(prerequisites);
  }
}

// Of a barrier: arrivals of a phase, those that are missing, the bytes that are, and the phase's number.
struct Phases {
  short size, missing;
  int bytes : 24;
  unsigned number : 8;
};
static Phases& phases_at(u32 address) { return *(Phases*)at(address); }
static void advance(Phases& phases) {
  if (phases.missing == 0 && phases.bytes == 0) phases.missing = phases.size, phases.number++;
}
static void mbarrier_init(u32 barrier, int arrivals) {
  phases_at(barrier) = {(short)arrivals, (short)arrivals, 0, 0};
}
static void mbarrier_init_fence() {}
static void mbarrier_expect(u32 barrier, int bytes) {
  Phases& phases = phases_at(barrier);
  phases.missing--, phases.bytes += bytes;
  advance(phases);
}
static void mbarrier_arrive(u32 barrier) { phases_at(barrier).missing--, advance(phases_at(barrier)); }
static void came(Phases& phases, int bytes) { phases.bytes -= bytes, advance(phases); }
static void mbarrier_wait(u32 barrier, u32 parity) {
  while (phases_at(barrier).number % 2 == parity) yield();
}
static void mbarrier_wait_cluster(u32 barrier, u32 parity) { mbarrier_wait(barrier, parity); }
static void cluster_arrive_begun() {
  current->cluster_phase = cluster.times;
  arrive(cluster);
}
static void cluster_wait() {
  while (cluster.times == current->cluster_phase) yield();
}
static void send_pair(u32 to, u32 barrier, u32 rank, float first, float second) {
  unsigned char* there = blocks.at(rank).shared.data();
  memcpy(there + to, &first, 4), memcpy(there + to + 4, &second, 4);
  came(*(Phases*)(there + barrier), 8);
}

static void cluster_sync() { meet(cluster); }
static float4 load_of_cluster(u32 from, u32 rank) {
  float4 value;
  memcpy(&value, blocks.at(rank).shared.data() + from, sizeof(value));
  return value;
}

static void prefetch_map(const TensorMap*) {}
static void fence_async_proxy() {}
// Swizzled by 128 bytes.
static void load_rows(const TensorMap* map, u32 to, u32 barrier, int y, int w) {
  for (int part = 0; part < map->parts; part++)
    for (int row = 0; row < map->rows; row++)
      for (int piece = 0; piece < 8; piece++)
        memcpy(at(to + (part * map->rows + row) * 128 + ((piece ^ row % 8) << 4)),
               map->base + w * map->page_bytes + (y + row) * 128 * map->parts + part * 128 + piece * 16, 16);
  came(phases_at(barrier), map->parts * map->rows * 128);
}
// Swizzled by 128 bytes; nothing but zeros outside of the matrix.
static void load_own_box(const TensorMap* of, u32 to, u32 barrier, int x, int first_row, int first_block) {
  const TensorMap& map = *of;
  if (map.box_columns > 0) {
    unsigned char* there = at(to);
    for (int block = first_block; block < first_block + map.box_blocks; block++)
      for (int row = first_row; row < first_row + map.box_rows; row++)
        for (int column = x; column < x + map.box_columns; column++, there += 2)
          if (column < map.columns && row < map.matrix_rows && block < map.blocks)
            memcpy(there, map.base + block * map.block_bytes + row * map.row_bytes + column * 2, 2);
          else
            memset(there, 0, 2);
    return came(phases_at(barrier), map.box_blocks * map.box_rows * map.box_columns * 2);
  }
  for (int block = 0; block < map.box_blocks; block++)
    for (int row = 0; row < map.box_rows; row++)
      for (int piece = 0; piece < 8; piece++) {
        unsigned char* there = at(to + (block * map.box_rows + row) * 128 + ((piece ^ row % 8) << 4));
        if (first_row + row < map.matrix_rows && first_block + block < map.blocks)
          memcpy(there, map.base + (first_row + row) * map.row_bytes + (first_block + block) * map.block_bytes + piece * 16,
                 16);
        else
          memset(there, 0, 16);
      }
  came(phases_at(barrier), map.box_blocks * map.box_rows * 128);
}
// Rows of both halves of a matrix in turn, eight of each, `box_rows` together, from group `first` and column `x` on.
static void load_group_box(const TensorMap* map, u32 to, u32 barrier, int x, int first, int) {
  const int half = map->matrix_rows / 2;
  for (int row = 0; row < map->box_rows; row++) {
    const int of_half = first * 8 + row / 16 * 8 + row % 8;
    for (int piece = 0; piece < 8; piece++) {
      unsigned char* there = at(to + row * 128 + ((piece ^ row % 8) << 4));
      if (of_half < half)
        memcpy(there, map->base + (row / 8 % 2 * half + of_half) * map->row_bytes + x * 2 + piece * 16, 16);
      else
        memset(there, 0, 16);
    }
  }
  came(phases_at(barrier), map->box_rows * 128);
}
static int piece(int row, int number) { return row * 128 + ((number ^ (row & 7)) << 4); }

static void load_pairs(u32 (&to)[4], u32 address, bool transposed) {
  shown()[lane()][0] = address;
  meet_warp();
  for (int matrix = 0; matrix < 4; matrix++) {
    unsigned short pair[2];
    for (int i = 0; i < 2; i++) {
      const int outer = lane() / 4, inner = lane() % 4 * 2 + i;
      const int row = transposed ? inner : outer, column = transposed ? outer : inner;
      memcpy(&pair[i], at(shown()[matrix * 8 + row][0] + column * 2), 2);
    }
    to[matrix] = pair[0] | (u32)pair[1] << 16;
  }
  meet_warp();
}
static void load_matrices(u32 (&to)[4], u32 address) { load_pairs(to, address, false); }
static void load_transposed(u32 (&to)[4], u32 address) { load_pairs(to, address, true); }

static u32 transposed(u32 pair) {
  shown()[lane()][0] = pair;
  meet_warp();
  u32 to = 0;
  for (int i = 0; i < 2; i++) to |= (shown()[(lane() % 4 * 2 + i) * 4 + lane() / 8][0] >> lane() / 4 % 2 * 16 & 0xFFFF) << i * 16;
  meet_warp();
  return to;
}

static float element(u32 pair, int odd) { return __int_as_float(odd ? pair & 0xFFFF0000u : pair << 16); }
static void multiply(float (&sum)[4], const u32* a, u32 b0, u32 b1) {
  const u32 mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
  memcpy(shown()[lane()], mine, sizeof(mine));
  meet_warp();
  for (int i = 0; i < 4; i++) {
    const int row = lane() / 4 + i / 2 * 8, column = lane() % 4 * 2 + i % 2;
    for (int k = 0; k < 16; k++)
      sum[i] += element(shown()[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2) *
                element(shown()[column * 4 + k % 8 / 2][4 + k / 8], k % 2);
  }
  meet_warp();
}

// Products of warpgroups are there at once. A descriptor is a place in shared memory, in 16 bytes.
static void wgmma_fence() {}
static void wgmma_commit() {}
template <int PENDING>
static void wgmma_wait() {}
template <int COUNT>
static void pin(float (&)[COUNT]) {}
static u32 of_warp(u32 number) { return shuffled(number, 0); }
static u64 row_descriptor(u32 address) { return address >> 4; }
static float swizzled(u64 descriptor, int row, int column) {
  u32 address = (u32)descriptor * 16 + row * 128 + column * 2;
  address ^= (address >> 7 & 7) << 4;
  unsigned short bits;
  memcpy(&bits, at(address), 2);
  return __int_as_float((int)((u32)bits << 16));
}
template <int COLUMNS>
static void multiply_slice(float (&sums)[COLUMNS / 2], u64 a, u64 b) {
  for (int half = 0; half < 2; half++) {
    float left[16];
    for (int k = 0; k < 16; k++) left[k] = swizzled(a, current->thread % 128 / 32 * 16 + lane() / 4 + half * 8, k);
    for (int i = 0; i < COLUMNS / 2; i++)
      for (int k = 0; i % 4 / 2 == half && k < 16; k++)
        sums[i] += left[k] * swizzled(b, i / 4 * 8 + lane() % 4 * 2 + i % 2, k);
  }
}

static u32 rounded_bits(float value) {
  u32 bits;
  memcpy(&bits, &value, 4);
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
static u32 bf16_pair(float low, float high) { return rounded_bits(low) | rounded_bits(high) << 16; }
static float rounded(float value) { return __int_as_float(rounded_bits(value) << 16); }
static float gelu(float x) { return x / (1.0f + expf(-1.5957691216057308f * (x + 0.044715f * x * x * x))); }
static const float LOG2_E = 1.4426950408889634f;
#define NO_KEY (-__int_as_float(0x7F800000))
static float power_of_two(float exponent) { return exp2f(exponent); }

constexpr int LATEST_TURN = 1000;  // in which the kernel ahead ends
// Runs the cluster at `number` of the grid; `idle` of its threads end without a wait. Returns how many threads have not
// ended when nobody goes on any more.
static int run_cluster(int size, int threads, int shared_bytes, Dim number, Dim grid, void (*ahead)(), void (*body)(),
                       int idle = 0) {
  blocks.assign(size, ThreadBlock());
  fibers.clear();
  fibers.resize(size * threads);
  cluster = Meeting{size * threads}, prerequisites = Meeting{size * threads - idle};
  kernel_ahead = ahead, blockIdx.x.first = number.x, blockIdx.y = number.y, gridDim = grid;
  for (int rank = 0; rank < size; rank++) {
    blocks[rank].rank = rank;
    blocks[rank].shared.assign(shared_bytes, 0xFF);
    blocks[rank].all.size = threads;
    for (Meeting& warp : blocks[rank].warps) warp.size = 32;
  }
  static void (*entered)();
  entered = body;
  for (size_t i = 0; i < fibers.size(); i++) {
    Fiber& fiber = fibers[i];
    fiber.block = &blocks[i / threads], fiber.thread = i % threads;
    fiber.stack.resize(1 << 15);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, [] { entered(), current->done = true; }, 0);
  }
  size_t left = fibers.size();
  for (int turn = 0; left > 0 && turn < 20000; turn++) {
    left = 0;
    if (turn == LATEST_TURN && prerequisites.times == 0) ahead(), prerequisites.times = 1;
    for (Fiber& fiber : fibers) {
      if (fiber.done) continue;
      current = &fiber;
      swapcontext(&scheduler, &fiber.context);
      left += !fiber.done;
    }
  }
  return (int)left;
}
