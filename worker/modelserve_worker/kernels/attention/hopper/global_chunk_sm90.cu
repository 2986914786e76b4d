// Chunk attention of global layers, head dim 512, for compute capability 9.0 (Hopper).
//
// A CTA holds 64 query rows: 64 / group tokens times the query heads of one KV head. A cluster of two CTAs takes
// neighbouring tokens and shares every tile of keys: each loads half of it for both. Blocks are of 64 columns. V-only
// rows: a tile is 64 keys, eight blocks of V (which is K too, but for its last 128 columns) and two of turned K. Rows
// with K: 32 keys, eight blocks of V and eight of K, so that two tiles fit beside the queries.
//
// Warpgroup 0 makes the scores and weights of even tiles and sums columns [0, 256) of the output, warpgroup 1 those of
// odd tiles and columns [256, 512); each reads the other's weights from shared memory. Tiles are summed in order, with
// one chain of running maxima that goes from one warpgroup to the other. A third warpgroup loads.

// Whoever compiles defines KEY_PLANE: 1 where rows have K, 0 where they are V-only.

#include "pipeline.cuh"

constexpr int WIDTH = 512;
constexpr int ROWS = 64;  // queries of a CTA
constexpr int PAGE = 64;  // keys
constexpr int KEYS = KEY_PLANE ? 32 : 64;  // of a tile
constexpr int STEPS = KEYS / 16;           // products that take the keys of a tile
constexpr int QUERY_BLOCK_BYTES = ROWS * 64 * 2;
constexpr int BLOCK_BYTES = KEYS * 64 * 2;
constexpr int V_BLOCKS = 8;
constexpr int TILE_BYTES = (V_BLOCKS + (KEY_PLANE ? 8 : 2)) * BLOCK_BYTES;
constexpr int TILES_AT = 8 * QUERY_BLOCK_BYTES;
constexpr int WEIGHTS_AT = TILES_AT + 2 * TILE_BYTES;  // of rows with K; else they lie over turned keys
constexpr int ROW_FLOATS_AT = WEIGHTS_AT + KEY_PLANE * 2 * ROWS * 128;
constexpr int BARRIERS_AT = ROW_FLOATS_AT + 6 * ROWS * 4;
constexpr int GROUPS = KEY_PLANE ? 8 : 5;  // a tile is loaded in pairs of blocks: four of V, then those of K
constexpr int FIRST_KEY_GROUP = 4;
constexpr int EMPTY = KEY_PLANE ? 3 : 2;  // parts of a tile that become free one by one: halves of V, and K

static_assert(BARRIERS_AT + 2 * (GROUPS + EMPTY) * 8 == SHARED_BYTES, "");

// Arrays of one float per row in shared memory.
enum RowFloats { MAXIMUM_0, MAXIMUM_1, DECAY_0, DECAY_1, SUM_0, SUM_1 };
// Named barriers; 0 is __syncthreads.
enum Barrier { WEIGHTS_0 = 1, WEIGHTS_1, CONSUMERS, OWN_0, OWN_1 };

// Values of one thread: rows `row` and `row` + 8 of each 8 columns. Skipped where no row of the warp decays.
__device__ __forceinline__ void decay_output(float (&o)[128], float first, float second) {
  if (!__any_sync(0xFFFFFFFFu, first != 1.0f || second != 1.0f)) return;
#pragma unroll
  for (int i = 0; i < 128; i += 4) o[i] *= first, o[i + 1] *= first, o[i + 2] *= second, o[i + 3] *= second;
}

// What one CTA works on.
struct Work {
  int first;      // token of the chunk of row 0
  int length;     // tokens of the chunk
  int start;      // position of its first token
  int last;       // last position that any row of the cluster sees
  int pairs;      // of tiles
  long long row;  // of q and output, of the chunk's first token
  u32 shared;     // address of shared memory
};

__device__ __forceinline__ u32 full_barrier(u32 shared, int tile, int group) {
  return shared + BARRIERS_AT + (tile * GROUPS + group) * 8;
}
// `part` 0: what warpgroup 0 reads last; 1: what warpgroup 1 does; KEY_PART: K, which the tile's own warpgroup reads.
constexpr int KEY_PART = 2;
__device__ __forceinline__ u32 empty_barrier(u32 shared, int tile, int part) {
  return shared + BARRIERS_AT + (2 * GROUPS + tile * EMPTY + part) * 8;
}

__device__ __forceinline__ u32 weights_address(u32 shared, int tile) {
  if (KEY_PLANE) return shared + WEIGHTS_AT + tile * ROWS * 128;
  return shared + TILES_AT + tile * TILE_BYTES + V_BLOCKS * BLOCK_BYTES;
}

