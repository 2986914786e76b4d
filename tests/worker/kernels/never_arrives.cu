// A wait that nobody ends, for test_watch.py.

#include "pipeline.cuh"

extern "C" __global__ void never_arrives(int thread) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const Stages<2> barriers = {shared_address(memory)};
  if (threadIdx.x == 0) barriers.init(1, 1);
  __syncthreads();
  if (threadIdx.x == thread) barriers.wait_full(Ring<2>(1));  // THE WAIT
}
