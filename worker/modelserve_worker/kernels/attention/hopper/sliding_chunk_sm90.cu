// Chunk attention of sliding layers, head dim 256, for compute capability 9.0 (Hopper).
//
// A block is 128 query rows: 128 / group tokens times the query heads of one KV head, 64 rows to each of two consumer
// warpgroups. A third warpgroup loads. CTAs stay: each takes every n-th block, without a pause between two. The next
// kernel starts once all before this one is complete, and may run beside it.
//
// In its turn a consumer issues the scores of a tile, which may be the first of the next block, and the values of the
// tile before, and makes weights while its values are summed. The two take turns: one's weights are made, and outputs
// stored, under the other's products.

#include "pipeline.cuh"
#include "sliding_blocks.cuh"

constexpr int WIDTH = 256, PAGE = 32;  // columns of a head; keys
constexpr int SLOTS = 4;     // of the ring that tiles of K and V go round
constexpr int QUERIES = 3;   // places of a warpgroup's queries: the next are loaded while the last are in use
constexpr int BLOCKS = 4;    // places of blocks, of which three may be in use
constexpr int GROUP_BYTES = 8 * 64 * 2;
constexpr int OCTET_BYTES = 4 * GROUP_BYTES, TILE_BYTES = OCTETS * OCTET_BYTES;
constexpr int QUERY_BLOCK_BYTES = ROWS * 64 * 2, QUERY_BYTES = 4 * QUERY_BLOCK_BYTES;  // of a warpgroup
constexpr int TILES_AT = QUERIES * QUERY_BYTES;
constexpr int BARRIERS_AT = TILES_AT + SLOTS * TILE_BYTES;
constexpr int QUERY_BARRIERS_AT = BARRIERS_AT + Stages<SLOTS>::BYTES;
constexpr int BLOCKS_AT = QUERY_BARRIERS_AT + 3 * QUERIES * 8;

static_assert(BLOCKS_AT + BLOCKS * sizeof(Block) == SHARED_BYTES, "");

// Named barriers; 0 is __syncthreads. TURN + i: warpgroup i may issue; OWN + i: its threads meet.
enum Barrier { TURN = 1, OWN = 3 };

__device__ __forceinline__ Stages<SLOTS> tile_barriers(u32 shared) { return {shared + BARRIERS_AT}; }
// The warpgroups use a place of queries by turns and have a barrier each for it: who waited on every other phase of one
// would take the phase before the last for the awaited one while the other's queries are still on their way.
__device__ __forceinline__ u32 query_barrier(u32 shared, int turn) { return shared + QUERY_BARRIERS_AT + turn * 8; }
__device__ __forceinline__ u32 used(u32 shared, int place) { return query_barrier(shared, 2 * QUERIES + place); }
__device__ __forceinline__ int query_place(int turn) { return turn < QUERIES ? turn : turn - QUERIES; }

__device__ __forceinline__ Block* block_at(unsigned char* memory, int visit) {
  return reinterpret_cast<Block*>(memory + BLOCKS_AT) + visit % BLOCKS;
}

// Where one lane's octet of a tile lies: in a page map or, `own`, in a step map.
struct Place {
  bool own;
  int y, w;
};

__device__ __forceinline__ void load_tile(const TensorMap* pages, const TensorMap* step, u32 shared, Ring<SLOTS>& ring,
                                          const Place& place) {
  const Stages<SLOTS> barriers = tile_barriers(shared);
  barriers.wait_empty(ring);
  const u32 barrier = barriers.full(ring.place);
  const int lane = threadIdx.x % 32;
  if (lane == 0) mbarrier_expect(barrier, TILE_BYTES);
  __syncwarp();
  if (lane < OCTETS)
    load_rows(place.own ? step : pages, shared + TILES_AT + ring.place * TILE_BYTES + lane * OCTET_BYTES, barrier,
              place.y, place.w);
  ring.advance();
}

