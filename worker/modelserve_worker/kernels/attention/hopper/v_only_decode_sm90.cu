// Decode attention of global layers that store V alone, head dim 512, for compute capability 9.0 (Hopper).
//
// A thread block is one split of a row's keys for one KV head, as in `decode_attention_triton`, whose `combine` merges
// the splits. One warp keeps tiles of 32 keys on their way; each of four others has a quarter of their columns. It
// multiplies these with the same columns of the queries, at most eight, adds the parts of the scores that the four have
// made, and multiplies the weights of all keys with its columns: every element is read from shared memory twice, and the
// warps meet once a tile. Keys are the left operand of m16n8k16 products: nothing is padded but queries.
//
// K is V but for the key norm's weight, which queries have in them, and for rotation, which turns 64 pairs of columns, 16
// of each warp. Fragments of 16 keys by the 16 first and by the 16 second columns have the same places: a thread makes
// both from both.

#include "decode_items.cuh"

constexpr int WIDTH = 512, PAGE = 64;  // columns of a head; keys
constexpr int PAIRS = 64;              // columns 384 to 447 are turned with 448 to 511; before them are the others
constexpr int KEYS = 32;               // of a tile
constexpr int STAGES = 3;
constexpr int WARPS = 4;               // that multiply
constexpr int HEADS = 8;               // queries of a KV head at most
constexpr int STEPS = WIDTH / WARPS / 16;       // of 16 columns of a warp, of which the last two are turned
constexpr int OWN_PAIRS = PAIRS / WARPS;
constexpr int BOX_BYTES = KEYS * 128;           // 64 columns of a tile
constexpr int TILE_BYTES = WIDTH / 64 * BOX_BYTES;
constexpr int SPACING = KEYS + 8;               // numbers from a query's scores to the next one's: they meet in few banks
constexpr int SCORES = WARPS * HEADS * SPACING;
constexpr int SCORES_AT = STAGES * TILE_BYTES;  // float [2][WARPS][HEADS][SPACING]: parts of the scores of two tiles
constexpr int TURNS_AT = SCORES_AT + 2 * SCORES * 4;  // float2 [PAGE / 16][PAIRS]: of every 16th key of a page
constexpr int ITEMS_AT = TURNS_AT + PAGE / 16 * PAIRS * 8;  // of each stage that is the first of an item
// Each warp's, where an item's results begin, or -1 - where its outputs do: registers are full.
constexpr int RESULTS_AT = ITEMS_AT + STAGES * sizeof(Item);
constexpr int BARRIERS_AT = RESULTS_AT + WARPS * 4;

static_assert(STAGES % 2 == 1, "");  // tiles take both halves of SCORES in turns
static_assert(BARRIERS_AT + Stages<STAGES>::BYTES == SHARED_BYTES, "");

enum Barrier { MET = 1 };  // 0 is __syncthreads

// Angle of two rotations after one another; x is the cosine.
__device__ __forceinline__ float2 added(float2 a, float2 b) {
  return make_float2(a.x * b.x - a.y * b.y, a.y * b.x + a.x * b.y);
}

// A warp's columns: of a step, the first.
__device__ __forceinline__ int column_of(int warp, int step) {
  return step < STEPS - 2 ? (STEPS - 2) * 16 * warp + 16 * step
                          : WIDTH - 2 * PAIRS + (step - (STEPS - 2)) * PAIRS + OWN_PAIRS * warp;
}

// Where sixteen columns are in the head's own order, as `natural_columns` of `decode_attention_triton`.
__device__ __forceinline__ int natural(int column) {
  constexpr int unrotated = WIDTH / 2 - PAIRS;
  if (column >= WIDTH - PAIRS) return column - unrotated;
  if (column >= 2 * unrotated) return column - 2 * unrotated;
  return column < unrotated ? column + PAIRS : column + 2 * PAIRS;
}

// Where 8 of a row's columns lie in a tile.
__device__ __forceinline__ int place(int row, int column) {
  return column / 64 * BOX_BYTES + piece(row, column % 64 / 8);
}