// As `release`, of the same part of both CTAs' tiles.
__device__ __forceinline__ void release_of_cluster(u32 barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive_cluster(barrier);
}

// Scores of one tile, in the order in which its blocks come.
__device__ __forceinline__ void issue_scores(float (&s)[KEYS / 2], u32 shared, int tile, u32 parity) {
  const u64 q = row_descriptor(shared), k = row_descriptor(shared + TILES_AT + tile * TILE_BYTES);
#pragma unroll
  for (int step = 0; step < 4; step++) {
    // Pairs of blocks of Q; the last of V-only rows meets the turned keys, which come before V's third in odd tiles.
    int part = KEY_PLANE || tile == 0 || step < 2 ? step : 5 - step;
    int group = KEY_PLANE ? FIRST_KEY_GROUP + part : part == 3 ? FIRST_KEY_GROUP : part;
    mbarrier_wait(full_barrier(shared, tile, group), parity);
    wgmma_fence();
#pragma unroll
    for (int block = 0; block < 2; block++) {
#pragma unroll
      for (int column = 0; column < 4; column++)
        multiply_rows(s, q + ((2 * part + block) * QUERY_BLOCK_BYTES + column * 32) / 16,
                      k + ((2 * group + block) * BLOCK_BYTES + column * 32) / 16,
                      step > 0 || block > 0 || column > 0);
    }
  }
  wgmma_commit();
}

// Rows of a tile that nobody has written may hold NaN, which a weight of zero does not cancel.
__device__ __forceinline__ void clear_unwritten(const Work& work, int tile, int number, int half) {
  int written = work.start + work.length - number * KEYS;
  if (written >= KEYS) return;
  u32 blocks = work.shared + TILES_AT + tile * TILE_BYTES + half * 4 * BLOCK_BYTES;
  int from = written > 0 ? written * 8 : 0;  // 16-byte pieces of a block
  for (int i = from + threadIdx.x % 128; i < KEYS * 8; i += 128)
#pragma unroll
    for (int block = 0; block < 4; block++)
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(blocks + block * BLOCK_BYTES + i * 16), "r"(0)
                   : "memory");
  fence_async_proxy();
  barrier_sync(half ? OWN_1 : OWN_0, 128);
}

__device__ __forceinline__ void mask_scores(float (&s)[KEYS / 2], int first_key, int first_limit, int second_limit) {
#pragma unroll
  for (int i = 0; i < KEYS / 2; i++) {
    int key = first_key + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
    if (key > (i % 4 < 2 ? first_limit : second_limit)) s[i] = NO_KEY;
  }
}

// o += weights of a tile in shared memory times this warpgroup's half of its values.
__device__ __forceinline__ void issue_values_of_other(float (&o)[128], u32 shared, int tile, int half) {
  const u64 weights = row_descriptor(weights_address(shared, tile));
  const u64 values = column_descriptor(shared + TILES_AT + tile * TILE_BYTES + half * 4 * BLOCK_BYTES, BLOCK_BYTES);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < STEPS; step++) multiply_columns(o, weights + step * 2, values + step * 128);
  wgmma_commit();
}