// The loading warp, in the order of the consumers' turns: K a tile ahead of V, which may be the next block's.
__device__ __forceinline__ void produce(const Chunks& chunks, unsigned char* memory, const TensorMap* q,
                                        const TensorMap* page_k, const TensorMap* page_v, const TensorMap* step_k,
                                        const TensorMap* step_v, const int* table, long long table_stride,
                                        int entries) {
  const u32 shared = shared_address(memory);
  const int lane = threadIdx.x % 32, blocks = chunks.block_ends[chunks.count - 1];
  Ring<SLOTS> ring;
  Ring<QUERIES> places;
  Ring<2 * QUERIES> queries;
  Place place = {}, before;
  for (int visit = 0, item = blockIdx.x;; visit++, item += chunks.ctas) {
    const bool more = item < blocks * chunks.kv_heads;
    Block block;
    block.tiles = 0;
    if (more) block = block_of(chunks, item, blocks);
    for (int tile = 0; tile < max(block.tiles, 1); tile++) {
      before = place;
      if (more) {
        const int octet = tile * OCTETS + lane;
        place.own = octet < block.own || block.oldest > block.newest;
        if (place.own) {
          place.y = block.key_row + block.end - 8 * (octet + 1), place.w = block.head;
        } else if (lane < OCTETS) {
          const int paged = max(block.newest - (octet - block.own), block.oldest);
          place.y = block.head * PAGE + paged * 8 % PAGE;
          place.w = table[block.slot * table_stride + paged * 8 / PAGE % entries];
        }
        load_tile(page_k, step_k, shared, ring, place);
      }
      if (visit > 0 || tile > 0) load_tile(page_v, step_v, shared, ring, before);
      for (int warpgroup = 0; tile == 0 && warpgroup < 2; warpgroup++, places.advance(), queries.advance()) {
        const u32 barrier = query_barrier(shared, queries.place);
        mbarrier_wait(used(shared, places.place), places.parity ^ 1);
        if (lane == 0) {
          if (warpgroup == 0) *block_at(memory, visit) = block;
          if (more) {
            mbarrier_expect(barrier, QUERY_BYTES);
            for (int part = 0; part < 4; part++)
              load_own_box(q, shared + places.place * QUERY_BYTES + part * QUERY_BLOCK_BYTES, barrier, part * 64,
                           block.head * chunks.group, block.row + block.first + warpgroup * (ROWS / chunks.group));
          } else {
            mbarrier_arrive(barrier);
          }
        }
        __syncwarp();
      }
    }
    if (!more) return;
  }
}

// Scores of a tile; s is overwritten.
__device__ __forceinline__ void issue_scores(float (&s)[KEYS / 2], u32 queries, u32 keys) {
  const u64 q = descriptor(of_warp(queries), 16), k = descriptor(of_warp(keys), 16, OCTET_BYTES);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < WIDTH / 16; step++)
    multiply_rows(s, q + (step / 4 * QUERY_BLOCK_BYTES + step % 4 * 32) / 16,
                  k + (step / 4 * GROUP_BYTES + step % 4 * 32) / 16, step > 0);
  wgmma_commit();
}

__device__ __forceinline__ void issue_values(float (&o)[128], const u32 (&weights)[KEYS / 4], u32 values) {
  const u64 v = descriptor(of_warp(values), GROUP_BYTES, OCTET_BYTES);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < KEYS / 16; step++) multiply_columns(o, weights + 4 * step, v + step * 2 * OCTET_BYTES / 16);
  wgmma_commit();
}

// Rows of V that nobody has written may hold NaN, which a weight of zero does not cancel; so may octets past the last.
__device__ __forceinline__ void clear_unwritten(const Block& block, int tile, u32 values, int window, int barrier) {
  const int first = tile * OCTETS;
  const int written = max(block.start - window + 1, 0);  // the oldest position that pages must still hold
  for (int i = threadIdx.x % 128; i < KEYS * 2; i += 128) {
    const int row = i / 2, octet = first + row / 8, position = position_of(block, octet) + row % 8;
    if (octet < block.own ? position >= block.written
                          : octet < block.octets && position >= written && position < block.start)
      continue;
    const u32 at = values + row / 8 * OCTET_BYTES + i % 2 * 2 * GROUP_BYTES + row % 8 * 128;
#pragma unroll
    for (int piece = 0; piece < 16; piece++)
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at + piece / 8 * GROUP_BYTES + piece % 8 * 16),
                   "r"(0)
                   : "memory");
  }
  fence_async_proxy();
  barrier_sync(barrier, 128);
}