// A warp's rotations: of its 16 pairs at keys lane / 4 and lane / 4 + 8 of sixteen, and at every 16th key of a page.
struct Turns {
  const float *cos, *sin;  // [pages, PAIRS] of the first key of each page
  float2 of_key[2][4];     // pairs lane % 4 * 2 and the one after, and both 8 further
  float2 of_sixteen[2];    // pair lane % 16 at keys 16 (lane / 16) and 32 further
  float2 weights[4];       // the key norm's, of both columns of the same pairs as of_key
  float2 next;             // pair lane % 16 of the page that comes

  __device__ __forceinline__ void ask(int page) {
    const int at = page * PAIRS + OWN_PAIRS * (threadIdx.x / 32) + threadIdx.x % 16;
    next = make_float2(cos[at], sin[at]);
  }
  __device__ __forceinline__ void begin_page(unsigned char* memory, int page, bool more) {
    float2* turns = (float2*)(memory + TURNS_AT) + OWN_PAIRS * (threadIdx.x / 32) + threadIdx.x % 16;
#pragma unroll
    for (int i = 0; i < 2; i++) turns[(threadIdx.x % 32 / 16 + 2 * i) * PAIRS] = added(next, of_sixteen[i]);
    if (more) ask(page + 1);
    __syncwarp();
  }
};

__device__ __forceinline__ void prepare_turns(Turns& turns, const unsigned short* key_weight, const float* turn_cos,
                                              const float* turn_sin) {
  const int lane = threadIdx.x % 32, own = OWN_PAIRS * (threadIdx.x / 32);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int at = 16 * (lane / 16 + 2 * i) * PAIRS + own + lane % 16;
    turns.of_sixteen[i] = make_float2(turn_cos[at], turn_sin[at]);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int pair = own + lane % 4 * 2 + i / 2 * 8 + i % 2;
    turns.weights[i] = make_float2(__int_as_float((u32)key_weight[pair] << 16),
                                   __int_as_float((u32)key_weight[WIDTH / 2 + pair] << 16));
#pragma unroll
    for (int row = 0; row < 2; row++) {
      const int at = (lane / 4 + 8 * row) * PAIRS + pair;
      turns.of_key[row][i] = make_float2(turn_cos[at], turn_sin[at]);
    }
  }
}

// Fragments of V's columns, 16 keys by the first and the second 16 of the warp's pairs, become K's.
__device__ __forceinline__ void turn(u32 (&first)[4], u32 (&second)[4], const Turns& turns,
                                     const unsigned char* memory, int sixteen) {
  const int pair = OWN_PAIRS * (threadIdx.x / 32) + threadIdx.x % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const float4 base = *(const float4*)(memory + TURNS_AT + (sixteen * PAIRS + pair + half * 8) * 8);
    const float2 low_weights = turns.weights[2 * half], high_weights = turns.weights[2 * half + 1];
#pragma unroll
    for (int row = 0; row < 2; row++) {
      u32 &a = first[2 * half + row], &b = second[2 * half + row];
      const float2 low = added(make_float2(base.x, base.y), turns.of_key[row][2 * half]);
      const float2 high = added(make_float2(base.z, base.w), turns.of_key[row][2 * half + 1]);
      const float a_low = __int_as_float(a << 16) * low_weights.x;
      const float a_high = __int_as_float(a & 0xFFFF0000u) * high_weights.x;
      const float b_low = __int_as_float(b << 16) * low_weights.y;
      const float b_high = __int_as_float(b & 0xFFFF0000u) * high_weights.y;
      a = bf16_pair(a_low * low.x - b_low * low.y, a_high * high.x - b_high * high.y);
      b = bf16_pair(b_low * low.x + a_low * low.y, b_high * high.x + a_high * high.y);
    }
  }
}