template <int OWN>
__device__ __forceinline__ void consume(const Work& work, unsigned char* memory, unsigned short* output, int kv_heads,
                                        int head, int group) {
  const u32 shared = work.shared;
  const int thread = threadIdx.x % 128, lane = thread % 32;
  const int row = thread / 32 * 16 + lane / 4;  // and row + 8
  const int own_barrier = OWN ? OWN_1 : OWN_0;
  const int lowest_limit = work.start + work.first;
  const int first_limit = min(lowest_limit + row / group, work.last);
  const int second_limit = min(lowest_limit + (row + 8) / group, work.last);
  float* row_floats = reinterpret_cast<float*>(memory + ROW_FLOATS_AT) + row;
  const u64 own_values = column_descriptor(shared + TILES_AT + OWN * (TILE_BYTES + 4 * BLOCK_BYTES), BLOCK_BYTES);
  const u32 own_weights = weights_address(shared, OWN);

  float o[128];
#pragma unroll
  for (int i = 0; i < 128; i++) o[i] = 0.0f;
  float first_sum = 0.0f, second_sum = 0.0f;

  for (int pair = 0; pair < work.pairs; pair++) {
    const u32 parity = pair & 1;
    const int number = 2 * pair + OWN;
    float s[KEYS / 2];
    issue_scores(s, shared, OWN, parity);
    float first_before, second_before;
    const auto scored = [&] {
      wgmma_wait<OWN>();
      pin(s);
      if (KEY_PLANE) release_of_cluster(empty_barrier(shared, OWN, KEY_PART));
    };
    if (OWN == 1) {
      barrier_sync(WEIGHTS_0, 256);
      first_before = row_floats[MAXIMUM_0 * ROWS], second_before = row_floats[MAXIMUM_0 * ROWS + 8];
      const float first_decay = row_floats[DECAY_0 * ROWS], second_decay = row_floats[DECAY_0 * ROWS + 8];
      mbarrier_wait(full_barrier(shared, 0, 2), parity);
      mbarrier_wait(full_barrier(shared, 0, 3), parity);
      clear_unwritten(work, 0, number - 1, 1);
      decay_output(o, first_decay, second_decay);
      first_sum *= first_decay, second_sum *= second_decay;
      issue_values_of_other(o, shared, 0, 1);
      scored();
    } else {
      if (KEY_PLANE) scored();  // first, so that no read is on its way when K is released
      first_before = pair ? row_floats[MAXIMUM_1 * ROWS] : NO_KEY;
      second_before = pair ? row_floats[MAXIMUM_1 * ROWS + 8] : NO_KEY;
      if (!KEY_PLANE) scored();
    }

    if (number * KEYS + KEYS - 1 > lowest_limit) mask_scores(s, number * KEYS, first_limit, second_limit);
    float first_maximum = s[0], second_maximum = s[2];
#pragma unroll
    for (int i = 0; i < KEYS / 2; i += 4) {
      first_maximum = fmaxf(first_maximum, fmaxf(s[i], s[i + 1]));
      second_maximum = fmaxf(second_maximum, fmaxf(s[i + 2], s[i + 3]));
    }
    first_maximum = fmaxf(first_before, quad_maximum(first_maximum) * LOG2_E);
    second_maximum = fmaxf(second_before, quad_maximum(second_maximum) * LOG2_E);
    const float first_decay = power_of_two(first_before - first_maximum);
    const float second_decay = power_of_two(second_before - second_maximum);
    first_sum *= first_decay, second_sum *= second_decay;
    u32 weights[KEYS / 4];
#pragma unroll
    for (int i = 0; i < KEYS / 2; i += 4) {
      const float a = power_of_two(fmaf(s[i], LOG2_E, -first_maximum));
      const float b = power_of_two(fmaf(s[i + 1], LOG2_E, -first_maximum));
      const float c = power_of_two(fmaf(s[i + 2], LOG2_E, -second_maximum));
      const float d = power_of_two(fmaf(s[i + 3], LOG2_E, -second_maximum));
      first_sum += a + b, second_sum += c + d;
      weights[i / 2] = bf16_pair(a, b), weights[i / 2 + 1] = bf16_pair(c, d);
    }
    if (!KEY_PLANE) barrier_sync(own_barrier, 128);  // all warps have read the turned keys
#pragma unroll
    for (int step = 0; step < STEPS; step++)
      store_fragment(own_weights, step * 16, weights[4 * step], weights[4 * step + 1], weights[4 * step + 2],
                     weights[4 * step + 3]);
    if (lane % 4 == 0) {
      row_floats[(OWN ? MAXIMUM_1 : MAXIMUM_0) * ROWS] = first_maximum;
      row_floats[(OWN ? MAXIMUM_1 : MAXIMUM_0) * ROWS + 8] = second_maximum;
      row_floats[(OWN ? DECAY_1 : DECAY_0) * ROWS] = first_decay;
      row_floats[(OWN ? DECAY_1 : DECAY_0) * ROWS + 8] = second_decay;
    }
    fence_async_proxy();
    if (KEY_PLANE && OWN == 1) wgmma_wait<0>();  // the other may write its next weights once it has these
    barrier_arrive(OWN ? WEIGHTS_1 : WEIGHTS_0, 256);

    if (OWN == 1) {
      wgmma_wait<0>();
      pin(o);
      release_of_cluster(empty_barrier(shared, 0, 1));
      if (KEY_PLANE) mbarrier_wait(full_barrier(shared, 1, 2), parity);
      mbarrier_wait(full_barrier(shared, 1, 3), parity);
    } else if (KEY_PLANE) {
      mbarrier_wait(full_barrier(shared, 0, 0), parity);
      mbarrier_wait(full_barrier(shared, 0, 1), parity);
    }
    clear_unwritten(work, OWN, number, OWN);
    decay_output(o, first_decay, second_decay);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < STEPS; step++)
      multiply_columns(o, weights + 4 * step, own_values + step * 128);
    wgmma_commit();
    wgmma_wait<0>();
    pin(o);
    release_of_cluster(empty_barrier(shared, OWN, OWN));
    if (OWN == 0) {
      barrier_sync(WEIGHTS_1, 256);
      const float first_next = row_floats[DECAY_1 * ROWS], second_next = row_floats[DECAY_1 * ROWS + 8];
      mbarrier_wait(full_barrier(shared, 1, 0), parity);
      mbarrier_wait(full_barrier(shared, 1, 1), parity);
      clear_unwritten(work, 1, number + 1, 0);
      decay_output(o, first_next, second_next);
      first_sum *= first_next, second_sum *= second_next;
      issue_values_of_other(o, shared, 1, 0);
      wgmma_wait<0>();
      pin(o);
      release_of_cluster(empty_barrier(shared, 1, 0));
    }
  }

  first_sum = quad_sum(first_sum), second_sum = quad_sum(second_sum);
  if (lane % 4 == 0) {
    row_floats[(SUM_0 + OWN) * ROWS] = first_sum;
    row_floats[(SUM_0 + OWN) * ROWS + 8] = second_sum;
  }
  barrier_sync(CONSUMERS, 256);  // nobody reads the queries any more: the output goes there
  const float first_inverse = 1.0f / (row_floats[SUM_0 * ROWS] + row_floats[SUM_1 * ROWS]);
  const float second_inverse = 1.0f / (row_floats[SUM_0 * ROWS + 8] + row_floats[SUM_1 * ROWS + 8]);