// Of one thread: of two rows their running maxima in base 2, sums, and what the last tile made of the sums
// before it.
struct Rows {
  float first_maximum, second_maximum, first_sum, second_sum, first_decay, second_decay;
};

__device__ __forceinline__ void mask_scores(float (&s)[KEYS / 2], const Block& block, int tile, int window,
                                            int first_at, int second_at) {
#pragma unroll
  for (int octet = 0; octet < OCTETS; octet++) {
    const int number = tile * OCTETS + octet, key = position_of(block, number) + threadIdx.x % 4 * 2;
    const int low = number < block.own ? block.written : 0, high = number < block.own ? 0x7FFFFFFF : block.start - 1;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int at = i < 2 ? first_at : second_at, position = key + i % 2;
      if (position > min(at, high) || position < max(at - window + 1, low)) s[octet * 4 + i] = NO_KEY;
    }
  }
}

// Scores -> weights, and the rows' state after this tile.
__device__ __forceinline__ void weigh(float (&s)[KEYS / 2], Rows& rows) {
  float first = s[0], second = s[2];
#pragma unroll
  for (int i = 0; i < KEYS / 2; i += 4) {
    first = fmaxf(first, fmaxf(s[i], s[i + 1]));
    second = fmaxf(second, fmaxf(s[i + 2], s[i + 3]));
  }
  first = fmaxf(rows.first_maximum, quad_maximum(first) * LOG2_E);
  second = fmaxf(rows.second_maximum, quad_maximum(second) * LOG2_E);
  const float first_base = first == NO_KEY ? 0.0f : first;  // a row that has seen no key yet
  const float second_base = second == NO_KEY ? 0.0f : second;
  rows.first_decay = power_of_two(rows.first_maximum - first_base);
  rows.second_decay = power_of_two(rows.second_maximum - second_base);
  rows.first_maximum = first, rows.second_maximum = second;
  rows.first_sum *= rows.first_decay, rows.second_sum *= rows.second_decay;
  float sums[4] = {rows.first_sum, 0.0f, rows.second_sum, 0.0f};
  const auto add = [&](int from) {
#pragma unroll
    for (int i = from; i < from + 4; i++) sums[i % 4] += s[i];
  };
#pragma unroll
  for (int i = 0; i < KEYS / 2; i += 4) {
    s[i] = power_of_two(fmaf(s[i], LOG2_E, -first_base));
    s[i + 1] = power_of_two(fmaf(s[i + 1], LOG2_E, -first_base));
    s[i + 2] = power_of_two(fmaf(s[i + 2], LOG2_E, -second_base));
    s[i + 3] = power_of_two(fmaf(s[i + 3], LOG2_E, -second_base));
    if (i >= 8) add(i - 8);  // behind the exponentials, which take long
  }
  add(KEYS / 2 - 8), add(KEYS / 2 - 4);
  rows.first_sum = sums[0] + sums[1], rows.second_sum = sums[2] + sums[3];
}

__device__ __forceinline__ void pack_weights(u32 (&weights)[KEYS / 4], const float (&s)[KEYS / 2]) {
#pragma unroll
  for (int i = 0; i < KEYS / 2; i += 2) weights[i / 2] = bf16_pair(s[i], s[i + 1]);
}

__device__ __forceinline__ void exchange(u32& low, u32& high, int distance) {
  const bool odd = threadIdx.x & distance;
  const u32 other = __shfl_xor_sync(0xFFFFFFFFu, odd ? low : high, distance);
  (odd ? low : high) = other;
}

