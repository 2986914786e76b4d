// How thread blocks that go on deal the rows of decodes among them, for compute capability 9.0.
//
// An item is a row and KV head or, where a row's keys are split, one of its splits: as many as `combine` of
// `decode_attention_triton` looks for, of equal length. Items are counted from the first row on; padding has none. Thread
// block b of B takes items b, b + B and so on: every block has as many, however long the rows are. The warp that loads
// finds them and tells the others by the stages.

#pragma once

#include "pipeline.cuh"

struct Item {
  int row, position, head, split;  // row -1: there are no more
};

struct Splitting {
  int page;  // keys; 0: rows are not split
  int most_splits, split_pages;
  __device__ __forceinline__ int count(int position) const {
    if (position < 0 || page == 0) return position >= 0;
    const int pages = position / page + 1, most = max(split_pages, (pages + most_splits - 1) / most_splits);
    return (pages + most - 1) / most;
  }
  // Keys of each but the last.
  __device__ __forceinline__ int keys_of(int position) const {
    const int splits = count(position);
    return (position / page + splits) / splits * page;
  }
};

// A warp's way through them: it looks at 32 rows at a time.
struct Items {
  const int* positions;  // [rows]; -1: padding
  int rows, kv_heads;
  Splitting splitting;
  int first_row = -32, before = 0;  // the first of these rows, and the items of all before it
  int position = -1, through = 0;   // of the lane's row; items of these rows up to its own

  __device__ __forceinline__ Items(const int* positions, int rows, int kv_heads, Splitting splitting)
      : positions(positions), rows(rows), kv_heads(kv_heads), splitting(splitting) {}

  // Numbers rise from call to call.
  __device__ __forceinline__ Item at(int number) {
    const int lane = threadIdx.x % 32;
    int all = __shfl_sync(0xFFFFFFFFu, through, 31);
    while (number >= before + all) {
      before += all, first_row += 32;
      if (first_row >= rows) return {-1, -1, 0, 0};
      position = first_row + lane < rows ? positions[first_row + lane] : -1;
      through = splitting.count(position) * kv_heads;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_sync(0xFFFFFFFFu, through, max(lane - distance, 0));
        if (lane >= distance) through += other;
      }
      all = __shfl_sync(0xFFFFFFFFu, through, 31);
    }
    const int of_row = __popc(__ballot_sync(0xFFFFFFFFu, before + through <= number));
    const int earlier = __shfl_sync(0xFFFFFFFFu, through, max(of_row - 1, 0));
    const int rest = number - before - (of_row ? earlier : 0);
    return {first_row + of_row, __shfl_sync(0xFFFFFFFFu, position, of_row), rest % kv_heads, rest / kv_heads};
  }
};
