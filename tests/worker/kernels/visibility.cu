// Three kernels that start while the one before each ends (test_visibility.py): what a reader keeps in the first cache of
// its multiprocessor, a writer then changes, and whether who reads after its wait sees the change.

typedef unsigned int u32;

__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ __forceinline__ void wait_for_prerequisites() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ u32 cached(const u32* from) {
  u32 value;
  asm volatile("ld.global.ca.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

// Every block brings all words into its multiprocessor's cache, for some fifty microseconds.
extern "C" __global__ void reads(const u32* words, int count, u32* sink) {
  launch_dependents();
  wait_for_prerequisites();
  u32 sum = 0;
  const long long begun = clock64();
  do {
    for (int i = threadIdx.x; i < count; i += blockDim.x) sum += cached(words + i);
  } while (clock64() - begun < 90000);
  if (sum == 0xFFFFFFFFu) *sink = sum;
}

// The next number, everywhere.
extern "C" __global__ void writes(u32* words, int count, u32* number) {
  launch_dependents();
  wait_for_prerequisites();
  const u32 value = *(volatile u32*)number + 1;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) words[i] = value;
}

// As a step's embedding: what starts behind it finds all complete that came before it.
extern "C" __global__ void advances(u32* number) {
  wait_for_prerequisites();
  launch_dependents();
  if (blockIdx.x == 0 && threadIdx.x == 0) *number += 1;
}

// `early`: before its own wait. Of words that are not `number` or, early, neither that nor one less.
extern "C" __global__ void compares(const u32* words, int count, const u32* number, u32* stale, int early) {
  launch_dependents();
  if (!early) wait_for_prerequisites();
  const u32 first = words[0];
  u32 wrong = 0;
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    u32 constant;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(constant) : "l"(words + i) : "memory");
    wrong += cached(words + i) != constant || constant != first;
  }
  if (early) wait_for_prerequisites();
  if (first != *(volatile const u32*)number) wrong += count;
  if (wrong) atomicAdd(stale, wrong);
}