// Parts of the scores of keys 16 i + lane / 4, and 8 further, with queries lane % 4 * 2 and the one after.
__device__ __forceinline__ void score(float (&scores)[KEYS / 16][4], const u32 (&queries)[2 * STEPS], u32 tile,
                                      const Turns& turns, const unsigned char* memory, int sixteen) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < KEYS / 16; i++) {
    float sums[2][4];  // two independent chains of products
#pragma unroll
    for (int j = 0; j < 8; j++) sums[j / 4][j % 4] = 0.0f;
#pragma unroll
    for (int step = 0; step < STEPS; step += 2) {
      u32 keys[2][4];
#pragma unroll
      for (int each = 0; each < 2; each++)
        load_matrices(keys[each], tile + place(16 * i + lane % 16, column_of(warp, step + each) + lane / 16 * 8));
      if (step == STEPS - 2) turn(keys[0], keys[1], turns, memory, sixteen + i);
#pragma unroll
      for (int each = 0; each < 2; each++)
        multiply(sums[each], keys[each], queries[2 * (step + each)], queries[2 * (step + each) + 1]);
    }
#pragma unroll
    for (int j = 0; j < 4; j++) scores[i][j] = sums[0][j] + sums[1][j];
  }
}

// Rows that nobody has written may hold NaN, which a weight of zero does not cancel; each warp clears its columns.
__device__ __forceinline__ void clear_unwritten(unsigned char* tile, int written) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int row = written + lane / 16; row < KEYS; row += 2)
    *(uint4*)(tile + place(row, column_of(warp, lane % 16 / 2) + lane % 2 * 8)) = make_uint4(0, 0, 0, 0);
  fence_async_proxy();  // the copy engine writes there next
  __syncwarp();
}

__device__ __forceinline__ void sum_values(float (&o)[STEPS][4], const u32 (&weights)[KEYS / 8], u32 tile) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < KEYS / 16; i++)
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      u32 values[4];
      load_transposed(values,
                      tile + place(16 * i + lane % 8 + lane / 16 * 8, column_of(warp, step) + lane / 8 % 2 * 8));
      multiply(o[step], values, weights[2 * i], weights[2 * i + 1]);
    }
}

// The keys of an item: positions [first, end), of which the first begins a page.
struct Keys {
  int first, end;
  __device__ __forceinline__ Keys(const Item& item, const Splitting& splitting) {
    const int split = splitting.keys_of(item.position);
    first = item.split * split, end = min(first + split, item.position + 1);
  }
};

__device__ __forceinline__ void produce(const TensorMap* values, u32 shared, Ring<STAGES>& ring, int head,
                                        const Keys& keys, const int* pages, int page_origin, int page_step) {
  const int lane = threadIdx.x % 32;
  const Stages<STAGES> barriers = {shared + BARRIERS_AT};
  const int tiles = (keys.end + KEYS - 1) / KEYS;
  for (int begin = keys.first / KEYS; begin < tiles; begin += 32) {
    const int page = begin + lane < tiles ? pages[(begin + lane) * KEYS / PAGE] : 0;
    for (int i = 0; i < 32 && begin + i < tiles; i++, ring.advance()) {
      if (lane == i) {
        const u32 full = barriers.full(ring.place);
        barriers.wait_empty(ring);
        mbarrier_expect(full, TILE_BYTES);
        load_rows(values, shared + ring.place * TILE_BYTES, full, head * PAGE + (begin + i) * KEYS % PAGE,
                  page_origin + page_step * page);
      }
      __syncwarp();
    }
  }
}

// What a warp has summed of a row that is not split -> its columns of the row's outputs.
__device__ __forceinline__ void write_output(unsigned short* output, const float (&o)[STEPS][4], float total,
                                             int group) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int query = lane % 4 * 2 + i;
    const float scale = 1.0f / __shfl_sync(0xFFFFFFFFu, total, 4 * query);
    if (query >= group) continue;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      unsigned short* to = output + query * WIDTH + natural(column_of(warp, step)) + lane / 4;
      to[0] = (unsigned short)bf16_pair(o[step][i] * scale, 0.0f);
      to[8] = (unsigned short)bf16_pair(o[step][2 + i] * scale, 0.0f);
    }
  }
}