#pragma unroll
  for (int i = 0; i < 128; i += 8)
    store_fragment(shared + (OWN * 4 + i / 32) * QUERY_BLOCK_BYTES, i % 32 * 2,
                   bf16_pair(o[i] * first_inverse, o[i + 1] * first_inverse),
                   bf16_pair(o[i + 2] * second_inverse, o[i + 3] * second_inverse),
                   bf16_pair(o[i + 4] * first_inverse, o[i + 5] * first_inverse),
                   bf16_pair(o[i + 6] * second_inverse, o[i + 7] * second_inverse));
  barrier_sync(own_barrier, 128);
  for (int i = thread; i < ROWS * 32; i += 128) {
    const int at = i / 32, block = OWN * 4 + i % 32 / 8, chunk = i % 8;
    const int token = work.first + at / group;
    if (token >= work.length) continue;
    // V-only rows have their turned columns last; outputs are in the head's own order.
    const int natural = KEY_PLANE ? block : block < 3 ? block + 1 : block < 6 ? block + 2 : block == 6 ? 0 : 4;
    const long long place = ((work.row + token) * kv_heads + head) * group + at % group;
    *reinterpret_cast<uint4*>(output + place * WIDTH + natural * 64 + chunk * 8) =
        *reinterpret_cast<const uint4*>(memory + block * QUERY_BLOCK_BYTES + at * 128 + ((chunk ^ (at & 7)) << 4));
  }
}

// Two blocks of a tile: each CTA of the cluster loads one of them for both.
__device__ __forceinline__ void load_pair(const TensorMap* map, u32 shared, int tile, int group, int row, int page) {
  const u32 barrier = full_barrier(shared, tile, group), rank = cluster_rank();
  mbarrier_expect(barrier, 2 * BLOCK_BYTES);
  load_box(map, shared + TILES_AT + tile * TILE_BYTES + (2 * group + rank) * BLOCK_BYTES, barrier,
           group % FIRST_KEY_GROUP * 128 + 64 * rank, row, page);
}