// One row of 32 columns: a lane's pairs of four groups of 8 columns -> the 16 bytes of one group.
__device__ __forceinline__ void store_columns(unsigned short* to, u32 a, u32 b, u32 c, u32 d, bool wanted) {
  exchange(a, b, 1), exchange(c, d, 1);
  exchange(a, c, 2), exchange(b, d, 2);
  if (wanted) *reinterpret_cast<uint4*>(to + threadIdx.x % 4 * 8) = make_uint4(a, b, c, d);
}

// `row`: of the block's, of this thread's first value; the other is 8 further.
__device__ __forceinline__ void store_output(const float (&o)[128], float first_sum, float second_sum,
                                             const Block& block, const Chunks& chunks, int row,
                                             unsigned short* output) {
  const float first_inverse = 1.0f / quad_sum(first_sum), second_inverse = 1.0f / quad_sum(second_sum);
  const int first = block.first + row / chunks.group, second = block.first + (row + 8) / chunks.group;
  const int length = block.length, heads = chunks.kv_heads * chunks.group, head = block.head * chunks.group;
  unsigned short* first_to =
      output + ((long long)(block.row + first) * heads + head + row % chunks.group) * WIDTH;
  unsigned short* second_to =
      output + ((long long)(block.row + second) * heads + head + (row + 8) % chunks.group) * WIDTH;
#pragma unroll
  for (int i = 0; i < 128; i += 16) {
    u32 a[4], b[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
      a[k] = bf16_pair(o[i + 4 * k] * first_inverse, o[i + 4 * k + 1] * first_inverse);
      b[k] = bf16_pair(o[i + 4 * k + 2] * second_inverse, o[i + 4 * k + 3] * second_inverse);
    }
    store_columns(first_to + 2 * i, a[0], a[1], a[2], a[3], first < length);
    store_columns(second_to + 2 * i, b[0], b[1], b[2], b[3], second < length);
  }
}

__device__ __forceinline__ void consume(const Chunks& chunks, unsigned char* memory, unsigned short* output) {
  const u32 shared = shared_address(memory);
  const int warpgroup = threadIdx.x / 128, window = chunks.window;
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;  // of the block's; and row + 8
  const Stages<SLOTS> barriers = tile_barriers(shared);
  Ring<SLOTS> ring;
  Ring<2 * QUERIES> queries(warpgroup);
  float s[KEYS / 2], o[128];
  u32 weights[KEYS / 4];
  Rows rows;
  int visit = 0, tile = 0;
  const auto weigh_tile = [&](bool whole) {
    if (!whole) {
      const Block& block = *block_at(memory, visit);
      const int at = block.start + block.first;
      mask_scores(s, block, tile, window, at + row / chunks.group, at + (row + 8) / chunks.group);
    }
    weigh(s, rows);
  };
  if (warpgroup == 1) barrier_arrive(TURN, 256);
  rows.first_maximum = rows.second_maximum = NO_KEY;
  rows.first_sum = rows.second_sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 128; i++) o[i] = 0.0f;
  mbarrier_wait(query_barrier(shared, queries.place), queries.parity);
  int tiles = block_at(memory, 0)->tiles;
  if (tiles == 0) return;
  bool whole = is_whole(*block_at(memory, 0), 0);
  barriers.wait_full(ring);
  issue_scores(s, shared + query_place(queries.place) * QUERY_BYTES, shared + TILES_AT + ring.place * TILE_BYTES);
  wgmma_wait<0>();
  pin(s);
  release(barriers.empty(ring.place));
  if (tiles == 1) release(used(shared, query_place(queries.place)));
  ring.advance();
  weigh_tile(whole);
  pack_weights(weights, s);

  for (;;) {
    const bool last = tile + 1 == tiles;
    if (last) {
      queries.advance(2);
      mbarrier_wait(query_barrier(shared, queries.place), queries.parity);
      tiles = block_at(memory, visit + 1)->tiles;
    }
    const bool more = tiles > 0;
    const int keys_at = ring.place;
    if (more) {
      barriers.wait_full(ring);
      ring.advance();
    }
    barrier_sync(TURN + warpgroup, 256);
    // After the last block these are scores of nothing, which nobody uses.
    issue_scores(s, shared + query_place(queries.place) * QUERY_BYTES, shared + TILES_AT + keys_at * TILE_BYTES);
    if (__any_sync(0xFFFFFFFFu, rows.first_decay != 1.0f || rows.second_decay != 1.0f)) {
#pragma unroll
      for (int i = 0; i < 128; i += 4) {
        o[i] *= rows.first_decay, o[i + 1] *= rows.first_decay;
        o[i + 2] *= rows.second_decay, o[i + 3] *= rows.second_decay;
      }
    }
    const u32 values = shared + TILES_AT + ring.place * TILE_BYTES, values_empty = barriers.empty(ring.place);
    barriers.wait_full(ring);
    ring.advance();
    if (!whole) clear_unwritten(*block_at(memory, visit), tile, values, window, OWN + warpgroup);
    issue_values(o, weights, values);
    barrier_arrive(TURN + (warpgroup ^ 1), 256);

    const float first_sum = rows.first_sum, second_sum = rows.second_sum;
    tile++;
    if (last) {
      visit++, tile = 0;
      rows.first_maximum = rows.second_maximum = NO_KEY;
      rows.first_sum = rows.second_sum = 0.0f;
    }
    whole = is_whole(*block_at(memory, visit), tile);
    wgmma_wait<1>();
    pin(s);
    if (more) release(barriers.empty(keys_at));
    if (tile + 1 == tiles) release(used(shared, query_place(queries.place)));
    weigh_tile(whole);
    done_before(rows.first_sum + rows.second_sum);
    wgmma_wait<0>();
    pin(o);
    release(values_empty);
    pack_weights(weights, s);
    if (last) {
      store_output(o, first_sum, second_sum, *block_at(memory, visit - 1), chunks, row, output);
      if (!more) return;
#pragma unroll
      for (int i = 0; i < 128; i++) o[i] = 0.0f;
    }
  }
}