extern "C" __global__ void __launch_bounds__((WARPS + 1) * 32, 2) global_decode(
    const __grid_constant__ TensorMap values,  // [pages, 8, kv_heads * 64, 64]: V of one layer, columns in eight parts
    const unsigned short* q,                   // bf16 [rows, kv_heads * group, 512], columns in the order of V's
    unsigned short* output,                    // likewise, columns in the head's own order: rows that are not split
    float* partial,                            // [rows, most_splits, kv_heads, group, 512], columns in the order of V's
    float* maxima,                             // [rows, most_splits, kv_heads, group], of scores times log2(e)
    float* totals,                             // likewise
    const int* slots,                          // [rows]
    const int* positions,                      // [rows]; -1: padding
    const int* table, long long table_stride,  // page of each slot and 64 positions
    int page_origin, int page_step,            // page p is at page_origin + page_step * p of `values`
    const unsigned short* key_weight,          // bf16 [512], in the head's own order
    const float* start_cos, const float* start_sin,  // [pages, 64] of the first key of each page
    const float* turn_cos, const float* turn_sin,    // [64 keys, 64]
    int rows, int kv_heads, int group, int most_splits, int split_pages,
    int settled,   // whether all keys but a row's own were stored by earlier steps
    int beside) {  // the kernel of the step's chunks
  extern __shared__ __align__(1024) unsigned char memory[];
  launch_dependents();
  const Splitting splitting = {PAGE, most_splits, split_pages};
  const bool waits = !beside || blockIdx.x == gridDim.x - 1;
  const u32 shared = shared_address(memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Stages<STAGES> barriers = {shared + BARRIERS_AT};
  if (threadIdx.x == 0) {
    check_memory(shared);
    prefetch_map(&values);
    barriers.init(1, WARPS);
    mbarrier_init_fence();
  }
  __syncthreads();
  Item* items = (Item*)(memory + ITEMS_AT);
  Ring<STAGES> ring;
  if (warp == WARPS) {
    // Keys of earlier steps are read before the kernel ahead has ended, as `sliding_decode` does; a row's own, which
    // `prepare` stores, is in its last split.
    bool waiting = waits;
    Items dealt(positions, rows, kv_heads, splitting);
    for (int number = blockIdx.x;; number += gridDim.x) {
      const Item item = dealt.at(number);
      barriers.wait_empty(ring);
      if (lane == 0) items[ring.place] = item;
      if (item.row < 0) break;
      const Keys keys(item, splitting);
      if (waiting && (!settled || keys.end > item.position)) wait_for_prerequisites(), waiting = false;
      __syncwarp();
      produce(&values, shared, ring, item.head, keys, table + slots[item.row] * table_stride, page_origin, page_step);
    }
    if (lane == 0) mbarrier_expect(barriers.full(ring.place), 0);
    if (waiting) wait_for_prerequisites();
    return;
  }

  Turns turns;
  turns.cos = start_cos, turns.sin = start_sin;
  prepare_turns(turns, key_weight, turn_cos, turn_sin);
  if (waits) wait_for_prerequisites();
  const int query = lane / 4;
  Held held;
  for (;;) {
    barriers.wait_full(ring);
    const Item item = items[ring.place];
    if (item.row < 0) break;
    const Keys keys(item, splitting);
    int* result = (int*)(memory + RESULTS_AT) + warp;
    __syncwarp();  // all have read that of the last item
    if (lane == 0)
      *result = splitting.count(item.position) == 1
                    ? -1 - (item.row * kv_heads + item.head) * group
                    : ((item.row * most_splits + item.split) * kv_heads + item.head) * group;
    __syncwarp();
    turns.ask(keys.first / PAGE);
    u32 queries[2 * STEPS];
    const unsigned short* of_query = q + ((long long)(item.row * kv_heads + item.head) * group + query) * WIDTH;
#pragma unroll
    for (int i = 0; i < 2 * STEPS; i++)
      queries[i] = query < group ? __ldcg((const u32*)(of_query + column_of(warp, i / 2) + i % 2 * 8) + lane % 4) : 0;
    float o[STEPS][4], high = NO_KEY, total = 0.0f;
#pragma unroll
    for (int i = 0; i < 4 * STEPS; i++) o[i / 4][i % 4] = 0.0f;
    for (int key = keys.first; key < keys.end; key += KEYS, ring.advance()) {
      const int sixteen = key % PAGE / 16;
      const u32 at = shared + ring.place * TILE_BYTES;
      if (sixteen == 0) turns.begin_page(memory, key / PAGE, key + PAGE < keys.end);
      barriers.wait_full(ring);
      held.exchange(barriers.empty(ring.place));
      float parts[KEYS / 16][4];
      score(parts, queries, at, turns, memory, sixteen);
      float* all = (float*)(memory + SCORES_AT) + ((ring.place ^ ring.parity) & 1) * SCORES;  // in turns: STAGES is odd
#pragma unroll
      for (int i = 0; i < KEYS / 16; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
          all[(warp * HEADS + lane % 4 * 2 + j % 2) * SPACING + 16 * i + lane / 4 + j / 2 * 8] = parts[i][j];
      const int seen = keys.end - key;  // keys of the tile, or more
      if (seen < KEYS) clear_unwritten(memory + ring.place * TILE_BYTES, seen);
      barrier_sync(MET, WARPS * 32);

      float weights[KEYS / 4];  // of keys lane % 4 * 2 of every eight and the one after, with query lane / 4
#pragma unroll
      for (int i = 0; i < KEYS / 8; i++) {
        float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int other = 0; other < WARPS; other++) {
          const float2 part = *(const float2*)(all + (other * HEADS + query) * SPACING + 8 * i + lane % 4 * 2);
          sum.x += part.x, sum.y += part.y;
        }
        const int at_key = 8 * i + lane % 4 * 2;
        weights[2 * i] = at_key < seen ? sum.x * LOG2_E : NO_KEY;
        weights[2 * i + 1] = at_key + 1 < seen ? sum.y * LOG2_E : NO_KEY;
      }
      float highest = high;
#pragma unroll
      for (int i = 0; i < KEYS / 4; i++) highest = fmaxf(highest, weights[i]);
      highest = quad_maximum(highest);
      const float decay = power_of_two(high - highest);
      high = highest, total *= decay;
      u32 packed[KEYS / 8];
#pragma unroll
      for (int i = 0; i < KEYS / 8; i++) {
        const float near = power_of_two(weights[2 * i] - high), far = power_of_two(weights[2 * i + 1] - high);
        total += near + far;
        packed[i] = bf16_pair(near, far);
      }
      const float first_decay = __shfl_sync(0xFFFFFFFFu, decay, lane % 4 * 8);
      const float second_decay = __shfl_sync(0xFFFFFFFFu, decay, lane % 4 * 8 + 4);
#pragma unroll
      for (int i = 0; i < STEPS; i++) {
        o[i][0] *= first_decay, o[i][2] *= first_decay;
        o[i][1] *= second_decay, o[i][3] *= second_decay;
      }
      sum_values(o, packed, at);
    }

    total = quad_sum(total);
    const int first_result = *(const int*)(memory + RESULTS_AT + 4 * warp);
    if (first_result < 0) {
      write_output(output + (long long)(-1 - first_result) * WIDTH, o, total, group);
      continue;
    }
    if (warp == 0 && lane % 4 == 0 && query < group)
      maxima[first_result + query] = high, totals[first_result + query] = total;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if (lane % 4 * 2 + i >= group) continue;
      float* to = partial + (long long)(first_result + lane % 4 * 2 + i) * WIDTH + lane / 4;
#pragma unroll
      for (int step = 0; step < STEPS; step++) {
        const int column = column_of(warp, step);
        to[column] = o[step][i], to[column + 8] = o[step][2 + i];
      }
    }
  }
}
