// Decode attention of sliding layers for few rows, head dim 256, for compute capability 9.0 (Hopper), in one launch.
//
// A cluster of PARTS thread blocks is one row and KV head. Each block takes an equal share of the row's keys and asks for
// all their K and V at once, so that memory is busy from the first moment. The keys are the left operand of m16n8k16
// products, the queries of the KV head, at most eight, the right one: nothing is padded but queries, and products stay far
// below the time of the bytes. Then each block sends every other the columns of its sums that the other makes whole,
// with their maxima, and adds what it is sent in the order of the keys: no atomics.
//
// How a row's keys are divided depends on its position alone, so its bits do not depend on the batch beside it.
//
// Whoever compiles defines WINDOW: keys that a row sees, at most 128 for each block.

#include "pipeline.cuh"

constexpr int PARTS = 8;
constexpr int WIDTH = 256;
constexpr int PAGE = 32;                                             // keys
constexpr int ENTRIES = (WINDOW - 2 + PAGE) / PAGE + 1;              // of a block table, which pages go round
constexpr int KEYS = (WINDOW + 16 * PARTS - 1) / (16 * PARTS) * 16;  // of a share at most
constexpr int WARPS = 8;
constexpr int THREADS = WARPS * 32;
constexpr int HEADS = 8;                // queries of a KV head at most
constexpr int COLUMNS = WIDTH / PARTS;  // of the output, that a block makes whole
constexpr int TILES = KEYS / 16;        // a warp scores one
constexpr int OCTETS = KEYS / 8 + 1;    // of 8 rows: a share may begin inside of one
constexpr int GROUP_BYTES = 8 * 64 * 2;
constexpr int OCTET_BYTES = 4 * GROUP_BYTES;
constexpr int QUERY_BYTES = WIDTH * 2 + 16;  // of a row: with 16 bytes more, eight rows meet in no bank
constexpr int WEIGHT_BYTES = KEYS * 2 + 16;  // likewise, of a query
constexpr int VALUES_AT = OCTETS * OCTET_BYTES;
constexpr int QUERIES_AT = 2 * VALUES_AT;
constexpr int WEIGHTS_AT = QUERIES_AT + HEADS * QUERY_BYTES;
constexpr int TILES_AT = WEIGHTS_AT + HEADS * WEIGHT_BYTES;  // maxima and sums of this block's tiles
constexpr int PARTS_AT = TILES_AT + 2 * WARPS * HEADS * 4;   // pairs of them, of all blocks
constexpr int SUMS_AT = PARTS_AT + PARTS * HEADS * 8;        // and this block's columns of their outputs
constexpr int BARRIERS_AT = SUMS_AT + PARTS * HEADS * COLUMNS * 4;

// Each is used once: K has come, V has come, all parts have come.
enum Barrier { FULL_K, FULL_V, WHOLE, BARRIERS };

static_assert(BARRIERS_AT + BARRIERS * 8 == SHARED_BYTES, "");
static_assert(TILES <= WARPS && OCTETS <= 32 && PARTS * HEADS <= THREADS && HEADS * COLUMNS <= THREADS, "");

__device__ __forceinline__ u32 barrier_at(u32 shared, Barrier which) { return shared + BARRIERS_AT + which * 8; }

// The keys of a block: positions [first, first + count).
struct Share {
  int first, count;
  int parts;  // blocks that have keys
};

__device__ __forceinline__ Share share_of(int position, int rank) {
  const int keys = min(position + 1, WINDOW);
  const int most = ((keys + PARTS - 1) / PARTS + 15) / 16 * 16;
  Share share;
  share.parts = 0;
#pragma unroll
  for (int part = 0; part < PARTS; part++) share.parts += part * most < keys;
  share.first = position + 1 - keys + rank * most;
  share.count = max(min(most, position + 1 - share.first), 0);
  return share;
}

