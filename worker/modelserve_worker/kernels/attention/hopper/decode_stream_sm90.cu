// Decode attention of many rows whose K and V are stored, for compute capability 9.0 (Hopper).
//
// A thread block goes from one row and KV head to the next, of global layers from one split of a row's keys. One warp
// keeps tiles of K and of V on their way, those of what is next while this one ends; each of the others has 16 keys of
// every tile, its own maxima and its own outputs of all columns, and meets the others once, where they are merged. Keys
// are the left operand of m16n8k16 products, the queries of the KV head, at most eight, the right one.
//
// Rows of sliding layers, and short ones of global layers, are not split, and are outputs at once; `combine` of
// `decode_attention_triton` merges splits. Either way they follow from a row's position and the size of the launch.
//
// Whoever compiles defines WIDTH, columns of a head, WINDOW, keys that a row sees, 0 in global layers, WARPS, that
// multiply, and STAGES of a tile of K or V.

#include "decode_items.cuh"

constexpr int PAGE = WINDOW ? 32 : 64;                   // keys
constexpr int ENTRIES = (WINDOW - 2 + PAGE) / PAGE + 1;  // of a sliding block table, which pages go round
constexpr int HEADS = 8;                                 // queries of a KV head at most
constexpr int STEPS = WIDTH / 16;                        // of 16 columns
constexpr int OCTETS = 2 * WARPS;                        // of 8 keys: a tile
constexpr int GROUP_BYTES = 8 * 64 * 2;
constexpr int OCTET_BYTES = WIDTH / 64 * GROUP_BYTES;
constexpr int TILE_BYTES = OCTETS * OCTET_BYTES;
constexpr int SPACING = WIDTH + 4;  // numbers from a query's sums to the next one's: they meet in no bank
constexpr int SUMS_AT = STAGES * TILE_BYTES;  // float [WARPS][HEADS][SPACING]
constexpr int MAXIMA_AT = SUMS_AT + WARPS * HEADS * SPACING * 4;  // float [WARPS][HEADS], and totals likewise
constexpr int ITEMS_AT = MAXIMA_AT + 2 * WARPS * HEADS * 4;  // of each stage that is the first of an item
constexpr int BARRIERS_AT = ITEMS_AT + STAGES * sizeof(Item);

static_assert(BARRIERS_AT + Stages<STAGES>::BYTES == SHARED_BYTES, "");
static_assert(STAGES >= 3 && OCTETS <= 32, "");

enum Barrier { MET = 1 };  // 0 is __syncthreads

// The keys of an item: positions [first, last], and the octets that they are in.
struct Keys {
  int first, last, first_octet, octets;
  __device__ __forceinline__ Keys(const Item& item, const Splitting& splitting) {
    const int split = WINDOW ? 0 : splitting.keys_of(item.position);
    first = WINDOW ? max(item.position - WINDOW + 1, 0) : item.split * split;
    last = WINDOW ? item.position : min(item.position, first + split - 1);
    first_octet = first / 8, octets = last / 8 - first_octet + 1;
  }
};

// Where 8 of the columns of a row of a tile lie.
__device__ __forceinline__ int place(int row, int eighth) {
  return row / 8 * OCTET_BYTES + eighth / 8 * GROUP_BYTES + piece(row % 8, eighth % 8);
}

// A warp: asks for the octets of a tile, one a lane, when its stage is free.
__device__ __forceinline__ void load_tile(const TensorMap* map, u32 shared, const Stages<STAGES>& barriers,
                                          Ring<STAGES>& ring, int octets, int row, int page) {
  const int lane = threadIdx.x % 32;
  const u32 full = barriers.full(ring.place);
  barriers.wait_empty(ring);
  if (lane == 0) mbarrier_expect(full, octets * OCTET_BYTES);
  __syncwarp();
  if (lane < octets) load_rows(map, shared + ring.place * TILE_BYTES + lane * OCTET_BYTES, full, row, page);
  __syncwarp();
  ring.advance();
}

// Scores in base 2 of keys lane / 4 and lane / 4 + 8 of a warp's 16, each with queries lane % 4 * 2 and the one after.
__device__ __forceinline__ void score(float (&scores)[4], const u32 (&queries)[2 * STEPS], u32 tile) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float sums[4][4];  // four independent chains of products
#pragma unroll
  for (int i = 0; i < 16; i++) sums[i / 4][i % 4] = 0.0f;
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
    u32 keys[4];
    load_matrices(keys, tile + place(16 * warp + lane % 16, 2 * step + lane / 16));
    multiply(sums[step % 4], keys, queries[2 * step], queries[2 * step + 1]);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) scores[i] = (sums[0][i] + sums[1][i] + (sums[2][i] + sums[3][i])) * LOG2_E;
}