extern "C" __global__ void __launch_bounds__(384, 1) sliding_chunk(
    const __grid_constant__ TensorMap q,       // [T, kv_heads * group, 256]
    const __grid_constant__ TensorMap page_k,  // [pages, 4, kv_heads * 32, 64]: K of one layer, columns in four parts
    const __grid_constant__ TensorMap page_v,
    const __grid_constant__ TensorMap step_k,  // [kv_heads, 4, T, 64]
    const __grid_constant__ TensorMap step_v,
    unsigned short* output,    // bf16, like q
    const int* chunk_rows,     // [chunks] row of T of each chunk's first token
    const int* chunk_starts,   // [chunks] its position
    const int* chunk_lengths,  // [chunks]
    const int* chunk_slots,    // [chunks]
    const int* block_ends,     // [chunks] running sum of blocks of 128 / group tokens
    const int* table,          // of each slot: page of positions 32 l at l % entries
    long long table_stride, int entries, int chunks, int kv_heads, int group, int window, int older,
    const int* decodes, int most_decodes) {  // positions of requests that decode, -1 behind them
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 shared = shared_address(memory);
  Chunks described = {chunk_rows, chunk_starts, chunk_lengths, chunk_slots, block_ends,
                      chunks,     kv_heads,     group,         window,      older};
  if (threadIdx.x == 0) {
    check_memory(shared);
    tile_barriers(shared).init(1, 8);
    for (int turn = 0; turn < 2 * QUERIES; turn++) mbarrier_init(query_barrier(shared, turn), 1);
    for (int place = 0; place < QUERIES; place++) mbarrier_init(used(shared, place), 4);
    mbarrier_init_fence();
  }
  const int decoding = __syncthreads_count(threadIdx.x < most_decodes && decodes[threadIdx.x] >= 0);
  wait_for_prerequisites();
  launch_dependents();
  described.ctas = staying(described, decoding);
  if (blockIdx.x >= described.ctas) return;
  if (threadIdx.x >= 256) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    if (threadIdx.x < 288)
      produce(described, memory, &q, &page_k, &page_v, &step_k, &step_v, table, table_stride, entries);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    consume(described, memory, output);
  }
}
