"""Attention kernels over a PagedCase: step arrays from contexts and chunks, and the kernels' launches."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from paged_case import PagedCase, rope
from torch import Tensor

from modelserve.model.architecture import LayerKind
from modelserve.sizing.backends.table import Backend, Operation
from modelserve.sizing.pages import KVCacheDtype
from modelserve_worker.kernels.attention import triton_launches as launches
from modelserve_worker.kernels.attention.arguments import LayerPages, Turns
from modelserve_worker.kernels.attention.bound_kernels import AttentionKernels
from modelserve_worker.kernels.attention.paged_layout import LayerRows
from modelserve_worker.kernels.attention.row_codec import v_only_columns
from modelserve_worker.kernels.step import Segments, Step

THETA, EPS = 1e6, 1e-6


def layout(case: PagedCase) -> LayerRows:
    kind = LayerKind.GLOBAL if case.kind == "global" else LayerKind.SLIDING
    dtype = KVCacheDtype(str(case.compute).removeprefix("torch.") if case.fmt == "none" else case.fmt)
    offsets = {name: case.layer_offset + at for name, at in case.offsets.items()}
    return LayerRows(
        kind,
        case.heads,
        case.width,
        case.page_tokens,
        case.entries,
        case.window,
        case.origin,
        case.stride,
        offsets,
        dtype,
    )


def pages_of(case: PagedCase) -> LayerPages:
    return LayerPages(layout(case), case.table, case.arena)


def hopper_kernels(rows: LayerRows, operation: Operation, *, query_heads: int) -> AttentionKernels:
    """Of a Hopper GPU, which has kernels of its own for this operation."""
    kernels = AttentionKernels.over(rows, capability=90, query_heads=query_heads)
    assert next(each for each in kernels.choices if each.operation is operation).backend is Backend.HOPPER
    return kernels


def ints(values, device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def running(values: list[int], size: int) -> list[int]:
    ends = torch.tensor(values).cumsum(0).tolist() if values else [0]
    return ends + [ends[-1]] * (size - len(ends))


def few_rows_step(case: PagedCase, slots: list[int], lengths: list[int], *, most_rows: int) -> Step:
    """The last `lengths` positions of each slot are a segment; -1 is padding, of one row."""
    starts = [case.contexts[s] - n if s >= 0 else -1 for s, n in zip(slots, lengths, strict=True)]
    positions = [p + i if p >= 0 else -1 for p, n in zip(starts, lengths, strict=True) for i in range(n)]
    numbers = [max(s, 0) for s, n in zip(slots, lengths, strict=True) for _ in range(n)]
    firsts = torch.tensor([0, *lengths]).cumsum(0)[:-1].tolist()
    columns = ([max(s, 0) for s in slots], starts, lengths, firsts)
    decode = Segments(*(ints(each, case.device) for each in columns), most=len(slots), most_rows=most_rows)
    at, of = ints(positions, case.device), ints(numbers, case.device)
    return Step(at, ints([len(positions)], case.device), of, of, torch.full_like(of, -1), decode, None)


def decode_step(case: PagedCase, slots: list[int]) -> Step:
    """Each slot's last position decodes; -1 is a padded row."""
    positions = ints([case.contexts[s] - 1 if s >= 0 else -1 for s in slots], case.device)
    numbers = ints([max(s, 0) for s in slots], case.device)
    rows = torch.arange(len(slots), dtype=torch.int32, device=case.device)
    decode = Segments(numbers, positions, torch.ones_like(rows), rows, most=len(slots), most_rows=1)
    count = ints([len(slots)], case.device)
    return Step(positions, count, numbers, numbers, torch.full_like(numbers, -1), decode, None)


def padded_decodes(case: PagedCase) -> tuple[list[int], Segments]:
    """Slots that decode, the last of the case first and a padded row behind it, and their segments."""
    slots = [*range(len(case.contexts))][::-1]
    slots.insert(1, -1)
    decode = decode_step(case, slots).decode
    assert decode is not None
    return slots, decode


@dataclass
class Chunk:
    slot: int
    start: int
    length: int


def chunk_step(
    case: PagedCase,
    chunks: list[Chunk],
    *,
    group: int,
    block_rows: int,
    size: int = 64,
    last_keys: list[int] | None = None,
) -> Step:
    device = case.device
    positions = [p for c in chunks for p in range(c.start, c.start + c.length)]
    slots = [c.slot for c in chunks for _ in range(c.length)]
    firsts = running([0, *[c.length for c in chunks]][: len(chunks)], len(chunks))
    blocks = [-(-c.length // (block_rows // group)) for c in chunks]
    ends = ints(running(blocks, size), device)
    pad = [0] * (size - len(chunks))
    kept = [
        c.slot if p >= max(c.start, c.start + c.length - (case.window or 1) + 1) else -1
        for c in chunks
        for p in range(c.start, c.start + c.length)
    ]
    pages = [-(-(c.start + c.length) // case.page_tokens) for c in chunks]
    key_rows = running([0, *[p * case.page_tokens for p in pages]][: len(chunks)], len(chunks))
    described = (
        [c.slot for c in chunks],
        [c.start for c in chunks],
        [c.length for c in chunks],
        firsts,
    )
    segments = Segments(
        *(ints(column + pad, device) for column in described),
        most=len(chunks),
        most_rows=len(slots),
        sliding_blocks=ends,
        most_sliding_blocks=sum(blocks) + 3,
    )
    together = replace(
        segments,
        blocks=ends,
        pages=ints(running(pages, size), device),
        key_rows=ints(key_rows + pad, device),
        most_blocks=sum(blocks) + 3,
        most_pages=sum(pages) + 2,
    )
    no_page = torch.full((len(slots),), -1, dtype=torch.int32, device=device)
    count = ints([len(slots)], device)
    return Step(
        ints(positions, device),
        count,
        ints(slots, device),
        no_page,
        ints(kept, device),
        None,
        segments,
        (together,),
        last_keys=None if last_keys is None else ints(last_keys, device),
    )


def key_weight(case: PagedCase) -> Tensor:
    return (torch.rand(case.width, generator=case.generator, device=case.device) + 0.5).to(case.compute) / 16


def folded(q: Tensor, weight: Tensor | None, pairs: int) -> Tensor:
    """Queries as `prepare` leaves them for V-only rows: times the key norm's weight but for the rotated
    columns, and in the order of the rows."""
    if weight is None:
        return q
    scaled, half = q * weight, q.shape[-1] // 2
    for turned in (slice(0, pairs), slice(half, half + pairs)):
        scaled[..., turned] = q[..., turned]
    return scaled[..., v_only_columns(q.shape[-1], pairs=pairs, device=q.device)]


def derived_keys(case: PagedCase, slot: int, weight: Tensor, pairs: int) -> Tensor:
    positions = torch.arange(case.contexts[slot], device=case.device)
    return rope(case.v[slot] * weight.double(), positions, pairs=pairs, theta=THETA)


def frequencies(case: PagedCase) -> Tensor:
    steps = torch.arange(0, case.width, 2, dtype=torch.float64, device=case.device)
    return (THETA ** (-steps / case.width)).float()


def rotation(case: PagedCase, keys: int, pairs: int) -> Turns:
    return launches.tile_turns(
        frequencies(case), pairs=pairs, keys=keys, longest=max(case.contexts), dtype=layout(case).dtype
    )
