"""Launches of Triton's attention kernels: layout arguments by layer, tiles and buffers of the caller.

Arrays of the step, tables and rotations are read before the kernel before is complete (`dependent_launch`): whoever
calls has them written before the step's embedding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import triton
from torch import Tensor

from modelserve.model.architecture import LayerKind
from modelserve.sizing.backends.table import AttentionTile
from modelserve.sizing.kernel_buffers import SLIDING_SPLIT_PAGES, decode_splits, expanded_columns
from modelserve.sizing.pages import KVCacheDtype
from modelserve_worker.kernels.adapters.row_terms_triton import term_of
from modelserve_worker.kernels.adapters.terms import RowTerm
from modelserve_worker.kernels.attention.arguments import (
    EIGHT_BIT,
    HeadNorms,
    LayerPages,
    Pages,
    Rotary,
    Splits,
    StepRows,
    Turns,
)
from modelserve_worker.kernels.attention.paged_layout import LayerRows
from modelserve_worker.kernels.attention.tiles import decode_warps, query_block
from modelserve_worker.kernels.attention.triton import chunk_attention_triton as chunk_kernels
from modelserve_worker.kernels.attention.triton import decode_attention_triton as decode_kernels
from modelserve_worker.kernels.attention.triton import expand_keys_triton as expand_kernels
from modelserve_worker.kernels.attention.triton import packed_decode_triton as packed_kernels
from modelserve_worker.kernels.attention.triton import prepare_triton as prepare_kernels
from modelserve_worker.kernels.compiling.bundles import constant
from modelserve_worker.kernels.compiling.dependent_launch import launch
from modelserve_worker.kernels.step import Segments, Step


def tile_turns(inverse_frequencies: Tensor, *, pairs: int, keys: int, longest: int, dtype: KVCacheDtype) -> Turns:
    """Tables for tiles of `keys` keys up to position `longest`; angles in float64, so that long contexts keep them. The
    even pairs come before the odd ones where the kernels of 8-bit rows read them."""
    frequencies = inverse_frequencies[:pairs].double()
    if dtype in EIGHT_BIT:
        frequencies = torch.cat((frequencies[::2], frequencies[1::2]))
    starts = (
        torch.arange(0, longest + keys, keys, dtype=torch.float64, device=frequencies.device)[:, None] * frequencies
    )
    turns = torch.arange(keys, dtype=torch.float64, device=frequencies.device)[:, None] * frequencies
    return Turns(starts.cos().float(), starts.sin().float(), turns.cos().float(), turns.sin().float(), constant(pairs))


def decode_workspace(rows: LayerRows, *, query_heads: int) -> int:
    """float32 words that one decode row needs: an output, a maximum and a sum per split and query head."""
    return most_splits(rows) * query_heads * (rows.width + 2)


GLOBAL_SPLIT_PAGES = 2  # at least 128 keys a split, as SLIDING_SPLIT_PAGES of half the length
ALONE = 132  # programs, at most, that have a multiprocessor each
FEW_RESULTS = 1 << 16  # numbers of decodes' outputs up to which twice as many programs combine them
PER_WARP = 2048  # numbers that a warp combines: 64 a thread, which sums them without another warp


def most_splits(rows: LayerRows) -> int:
    return decode_splits(sliding_entries=rows.entries, kv_heads=rows.heads)


def splits_in(workspace: Tensor, rows: LayerRows, *, query_heads: int) -> Splits:
    """The whole workspace, cut by row of the step, of which there are fewer than segments times their most rows."""
    most, width = most_splits(rows), rows.width
    parts = workspace.numel() // decode_workspace(rows, query_heads=query_heads) * most * query_heads
    outputs, maxima, sums, _ = workspace.tensor_split((parts * width, parts * (width + 1), parts * (width + 2)))
    return Splits(outputs, maxima, sums, *map(constant, (most, rows.heads, query_heads // rows.heads, width)))


def combine(
    splits: Splits,
    output: Tensor,
    decode: Segments,
    *,
    rows: LayerRows,
    tile: AttentionTile,
    split_pages: int,
    pairs: int = 0,
    whole: bool = False,
    most_together: int | None = None,
) -> None:
    """The sum over its splits, of `split_pages` at least, of each row of few-row segments -> rows of `output`
    [T, Hq, D]. `whole`: rows that are not split are there already. `most_together`: splits that are read at a time
    where there are many rows."""
    count, few, heads, width = decode.slots.numel(), decode.most_rows, output.shape[1], output.shape[2]
    together, many = triton.next_power_of_2(most_splits(rows)), count * few * heads * width > FEW_RESULTS
    if many and most_together is not None:
        together = min(together, most_together)
    columns = min(width, 128 if many or tile.exact else 64)
    launch(
        decode_kernels.combine, (count * few, heads, width // columns), splits, decode.columns, output, split_pages,
        PAIRS=pairs, PAGE=rows.page_tokens, WINDOW=rows.window, TOGETHER=together, ROWS=few, COLUMNS=columns,
        WHOLE=whole, num_warps=min(4, max(1, together * columns // PER_WARP)),
    )  # fmt: skip


def decode_attention(
    q: Tensor,
    output: Tensor,
    step: Step,
    *,
    pages: LayerPages,
    workspace: Tensor,
    tile: AttentionTile,
    key_weight: Tensor | None = None,
    turns: Turns | None = None,
    beside: bool = False,
) -> None:
    """Rows of the few-row segments of q [T, Hq, D] over pages -> the same rows of `output`. `workspace` is float32,
    `decode_workspace` words for each of the rows up to the last of these.

    `beside`: the kernel launched before is one of chunks that `chunk_attention` said others may run beside.
    """
    decode, rows = step.decode, pages.rows
    assert decode is not None
    heads, count, few, packed = q.shape[1], decode.slots.numel(), decode.most_rows, rows.dtype in EIGHT_BIT
    least = SLIDING_SPLIT_PAGES if rows.entries else GLOBAL_SPLIT_PAGES
    splits, most = splits_in(workspace, rows, query_heads=heads), most_splits(rows)
    part, block = query_block(tile, few, heads // rows.heads)
    grid = (rows.heads * -(-few // part), most, count)
    common = (q, splits, decode.columns, pages.pairs if packed else pages.elements)
    warps, pairs = decode_warps(tile, block), 0
    turning: tuple[Tensor | Turns, ...] = ()
    kernel = packed_kernels.split_decode_packed if packed else decode_kernels.split_decode
    if rows.v_only:
        assert turns is not None
        assert key_weight is not None
        assert turns.turn_cos.shape[0] == tile.keys, "the rotation tables were made for tiles of another length"
        kernel = packed_kernels.split_decode_v_only_packed if packed else decode_kernels.split_decode_v_only
        turning, pairs = (key_weight, turns), turns.turn_cos.shape[1]
        # Unpacking binds a program that has a multiprocessor to itself.
        if packed and math.prod(grid) <= ALONE and not tile.exact:
            warps = max(2 * tile.warps, warps)
    launch(
        kernel, grid, *common, *turning, TILE=tile.keys, SPLIT_PAGES=least, BLOCK_M=block, ROWS=few, PART=part,
        BESIDE=beside, num_warps=warps, num_stages=tile.stages,
    )  # fmt: skip
    combine(splits, output, decode, rows=rows, tile=tile, split_pages=least, pairs=pairs)


def scratch_per_key(rows: LayerRows, *, pairs: int) -> int:
    """Elements of the compute dtype that `chunk_attention` of a global layer needs per key of the chunks' contexts."""
    return rows.heads * expanded_columns(width=rows.width, pairs=pairs, dtype=rows.dtype, v_only=rows.v_only)