// Loads the tiles of [0, last] in order, each part as soon as its place is free.
__device__ __forceinline__ void produce(const Work& work, const TensorMap* values, const TensorMap* keys,
                                        const int* pages, int first_key, int page_origin, int page_step, int head) {
  const u32 shared = work.shared;
  const int tiles = work.last / KEYS + 1;
  for (int pair = 0; pair < work.pairs; pair++) {
    const u32 parity = pair & 1 ^ 1;
    int page[2], row[2], key[2];
#pragma unroll
    for (int tile = 0; tile < 2; tile++) {
      const int number = min(2 * pair + tile, tiles - 1);  // the last pair may want one tile more: all masked
      const int logical = number * KEYS / PAGE;
      page[tile] = page_origin + page_step * (pages == nullptr ? first_key / PAGE + logical : pages[logical]);
      row[tile] = head * PAGE + number * KEYS % PAGE;
      key[tile] = first_key + number * KEYS;
      if (!KEY_PLANE) continue;
      mbarrier_wait(empty_barrier(shared, tile, KEY_PART), parity);
      for (int group = FIRST_KEY_GROUP; group < GROUPS; group++)
        load_pair(keys, shared, tile, group, row[tile], page[tile]);
    }
#pragma unroll
    for (int tile = 0; tile < 2; tile++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        mbarrier_wait(empty_barrier(shared, tile, half), parity);
        load_pair(values, shared, tile, 2 * half, row[tile], page[tile]);
        // Turned keys lie under the tile's weights, which the other warpgroup reads; scores want them early.
        if (!KEY_PLANE && tile == 0 && half == 1) load_pair(keys, shared, 0, FIRST_KEY_GROUP, head, key[0]);
        load_pair(values, shared, tile, 2 * half + 1, row[tile], page[tile]);
        if (!KEY_PLANE && tile == 1 && half == 0) load_pair(keys, shared, 1, FIRST_KEY_GROUP, head, key[1]);
      }
    }
  }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(384, 1) global_chunk(
    const __grid_constant__ TensorMap values,  // [pages, kv_heads * 64, 512]: V of one layer
    const __grid_constant__ TensorMap keys,    // K, like V; or of V-only rows [keys, kv_heads, 128]: its turned columns
    const unsigned short* q,                   // bf16 [T, kv_heads * group, 512]
    unsigned short* output,                    // like q, columns in the head's order
    const int* chunk_rows,                     // [chunks] row of T of each chunk's first token
    const int* chunk_starts,                   // [chunks] its position
    const int* chunk_lengths,                  // [chunks]
    const int* chunk_slots,                    // [chunks]
    const int* block_ends,                     // [chunks] running sum of blocks of CLUSTER * 64 / group tokens
    const int* key_rows,                       // [chunks] row of `keys` of each chunk's position 0
    const int* table,                          // page of each slot and 64 positions; null: pages are key_rows / 64
    long long table_stride, int page_origin, int page_step,  // page p is at page_origin + page_step * p of `values`
    int chunks, int kv_heads, int group) {
  extern __shared__ __align__(1024) unsigned char memory[];
  wait_for_prerequisites();
  launch_dependents();  // of what may run beside this kernel, once all before it is complete
  const int head = blockIdx.y;
  const int block = block_ends[chunks - 1] - 1 - (int)(blockIdx.x / CLUSTER);  // the longest first
  if (block < 0) return;
  int chunk = 0, before = 0;
  for (int i = 0; i < chunks; i++) {
    const int end = block_ends[i];
    if (end > block) break;
    chunk = i + 1, before = end;
  }
  const int tokens = ROWS / group;  // of a CTA
  const int first = (block - before) * tokens * CLUSTER;
  Work work;
  work.length = chunk_lengths[chunk];
  work.start = chunk_starts[chunk];
  work.row = chunk_rows[chunk];
  work.first = first + (int)cluster_rank() * tokens;
  work.last = work.start + min(first + tokens * CLUSTER, work.length) - 1;
  work.pairs = work.last / (2 * KEYS) + 1;
  work.shared = shared_address(memory);

  if (threadIdx.x == 0) {
    check_memory(work.shared);
    for (int tile = 0; tile < 2; tile++) {
      for (int pair = 0; pair < GROUPS; pair++) mbarrier_init(full_barrier(work.shared, tile, pair), 1);
      for (int part = 0; part < EMPTY; part++) mbarrier_init(empty_barrier(work.shared, tile, part), 4 * CLUSTER);
    }
    mbarrier_init_fence();
  }
  cluster_sync();

  if (threadIdx.x >= 256) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 256) {
      const int* pages = table == nullptr ? nullptr : table + chunk_slots[chunk] * table_stride;
      produce(work, &values, &keys, pages, key_rows[chunk], page_origin, page_step, head);
    }
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    for (int i = threadIdx.x; i < ROWS * WIDTH / 8; i += 256) {
      const int at = i / (WIDTH / 8), chunk_of_row = i % (WIDTH / 8), token = work.first + at / group;
      uint4 piece = make_uint4(0, 0, 0, 0);
      if (token < work.length) {
        const long long place = ((work.row + token) * kv_heads + head) * group + at % group;
        piece = *reinterpret_cast<const uint4*>(q + place * WIDTH + chunk_of_row * 8);
      }
      *reinterpret_cast<uint4*>(memory + chunk_of_row / 8 * QUERY_BLOCK_BYTES + at * 128 +
                                ((chunk_of_row % 8 ^ (at & 7)) << 4)) = piece;
    }
    fence_async_proxy();
    barrier_sync(CONSUMERS, 256);
    if (threadIdx.x < 128) {
      consume<0>(work, memory, output, kv_heads, head, group);
    } else {
      consume<1>(work, memory, output, kv_heads, head, group);
    }
  }
  cluster_sync();  // no CTA ends while another may still write to it
}