// Where 8 of the 256 columns of a row lie; rows are counted from the first octet's first.
__device__ __forceinline__ int place(int row, int eighth) {
  return row / 8 * OCTET_BYTES + eighth / 8 * GROUP_BYTES + piece(row % 8, eighth % 8);
}

// The first warp asks for all octets in which the share has keys, K before V.
__device__ __forceinline__ void load_share(const TensorMap* page_k, const TensorMap* page_v, u32 shared,
                                           const Share& share, const int* pages, int head) {
  const int lane = threadIdx.x % 32, octet = share.first / 8 + lane;
  const int octets = (share.first + share.count - 1) / 8 - share.first / 8 + 1;
  const u32 full_k = barrier_at(shared, FULL_K), full_v = barrier_at(shared, FULL_V);
  if (lane == 0) {
    mbarrier_expect(full_k, octets * OCTET_BYTES);
    mbarrier_expect(full_v, octets * OCTET_BYTES);
  }
  __syncwarp();
  if (lane < octets) {
    const int page = pages[octet * 8 / PAGE % ENTRIES], row = head * PAGE + octet * 8 % PAGE;
    load_rows(page_k, shared + lane * OCTET_BYTES, full_k, row, page);
    load_rows(page_v, shared + VALUES_AT + lane * OCTET_BYTES, full_v, row, page);
  }
  __syncwarp();
}

// Of tile `warp`: scores in base 2 of keys lane / 4 and lane / 4 + 8, each with queries lane % 4 * 2 and the one after.
__device__ __forceinline__ void score(float (&scores)[4], u32 shared, int shift, int count) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float sums[4][4];  // four independent chains of products
#pragma unroll
  for (int i = 0; i < 16; i++) sums[i / 4][i % 4] = 0.0f;
#pragma unroll
  for (int step = 0; step < WIDTH / 16; step += 2) {
    u32 queries[4];
    load_matrices(queries, shared + QUERIES_AT + lane % 8 * QUERY_BYTES + (2 * step + lane / 8) * 16);
#pragma unroll
    for (int each = 0; each < 2; each++) {
      u32 keys[4];
      load_matrices(keys, shared + place(shift + 16 * warp + lane % 16, 2 * (step + each) + lane / 16));
      multiply(sums[(step + each) % 4], keys, queries[2 * each], queries[2 * each + 1]);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const bool seen = 16 * warp + lane / 4 + i / 2 * 8 < count;
    scores[i] = seen ? (sums[0][i] + sums[1][i] + (sums[2][i] + sums[3][i])) * LOG2_E : NO_KEY;
  }
}

// Maximum over all tiles of this block.
__device__ __forceinline__ float highest(const float* maxima, int query, int tiles) {
  float high = NO_KEY;
#pragma unroll
  for (int tile = 0; tile < TILES; tile++)
    if (tile < tiles) high = fmaxf(high, maxima[tile * HEADS + query]);
  return high;
}

// Scores -> weights in shared memory, and their sum over the tile.
__device__ __forceinline__ void weigh(const float (&scores)[4], unsigned char* memory, int tiles) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = lane % 4 * 2;
  const float* maxima = (const float*)(memory + TILES_AT);
  float* totals = (float*)(memory + TILES_AT) + WARPS * HEADS;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const float high = highest(maxima, first + i, tiles);
    const float near = power_of_two(scores[i] - high), far = power_of_two(scores[2 + i] - high);
    unsigned short* to = (unsigned short*)(memory + WEIGHTS_AT + (first + i) * WEIGHT_BYTES) + 16 * warp + lane / 4;
    to[0] = (unsigned short)bf16_pair(near, 0.0f);
    to[8] = (unsigned short)bf16_pair(far, 0.0f);
    float total = near + far;
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) total += __shfl_xor_sync(0xFFFFFFFFu, total, distance);
    if (lane < 4) totals[warp * HEADS + first + i] = total;
  }
}