def chunk_attention(
    q: Tensor,
    output: Tensor,
    step: Step,
    *,
    pages: LayerPages,
    tile: AttentionTile,
    fresh: StepRows | None = None,
    key_weight: Tensor | None = None,
    scratch: Tensor | None = None,
    inverse_frequencies: Tensor | None = None,
    pairs: int = 0,
) -> bool:
    """Rows of all chunks of q [T, Hq, D] -> the same rows of `output`. Returns whether attention of the step's decodes
    may run beside the last of the kernels, which then lets it start only when all before the chunks is complete: not
    beside these.

    `fresh`: the step buffers of a sliding layer. `scratch`, of a global layer that needs one: flat, of q's dtype, with
    `scratch_per_key` elements for each of the keys that `Segments.key_rows` counts (whole pages).
    `pairs`: rotated pairs of V-only rows; `inverse_frequencies` float32 [>= pairs] are theirs.
    """
    chunks, rows = step.chunks, pages.rows
    assert chunks is not None
    shared = {
        "CHUNKS": chunks.rows.numel(), "GROUP": q.shape[1] // rows.heads, "TILE": tile.keys, "BLOCK_M": tile.rows,
        "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip
    if rows.kind is LayerKind.SLIDING:
        assert fresh is not None
        launch(
            chunk_kernels.sliding_chunk, (chunks.most_sliding_blocks, rows.heads),
            q, output, fresh, chunks.columns, chunks.sliding_blocks, pages.elements, step.last_keys, **shared,
        )  # fmt: skip
        return False
    passes = expanded_passes(
        step, pages=pages, key_weight=key_weight, scratch=scratch, inverse_frequencies=inverse_frequencies, pairs=pairs
    )
    for group, keys in passes:
        grid, common = (group.most_blocks, rows.heads), (q, output, chunks.columns, group.blocks, group.key_rows, keys)
        shared["DENSE"] = rows.dtype in EIGHT_BIT
        if rows.v_only:
            launch(chunk_kernels.global_chunk_v_only, grid, *common, scratch, PAIRS=pairs, **shared)
        else:
            launch(chunk_kernels.global_chunk, grid, *common, **shared)
    return False


def expanded_passes(
    step: Step,
    *,
    pages: LayerPages,
    key_weight: Tensor | None,
    scratch: Tensor | None,
    inverse_frequencies: Tensor | None,
    pairs: int,
) -> Iterator[tuple[Segments, Pages]]:
    """Passes of a step's chunks through a global layer, each once its keys are expanded, as far as they have to be, and
    where kernels of chunks read V, and K where rows have it: of 8-bit rows in the scratch, page behind page."""
    chunks, rows, read = step.chunks, pages.rows, pages.elements
    assert chunks is not None
    per_key = scratch_per_key(rows, pairs=pairs)
    if not per_key:
        yield from ((group, read) for group in step.passes)
        return
    assert scratch is not None
    assert not rows.v_only or (key_weight is not None and inverse_frequencies is not None)
    pairs = pairs if rows.v_only else 0
    decoded = scratch
    if rows.dtype in EIGHT_BIT:
        keys = scratch.numel() // (per_key * rows.page_tokens) * rows.page_tokens
        decoded = scratch[keys * rows.heads * 2 * pairs :]
        plane = rows.heads * rows.page_tokens * rows.width
        planes = (decoded, decoded) if rows.v_only else (decoded, decoded[plane:])
        read = read._replace(
            k=planes[0], v=planes[1], stride=plane if rows.v_only else 2 * plane,
            FORMAT=constant(str(scratch.dtype).removeprefix("torch.")),
        )  # fmt: skip
    for group in step.passes:
        launch(
            expand_kernels.expand_keys, (group.most_pages, rows.heads),
            scratch, decoded, chunks.columns, group.pages, group.key_rows, pages.elements, key_weight,
            inverse_frequencies, CHUNKS=chunks.rows.numel(), PAIRS=pairs, COLUMNS=min(rows.width, 128), num_warps=4,
        )  # fmt: skip
        yield group, read


def prepare(
    projected: Tensor,
    q: Tensor,
    step: Step,
    *,
    pages: LayerPages,
    norms: HeadNorms,
    rotary: Rotary,
    fresh: StepRows | None,
    pairs: int = 0,
    term: RowTerm | None = None,
) -> None:
    """projected [T, columns] -> q [T, Hq, D], and the step's rows in pages or in the step buffers `fresh`.

    `projected` holds query, key and value heads, or without the last where V is the key projection, or queries alone
    where the layer reads another's rows, whose norm of keys is that of `norms`. `pairs`: rotated pairs of V-only rows,
    whose queries come out in the order of the rows. `term`: of adapters, still to be added to `projected`.
    """
    (tokens, q_heads, width), rows = q.shape, pages.rows
    kv_heads = rows.heads if projected.shape[1] > q_heads * width else 0
    stored_heads = kv_heads if rows.v_only else 2 * kv_heads
    per_program = min(4, kv_heads or q_heads) if term is None else 1  # which has B in registers
    launch(
        prepare_kernels.prepare, (tokens, (q_heads + stored_heads) // per_program),
        projected, projected.stride(0), term_of(term), q, norms, rotary,
        step.sliding_slots if rows.entries else step.global_slots, step.positions, pages.elements, fresh,
        Q_HEADS=q_heads, KV_HEADS=kv_heads, HEADS=per_program, PAIRS=pairs if rows.v_only else 0,
        V_IS_K=projected.shape[1] < (q_heads + 2 * kv_heads) * width,
        num_warps=max(1, min(4, per_program * width // (512 if term is None else 64))),
    )  # fmt: skip


def commit(fresh: StepRows, step: Step, *, pages: LayerPages) -> None:
    """Step-buffer rows that outlive the step -> their sliding pages."""
    heads = triton.next_power_of_2(pages.rows.heads)
    launch(
        prepare_kernels.commit, (step.commit_slots.numel(),), fresh, step.commit_slots, step.positions, pages.elements,
        HEADS=heads, num_warps=8 if heads * pages.rows.width >= 4096 else 4,
    )  # fmt: skip