// Scores -> weights, bfloat16, as the right operand; maxima, totals and outputs of the keys before follow.
__device__ __forceinline__ void weigh(u32 (&weights)[2], const float (&scores)[4], float (&high)[2], float (&total)[2],
                                      float (&o)[STEPS][4]) {
  float decay[2], near[2], far[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float highest = fmaxf(scores[i], scores[2 + i]);
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2)
      highest = fmaxf(highest, __shfl_xor_sync(0xFFFFFFFFu, highest, distance));
    highest = fmaxf(highest, high[i]);
    decay[i] = power_of_two(high[i] - highest);
    near[i] = power_of_two(scores[i] - highest), far[i] = power_of_two(scores[2 + i] - highest);
    high[i] = highest, total[i] = total[i] * decay[i] + near[i] + far[i];
  }
  weights[0] = transposed(bf16_pair(near[0], near[1])), weights[1] = transposed(bf16_pair(far[0], far[1]));
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
    o[step][0] *= decay[0], o[step][2] *= decay[0];
    o[step][1] *= decay[1], o[step][3] *= decay[1];
  }
}

// Columns lane / 4 and lane / 4 + 8 of every 16 of the weighed values of a warp's 16 keys. `seen`: bits of keys
// lane % 4 * 2 and the one after, and of both 8 further: rows that nobody has written may hold NaN, which a weight of
// zero does not cancel.
__device__ __forceinline__ void sum_values(float (&o)[STEPS][4], const u32 (&weights)[2], u32 tile,
                                           const u32 (&seen)[2]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
    u32 values[4];
    load_transposed(values, tile + place(16 * warp + lane % 8 + lane / 16 * 8, 2 * step + lane / 8 % 2));
#pragma unroll
    for (int i = 0; i < 4; i++) values[i] &= seen[i / 2];
    multiply(o[step], values, weights[0], weights[1]);
  }
}

// Where those of an item are.
struct Results {
  unsigned short* output;  // of a row that is not split; else null
  float *partial, *maxima, *totals;
};

// What the warps have summed of an item -> its results.
__device__ __forceinline__ void merge(unsigned char* memory, const float (&high)[2], const float (&total)[2],
                                      const float (&o)[STEPS][4], int group, const Results& results) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float* sums = (float*)(memory + SUMS_AT);
  float* maxima = (float*)(memory + MAXIMA_AT);
  float* totals = maxima + WARPS * HEADS;
  barrier_sync(MET, WARPS * 32);  // all have read those of the last item
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float whole = total[i];
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) whole += __shfl_xor_sync(0xFFFFFFFFu, whole, distance);
    const int query = lane % 4 * 2 + i;
    if (lane < 4) maxima[warp * HEADS + query] = high[i], totals[warp * HEADS + query] = whole;
    float* to = sums + (warp * HEADS + query) * SPACING + lane / 4;
    if (query < group)
#pragma unroll
      for (int step = 0; step < STEPS; step++) to[16 * step] = o[step][i], to[16 * step + 8] = o[step][2 + i];
  }
  barrier_sync(MET, WARPS * 32);
  for (int query = 0; query < group; query++) {
    float highest = NO_KEY, whole = 0.0f, weights[WARPS];
#pragma unroll
    for (int other = 0; other < WARPS; other++) highest = fmaxf(highest, maxima[other * HEADS + query]);
#pragma unroll
    for (int other = 0; other < WARPS; other++) {
      weights[other] = power_of_two(maxima[other * HEADS + query] - highest);
      whole += weights[other] * totals[other * HEADS + query];
    }
    for (int pair = threadIdx.x; pair < WIDTH / 2; pair += WARPS * 32) {
      float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
      for (int other = 0; other < WARPS; other++) {
        const float2 part = *(const float2*)(sums + (other * HEADS + query) * SPACING + 2 * pair);
        sum.x += weights[other] * part.x, sum.y += weights[other] * part.y;
      }
      const int at = query * WIDTH + 2 * pair;
      if (WINDOW || results.output)
        *(u32*)(results.output + at) = bf16_pair(sum.x / whole, sum.y / whole);
      else
        *(float2*)(results.partial + at) = sum;
    }
    if (!WINDOW && !results.output && threadIdx.x == 0)
      results.maxima[query] = highest, results.totals[query] = whole;
  }
}