// The warp's 32 columns of the weighed values: tiles of 16 columns, over even and odd tiles of keys.
__device__ __forceinline__ void sum_values(float (&sums)[2][2][4], u32 shared, int shift, int tiles) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int tile = 0; tile < TILES; tile += 2) {
    if (tile >= tiles) break;
    u32 weights[4];
    load_matrices(weights, shared + WEIGHTS_AT + lane % 8 * WEIGHT_BYTES + (2 * tile + lane / 8) * 16);
#pragma unroll
    for (int each = 0; each < 2; each++) {
      if (tile + each >= tiles) break;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        u32 values[4];
        const int row = shift + 16 * (tile + each) + lane % 8 + lane / 16 * 8;
        load_transposed(values, shared + VALUES_AT + place(row, 4 * warp + 2 * half + lane / 8 % 2));
        multiply(sums[half][each], values, weights[2 * each], weights[2 * each + 1]);
      }
    }
  }
}

extern "C" __global__ void __cluster_dims__(PARTS, 1, 1) __launch_bounds__(THREADS, 1) sliding_decode(
    const __grid_constant__ TensorMap page_k,  // [pages, 4, kv_heads * 32, 64]: K of one layer, columns in four parts
    const __grid_constant__ TensorMap page_v,
    const unsigned char* k_rows,  // bf16 [kv_heads, 32, 256] of page 0; page n is n * page_bytes further
    const unsigned char* v_rows, long long page_bytes,
    const unsigned short* q,  // bf16 [rows, kv_heads * group, 256]
    unsigned short* output,   // likewise
    const int* slots,         // [rows]
    const int* positions,     // [rows]; -1: padding, whose output stays as it is
    const int* table,         // of each slot: page of positions 32 l at l % entries
    long long table_stride, int group,
    int settled) {  // whether all keys but a row's own were stored by earlier steps
  extern __shared__ __align__(1024) unsigned char memory[];
  launch_dependents();
  const u32 shared = shared_address(memory), whole = barrier_at(shared, WHOLE);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = blockIdx.y, head = blockIdx.x / PARTS, rank = (int)cluster_rank();
  const int position = positions[row], slot = slots[row];
  if (threadIdx.x == 0) prefetch_map(&page_k), prefetch_map(&page_v);
  if (position < 0) {
    wait_for_prerequisites();
    return;
  }
  const Share share = share_of(position, rank);
  const bool some = share.count > 0, newest = some && share.first + share.count > position;
  const int* pages = table + slot * table_stride;
  // Keys of earlier steps are read before the kernel ahead has ended: the step's embedding waited for the steps before,
  // and of this step's kernels none that could still run writes them. `prepare` of this layer, or of the one whose cache
  // it shares, writes the row's own, which is therefore read once more below. Where this step has stored others, too
  // (those of a chunk, by `commit`), nothing may be read yet.
  if (!settled) wait_for_prerequisites();
  if (warp == 0) {
    if (lane == 0) {
      check_memory(shared);
      for (int i = 0; i < BARRIERS; i++) mbarrier_init(shared + BARRIERS_AT + i * 8, 1);
      mbarrier_init_fence();
    }
    __syncwarp();
    if (some) load_share(&page_k, &page_v, shared, share, pages, head);
    if (lane == 0) mbarrier_expect(whole, share.parts * (group + (group + 1) / 2 * COLUMNS) * 8);
    __syncwarp();
  }
  const int own_page = pages[position / PAGE % ENTRIES];
  cluster_arrive_begun();
  __syncthreads();
  wait_for_prerequisites();

  const int shift = share.first % 8, tiles = (share.count + 15) / 16;
  float* maxima = (float*)(memory + TILES_AT);
  float sums[2][2][4];
#pragma unroll
  for (int i = 0; i < 16; i++) sums[i / 8][i / 4 % 2][i % 4] = 0.0f;
  if (some) {
    // Past the first cache: it could hold what was at these addresses before.
    uint4 query = make_uint4(0, 0, 0, 0), own = query;
    if (warp < group)
      query = __ldcg((const uint4*)(q + ((long long)row * (gridDim.x / PARTS) * group + head * group + warp) * WIDTH) +
                     lane);
    if (newest && warp < 2)
      own = __ldcg((const uint4*)((warp == 0 ? k_rows : v_rows) + own_page * page_bytes +
                                  (head * PAGE + position % PAGE) * WIDTH * 2) +
                   lane);
    *(uint4*)(memory + QUERIES_AT + warp * QUERY_BYTES + lane * 16) = query;
    mbarrier_wait(barrier_at(shared, FULL_K), 0);
    if (newest && warp == 0) *(uint4*)(memory + place(shift + share.count - 1, lane)) = own;
    __syncthreads();
    float scores[4];
    if (warp < tiles) {
      score(scores, shared, shift, share.count);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float high = fmaxf(scores[i], scores[2 + i]);
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2)
          high = fmaxf(high, __shfl_xor_sync(0xFFFFFFFFu, high, distance));
        if (lane < 4) maxima[warp * HEADS + lane * 2 + i] = high;
      }
    }
    __syncthreads();
    if (warp < tiles) weigh(scores, memory, tiles);
    mbarrier_wait(barrier_at(shared, FULL_V), 0);
    if (newest && warp == 1) *(uint4*)(memory + VALUES_AT + place(shift + share.count - 1, lane)) = own;
    // Rows that nobody has written may hold NaN, which a weight of zero does not cancel.
    for (int key = share.count + warp; key < 16 * tiles; key += WARPS)
      *(uint4*)(memory + VALUES_AT + place(shift + key, lane)) = make_uint4(0, 0, 0, 0);
    __syncthreads();
    sum_values(sums, shared, shift, tiles);
  }

  cluster_wait();  // all blocks have begun, and may be sent to
  if (some) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int column = 32 * warp + lane / 4 + i * 8, pair = lane % 4, half = i / 2, at = i % 2 * 2;
      const u32 to = shared + SUMS_AT + ((rank * HEADS / 2 + pair) * COLUMNS + column % COLUMNS) * 8;
      if (2 * pair < group)
        send_pair(to, whole, column / COLUMNS, sums[half][0][at] + sums[half][1][at],
                  sums[half][0][at + 1] + sums[half][1][at + 1]);
    }
    const int query = threadIdx.x % HEADS, to = threadIdx.x / HEADS;
    if (to < PARTS && query < group) {
      float total = 0.0f;
#pragma unroll
      for (int tile = 0; tile < TILES; tile++)
        if (tile < tiles) total += maxima[(WARPS + tile) * HEADS + query];
      send_pair(shared + PARTS_AT + (rank * HEADS + query) * 8, whole, to, highest(maxima, query, tiles), total);
    }
  }
  const int query = threadIdx.x / COLUMNS, column = threadIdx.x % COLUMNS;
  mbarrier_wait_cluster(whole, 0);  // no block ends before all that is sent to it has come
  if (query >= group) return;
  const float2* parts = (const float2*)(memory + PARTS_AT) + query;  // a maximum and a sum
  const float* outputs = (const float*)(memory + SUMS_AT) + (query / 2 * COLUMNS + column) * 2 + query % 2;
  float high = NO_KEY, total = 0.0f, sum = 0.0f;
#pragma unroll
  for (int part = 0; part < PARTS; part++)
    if (part < share.parts) high = fmaxf(high, parts[part * HEADS].x);
#pragma unroll
  for (int part = 0; part < PARTS; part++)
    if (part < share.parts) {
      const float weight = power_of_two(parts[part * HEADS].x - high);
      total += weight * parts[part * HEADS].y;
      sum += weight * outputs[part * HEADS * COLUMNS];
    }
  const long long at = ((long long)row * (gridDim.x / PARTS) + head) * group + query;
  output[at * WIDTH + rank * COLUMNS + column] = (unsigned short)bf16_pair(sum / total, 0.0f);
}
