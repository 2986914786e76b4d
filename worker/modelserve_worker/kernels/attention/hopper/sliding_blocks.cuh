// Blocks of queries of sliding layers: which keys each sees, in which order, and which of a tile's count.
//
// Keys come in octets of 8 rows, newest first: the chunk's own from step buffers, counted back from the block's newest
// token, then those before the chunk from pages (of 8-bit caches all are decoded into rows like the step's). Only octets
// that some query of the block sees are loaded. An octet is four swizzled groups of 8 rows by 64 columns, so that a tile
// of K or V may hold any octets, own and paged.

#pragma once

constexpr int ROWS = 64;  // queries of a warpgroup; a block is two
constexpr int KEYS = 64;  // of a tile
constexpr int OCTETS = KEYS / 8;

struct Chunks {
  const int *rows, *starts, *lengths, *slots, *block_ends;
  int count, kv_heads, group, window;
  int older;  // rows of older keys ahead of each chunk's own in step buffers; 0: those are in pages
  int ctas;   // that multiply
};

constexpr int TWO_THIRDS = 88, HALF = 66;  // of an H100's or H200's multiprocessors

// CTAs that multiply: fewer beside many decodes, so that both go on at once. To read the window of a decode takes about
// as long as to multiply a block of queries of each head.
__device__ __forceinline__ int staying(const Chunks& chunks, int decodes) {
  const int blocks = chunks.block_ends[chunks.count - 1], all = gridDim.x;
  return decodes < blocks ? all : min(all, decodes < 2 * blocks ? TWO_THIRDS : HALF);
}

// What a CTA works on at a time. The loading warp leaves it beside the queries.
struct Block {
  int tiles;    // 0: there is no further block
  int slot;     // of the block table
  int head;
  int row;      // of q and output, of the chunk's first token
  int key_row;  // of step buffers, likewise
  int start;    // its position
  int written;  // position of the oldest key of the chunk in step buffers
  int length;   // tokens of the chunk
  int first;    // token of the first query
  int end;      // token after the newest
  int own;      // octets of step buffers
  int newest;   // number of the newest octet in pages, -1 where there is none
  int oldest;   // number of the oldest that any query sees
  int octets;
  // Tiles [whole_from, whole_to) but for [seam_from, seam_to] are whole: not those with the newest keys, nor with those
  // that some query sees no more, nor with the ends of step buffers and pages where they meet.
  int whole_from, whole_to, seam_from, seam_to;
};

__device__ __forceinline__ Block block_of(const Chunks& chunks, int item, int blocks) {
  Block block;
  block.head = item / blocks;
  const int number = blocks - 1 - item % blocks;
  int chunk = 0, before = 0;
  for (int i = 0; i < chunks.count; i++) {
    const int end = chunks.block_ends[i];
    if (end > number) break;
    chunk = i + 1, before = end;
  }
  block.slot = chunks.slots[chunk];
  block.row = chunks.rows[chunk];
  block.start = chunks.starts[chunk];
  block.length = chunks.lengths[chunk];
  const int tokens = 2 * ROWS / chunks.group;
  block.first = (number - before) * tokens;
  block.end = min(block.first + tokens, block.length);
  const int older = min(chunks.older, block.start);
  block.key_row = block.row + (chunk + 1) * chunks.older;
  block.written = block.start - older;
  const int oldest = block.first - chunks.window + 1;  // token; below zero: before the chunk
  block.own = (block.end - max(oldest, -older) + 7) / 8;
  block.newest = chunks.older ? -1 : (block.start + 7) / 8 - 1;
  block.oldest = oldest < 0 && chunks.older == 0 ? max(block.start + oldest, 0) / 8 : block.newest + 1;
  block.octets = block.own + block.newest - block.oldest + 1;
  block.tiles = (block.octets + OCTETS - 1) / OCTETS;

  const int newest_seen = max(block.start + block.first + tokens - chunks.window, block.written);  // by all queries
  const bool paged = block.oldest <= block.newest;
  block.whole_from = (block.end - 1 - block.first + KEYS - 1) / KEYS;
  if (paged && newest_seen <= block.start) {
    const int lowest = max(block.start + block.first + tokens - chunks.window, 0);
    block.whole_to = (block.own + block.newest + 1 - (lowest + 7) / 8) / OCTETS;
  } else {
    block.whole_to = (block.start + block.end - newest_seen) / KEYS;
  }
  block.seam_from = paged ? (block.own - 1) / OCTETS : block.tiles;
  block.seam_to = paged ? block.own / OCTETS : block.tiles;
  return block;
}

// Position of an octet's first key; octets past the last lie before anything that a query sees.
__device__ __forceinline__ int position_of(const Block& block, int octet) {
  return octet < block.own ? block.start + block.end - 8 * (octet + 1) : 8 * (block.newest - (octet - block.own));
}

// Whether all scores of a tile count, and all its rows have been written.
__device__ __forceinline__ bool is_whole(const Block& block, int tile) {
  return tile >= block.whole_from && tile < block.whole_to && (tile < block.seam_from || tile > block.seam_to);
}
