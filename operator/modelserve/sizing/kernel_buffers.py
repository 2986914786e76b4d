"""What the GPU path allocates once per runner, at fixed addresses, for its attention kernels and its step metadata.

All of it is for the architecture's longest context, whatever length is served: the runner exists before its pool does,
and the pool decides the length. The worker allocates by these rules, and a test compares the bytes.
"""

from __future__ import annotations

from modelserve.model.architecture import LayerKind, ModelArchitecture
from modelserve.sizing.pages import GLOBAL_PAGE_TOKENS, SLIDING_PAGE_TOKENS, KVCacheDtype, KVCacheLayout, cache_geometry
from modelserve.sizing.rank_settings import RankSettings
from modelserve.sizing.speculation import NO_DRAFTS, Speculation
from modelserve.sizing.weights.text import element_bytes

FLOAT32 = 4
INT32 = 4
SLIDING_SPLIT_PAGES = 4  # pages of a sliding window that one program of decode attention reads
GLOBAL_PROGRAMS = 128  # programs that share a global row's keys: about one per multiprocessor of a large GPU
LEAST_SPLITS = 8
TABLE_ROW_MULTIPLE = 16  # entries of a block table's row: kernels are compiled for row strides that divide by 16
LEAST_EXPANSION_KEYS = 1 << 16  # so that a step of many short chunks is not cut up
ROTATION_TILE_KEYS = 64  # keys of a tile whose first position has a row in the rotation tables


def chunk_slots(max_num_seqs: int) -> int:
    """Chunks that a step's arrays have room for: programs of attention search them all, in powers of two."""
    return 1 << (max_num_seqs - 1).bit_length()


def kernel_buffers(architecture: ModelArchitecture, settings: RankSettings) -> dict[str, int]:
    """Bytes of one rank by term: block_tables, step_metadata, decode_splits, expanded_keys, rotation_tables."""
    ranks, sequences = settings.tensor_parallel_size, settings.max_num_seqs
    v_only = settings.kv_layout is KVCacheLayout.V_ONLY
    tiles = -(-architecture.max_position_embeddings // ROTATION_TILE_KEYS) + 1 + ROTATION_TILE_KEYS
    heads = architecture.num_attention_heads // ranks
    splits = max(
        decode_splits(
            sliding_entries=_table_entries(architecture)[1] if kind is LayerKind.SLIDING else 0,
            kv_heads=architecture.kv_heads_per_rank(kind, ranks),
        )
        * heads
        * (_width(architecture, kind) + 2)  # an output, a maximum and a sum
        for kind in LayerKind
    )
    global_entries, sliding_entries = _table_entries(architecture)
    entries = (global_entries + _ring_entries(architecture, settings), sliding_entries)
    table_rows = sum(_padded(each, TABLE_ROW_MULTIPLE) for each in entries)
    columns = expanded_columns(
        width=architecture.global_head_dim,
        pairs=architecture.global_rotary_pairs,
        dtype=settings.kv_dtype,
        v_only=v_only,
    )
    columns *= architecture.kv_heads_per_rank(LayerKind.GLOBAL, ranks)
    keys = expansion_keys(architecture.max_position_embeddings)
    words = step_metadata_words(settings.max_num_batched_tokens, sequences, settings.speculation)
    return {
        "block_tables": sequences * table_rows * INT32,
        "step_metadata": words * INT32,
        "decode_splits": settings.decode_rows * splits * FLOAT32,
        "expanded_keys": keys * columns * element_bytes(architecture),
        "rotation_tables": tiles * architecture.global_rotary_pairs * 2 * FLOAT32 if v_only else 0,
    }


def step_metadata_words(max_num_batched_tokens: int, max_num_seqs: int, speculation: Speculation = NO_DRAFTS) -> int:
    """Words of two buffers: five a row, four a segment, four of its draws and four a sampled row in each, and with
    drafts one a slot; in one, three a row that goes on, four of its segment, five a chunk and three a chunk and pass.
    """
    few, slots = speculation.step_rows(max_num_seqs), chunk_slots(max_num_seqs)
    assumed = 2 * max_num_seqs if speculation.num_tokens else 0
    rows = 5 * max(max_num_batched_tokens, few) + 16 * few
    if speculation.draft_cache is not None and speculation.draft_cache.window_layers:
        rows += max(max_num_batched_tokens, few) + few  # where a drafter's ring takes a row
    return rows + 20 * max_num_seqs + assumed + (5 + 3 * max_num_seqs) * slots


def decode_splits(*, sliding_entries: int, kv_heads: int) -> int:
    """Most parts that decode attention cuts a row's keys into; `sliding_entries` of its table, 0 for a global one."""
    if sliding_entries:
        return -(-sliding_entries // SLIDING_SPLIT_PAGES)
    return max(LEAST_SPLITS, GLOBAL_PROGRAMS // kv_heads)


def expansion_keys(longest: int) -> int:
    """Keys of global layers that chunks expand at a time: one request of any length, or many short ones."""
    return max(_padded(longest, GLOBAL_PAGE_TOKENS), LEAST_EXPANSION_KEYS)


def expanded_columns(*, width: int, pairs: int, dtype: KVCacheDtype, v_only: bool) -> int:
    """Elements per key and head, in the model's dtype, that chunks read expanded in place of the pages' rows.

    V-only rows: the turned columns of K. 8-bit rows: all of K and V besides, decoded once and not once per query block.
    """
    decoded = dtype.element_bytes == 1
    if v_only:
        return 2 * pairs + (width if decoded else 0)
    return 2 * width if decoded else 0


def _table_entries(architecture: ModelArchitecture) -> tuple[int, int]:
    """Entries of one slot's tables, global and sliding."""
    pages = -(-architecture.max_position_embeddings // GLOBAL_PAGE_TOKENS)
    return pages, sliding_table_entries(architecture.sliding_window)


def _ring_entries(architecture: ModelArchitecture, settings: RankSettings) -> int:
    """Entries of a slot's global table for a drafter's window layers."""
    draft = settings.speculation.draft_cache
    if draft is None:
        return 0
    pages = cache_geometry(
        architecture,
        dtype=settings.kv_dtype,
        layout=settings.kv_layout,
        tensor_parallel_size=settings.tensor_parallel_size,
        draft=draft,
    ).draft
    return 0 if pages is None else pages.ring_entries


def sliding_table_entries(window: int) -> int:
    """Entries of a slot's table of sliding pages; 0 without a window, of global layers."""
    return -(-(window - 1) // SLIDING_PAGE_TOKENS) + 1 if window else 0


def _width(architecture: ModelArchitecture, kind: LayerKind) -> int:
    return architecture.global_head_dim if kind is LayerKind.GLOBAL else architecture.head_dim


def _padded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