extern "C" __global__ void __launch_bounds__((WARPS + 1) * 32) decode_stream(
    const __grid_constant__ TensorMap page_k,  // [pages, WIDTH / 64, kv_heads * PAGE, 64]: K of one layer
    const __grid_constant__ TensorMap page_v,
    const unsigned short* q,  // bf16 [rows, kv_heads * group, WIDTH]
    unsigned short* output,   // likewise
    float* partial,  // [rows, most_splits, kv_heads, group, WIDTH], of rows that are split
    float* maxima,   // [rows, most_splits, kv_heads, group], of scores times log2(e)
    float* totals,   // likewise
    const int* slots,                          // [rows]
    const int* positions,                      // [rows]; -1: padding, whose output stays as it is
    const int* table, long long table_stride,  // page of each slot and PAGE positions; sliding ones go round
    int page_origin, int page_step,            // page p is at page_origin + page_step * p of both maps
    int rows, int kv_heads, int group, int most_splits, int split_pages,
    int settled,   // whether all keys but a row's own were stored by earlier steps
    int beside) {  // the kernel of the step's chunks
  extern __shared__ __align__(1024) unsigned char memory[];
  launch_dependents();
  const u32 shared = shared_address(memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Stages<STAGES> barriers = {shared + BARRIERS_AT};
  const bool waits = !beside || blockIdx.x == gridDim.x - 1;
  if (threadIdx.x == 0) {
    check_memory(shared);
    prefetch_map(&page_k), prefetch_map(&page_v);
    barriers.init(1, WARPS);
    mbarrier_init_fence();
  }
  __syncthreads();
  const Splitting splitting = {WINDOW ? 0 : PAGE, most_splits, split_pages};
  Item* items = (Item*)(memory + ITEMS_AT);
  Ring<STAGES> ring;
  if (warp == WARPS) {
    // Keys of earlier steps are read before the kernel ahead has ended, as `sliding_decode` does; a row's own, which
    // `prepare` stores, are in its last octet.
    bool waiting = waits;
    if (waiting && !settled) wait_for_prerequisites(), waiting = false;
    Items dealt(positions, rows, kv_heads, splitting);
    for (int number = blockIdx.x;; number += gridDim.x) {
      const Item item = dealt.at(number);
      barriers.wait_empty(ring);
      if (lane == 0) items[ring.place] = item;
      if (item.row < 0) break;
      const Keys keys(item, splitting);
      const int* pages = table + slots[item.row] * table_stride;
      for (int begin = 0; begin < keys.octets; begin += OCTETS) {
        const int count = min(OCTETS, keys.octets - begin), octet = keys.first_octet + begin + min(lane, count - 1);
        const int entry = octet * 8 / PAGE, page = page_origin + page_step * pages[WINDOW ? entry % ENTRIES : entry];
        const int at = item.head * PAGE + octet * 8 % PAGE;
        if (waiting && keys.last == item.position && begin + OCTETS >= keys.octets)
          wait_for_prerequisites(), waiting = false;
        load_tile(&page_k, shared, barriers, ring, count, at, page);
        load_tile(&page_v, shared, barriers, ring, count, at, page);
      }
    }
    if (lane == 0) mbarrier_expect(barriers.full(ring.place), 0);
    if (waiting) wait_for_prerequisites();
    return;
  }

  if (waits) wait_for_prerequisites();
  Held held;
  for (;;) {
    barriers.wait_full(ring);
    const Item item = items[ring.place];
    if (item.row < 0) break;
    const Keys keys(item, splitting);
    const long long first_query = ((long long)item.row * kv_heads + item.head) * group;
    const int query = lane / 4;
    u32 queries[2 * STEPS];
    const unsigned short* of_query = q + (first_query + query) * WIDTH;
#pragma unroll
    for (int i = 0; i < 2 * STEPS; i++)
      queries[i] = query < group ? __ldcg((const u32*)(of_query + 8 * i) + lane % 4) : 0;
    float o[STEPS][4], high[2] = {NO_KEY, NO_KEY}, total[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 4 * STEPS; i++) o[i / 4][i % 4] = 0.0f;
    for (int begin = 0; begin < keys.octets; begin += OCTETS) {
      const int own = (keys.first_octet + begin) * 8 + 16 * warp;  // position of the warp's first key
      const bool some = own <= keys.last && own + 16 > keys.first;
      u32 weights[2];
      barriers.wait_full(ring);
      held.exchange(barriers.empty(ring.place));
      if (some) {
        float scores[4];
        score(scores, queries, shared + ring.place * TILE_BYTES);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int key = own + lane / 4 + i / 2 * 8;
          if (key < keys.first || key > keys.last) scores[i] = NO_KEY;
        }
        weigh(weights, scores, high, total, o);
      }
      ring.advance();
      barriers.wait_full(ring);
      held.exchange(barriers.empty(ring.place));
      if (some) {
        u32 seen[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int key = own + lane % 4 * 2 + 8 * i;
          seen[i] = (key >= keys.first && key <= keys.last ? 0xFFFFu : 0u) |
                    (key + 1 >= keys.first && key + 1 <= keys.last ? 0xFFFF0000u : 0u);
        }
        sum_values(o, weights, shared + ring.place * TILE_BYTES, seen);
      }
      ring.advance();
    }
    const long long split = (((long long)item.row * most_splits + item.split) * kv_heads + item.head) * group;
    const bool alone = WINDOW || splitting.count(item.position) == 1;
    const Results results = {alone ? output + first_query * WIDTH : nullptr, partial + split * WIDTH, maxima + split,
                             totals + split};
    merge(memory, high, total, o, group, results);
  }
}
