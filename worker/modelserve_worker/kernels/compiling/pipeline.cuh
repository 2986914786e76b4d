// How the warps of a kernel hand stages of shared memory to one another, for compute capability 9.0.
//
// A stage has two barriers. Copies into it complete `full`; readers wait for that, and arrive at `empty` when they have
// read it; whoever loads waits for that before the next copies. Stages go round a ring, and each turn is a phase of both
// barriers. Of the phase's parity a reader waits for its own at `full`, a loader for the other one at `empty`: a barrier
// that is new counts as past a phase of parity 1, so the first turn waits for nobody. Who waits must see every phase of
// its barrier: two phases further, parity says the same.
//
// An arrival does not wait for reads. The assembler moves it ahead of the products that use what was read, right behind
// reads that are still queued, and the next copy overtakes them: seen in 1 launch of 2. So a warp arrives
// - behind its wait for products of warpgroups that read the stage themselves (`release`), or
// - behind its wait for the next stage (`Held`): the products that use what was read of the last one are issued before
//   that wait's branch, which nothing is moved across.
// `tests/worker/kernels/wait_masks.py` reads in compiled code that at no arrival a read of shared memory is pending.

#pragma once

#include "sm90.cuh"

// A place in a ring of SIZE, and the parity of the phase in which what is there becomes full.
template <int SIZE>
struct Ring {
  int place;
  u32 parity = 0;
  __device__ __forceinline__ Ring(int first = 0) : place(first) {}
  __device__ __forceinline__ void advance(int by = 1) {
    place += by;
    if (place >= SIZE) place -= SIZE, parity ^= 1;
  }
};

// The barriers of SIZE stages, at `at` in shared memory: each full, then each empty.
template <int SIZE>
struct Stages {
  static constexpr int BYTES = 2 * SIZE * 8;
  u32 at;

  __device__ __forceinline__ u32 full(int place) const { return at + place * 8; }
  __device__ __forceinline__ u32 empty(int place) const { return full(SIZE + place); }
  // One thread: `loads` arrive at full, `readers` warps at empty.
  __device__ __forceinline__ void init(int loads, int readers) const {
    for (int place = 0; place < SIZE; place++) mbarrier_init(full(place), loads), mbarrier_init(empty(place), readers);
  }
  __device__ __forceinline__ void wait_full(const Ring<SIZE>& ring WAITING_AT) const {
    mbarrier_wait(full(ring.place), ring.parity HERE);
  }
  __device__ __forceinline__ void wait_empty(const Ring<SIZE>& ring WAITING_AT) const {
    mbarrier_wait(empty(ring.place), ring.parity ^ 1 HERE);
  }
};

// A warp has read a stage, through products of warpgroups that are complete.
__device__ __forceinline__ void release(u32 empty) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(empty);
}

// The stage that a warp has read last, into registers. A ring of them has two stages or more.
struct Held {
  u32 empty = 0;  // its barrier; 0: none yet
  // Behind the wait for the next stage, whose barrier is `next`.
  __device__ __forceinline__ void exchange(u32 next) {
    __syncwarp();
    if (empty != 0 && threadIdx.x % 32 == 0) mbarrier_arrive(empty);
    empty = next;
  }
};

// Copies of swizzled boxes go by addresses; every kernel has its memory's size from whoever launches it.
__device__ __forceinline__ void check_memory(u32 shared) {
  if (shared % 1024) __trap();
}
