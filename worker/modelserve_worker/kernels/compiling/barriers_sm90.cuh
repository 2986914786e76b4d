// PTX of compute capability 9.0: barriers, and how their waits and arrivals are watched and disturbed.
//
// WATCH=1: a wait of more than four seconds says which line of which file, block and thread it is, and ends the program.
// CHAOS=1: one wait, arrival or copy in sixteen comes up to two microseconds late, others in every launch.
// What is right in any order of its warps is right with it; what rests on how long something takes soon is not.

#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

#ifndef WATCH
#define WATCH 0
#endif
#ifndef CHAOS
#define CHAOS 0
#endif

constexpr int CLUSTER = 2;  // CTAs of a cluster that share loads

__device__ __forceinline__ void chaos() {
#if CHAOS
  u32 hash = (u32)clock64() + blockIdx.x * 0x9E3779B9u + blockIdx.y * 0x85EBCA6Bu + threadIdx.x / 32 * 0xC2B2AE35u;
  hash = (hash ^ hash >> 16) * 0x7FEB352Du;
  hash = (hash ^ hash >> 15) * 0x846CA68Bu;
  hash ^= hash >> 16;
  asm volatile("nanosleep.u32 %0;" ::"r"(hash & 15 ? 0u : hash >> 22) : "memory");
#endif
}

#if WATCH
extern "C" __device__ void __assertfail(const char* message, const char* file, unsigned line, const char* function,
                                        size_t characters);
// A wait's last parameters, and how they are passed on.
#define WAITING_AT , const char *file = __builtin_FILE(), unsigned line = __builtin_LINE()
// Time since the first look.
struct Watch {
  u64 begun = 0;
  __device__ __forceinline__ void look(const char* file, unsigned line) {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    if (begun == 0) begun = now;
    if (now - begun > 4000000000ull) __assertfail("this wait ends", file, line, "wait", 1);
  }
};
#define PLACE file, line
#define HERE , PLACE
#else
#define WAITING_AT
#define PLACE
#define HERE
struct Watch {
  __device__ __forceinline__ void look() {}
};
#endif

__device__ __forceinline__ void barrier_sync(int name, int threads) {
  chaos();
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

__device__ __forceinline__ void barrier_arrive(int name, int threads) {
  chaos();
  asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

__device__ __forceinline__ void mbarrier_init(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers known to the cluster and to the copy engine; a barrier of all threads must follow.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_expect(u32 barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

template <class Done>
__device__ __forceinline__ void wait_until(Done done WAITING_AT) {
  chaos();
  Watch watch;
  while (!done()) watch.look(PLACE);
}

__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity WAITING_AT) {
  const auto done = [&] {
    u32 done;
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done;
  };
  wait_until(done HERE);
}

// For what other CTAs of the cluster have sent.
__device__ __forceinline__ void mbarrier_wait_cluster(u32 barrier, u32 parity WAITING_AT) {
  const auto done = [&] {
    u32 done;
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done;
  };
  wait_until(done HERE);
}

// For a word of global memory that another CTA sets.
__device__ __forceinline__ void word_wait(const int* word WAITING_AT) {
  const auto set = [&] {
    int set;
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(set) : "l"(word) : "memory");
    return set;
  };
  wait_until(set HERE);
}

__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
  chaos();
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives at the same barrier of every CTA of the cluster. What must be over by then are reads of completed products.
__device__ __forceinline__ void mbarrier_arrive_cluster(u32 barrier) {
#pragma unroll
  for (int rank = 0; rank < CLUSTER; rank++) {
    chaos();
    asm volatile(
        "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
        "r"(rank)
        : "memory");
  }
}

__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void cluster_sync() {
  chaos();
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// That a CTA has begun and its barriers are initialised, which `mbarrier_init_fence` says; of other writes it says nothing.
__device__ __forceinline__ void cluster_arrive_begun() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  chaos();
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Programmatic dependent launch, as dependent_launch.py has it: the one first, the other before any read or return.
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ __forceinline__ void wait_for_prerequisites() {
  chaos();
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
