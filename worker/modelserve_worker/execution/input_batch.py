"""A ScheduledBatch as tensors: packed once on the host, sent in one copy, read by model, attention and sampler."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from modelserve.architecture import LayerKind
from modelserve.errors import InvalidInput
from modelserve.sizing.pages import CacheGeometry
from modelserve_worker.batch import IN_FLIGHT, ScheduledBatch, ScheduledRequest, SlidingTable
from modelserve_worker.execution.kv_cache import KVCache
from modelserve_worker.execution.kv_stamps import request_number
from modelserve_worker.execution.sampling_batch import SamplingBatch, pack_sampling
from modelserve_worker.execution.staging import StagingBuffer


@dataclass(frozen=True)
class DecodeRows:
    """The leading single-token requests, B of them: token rows [0, B) of the step. Tables are padded with row 0."""

    count: int
    positions: Tensor  # [B] int64
    global_rows: Tensor  # [B, Pg] int64 view rows of logical pages 0, 1, ...
    sliding_rows: Tensor  # [B, Ps] int64 view rows of logical pages first, first + 1, ...
    sliding_first: Tensor  # [B] int64
    ends: tuple[int, ...]  # host: end position of each row


@dataclass(frozen=True)
class PrefillChunk:
    """One request's chunk: positions [start, end) at token rows [offset, offset + end - start) of the step."""

    offset: int
    start: int
    end: int
    global_rows: Tensor  # [Pg] int64
    sliding_rows: Tensor  # [Ps] int64
    sliding_first: int


@dataclass(frozen=True)
class InputBatch:
    """Device tensors of one step of T tokens."""

    token_ids: Tensor  # [T] int64; IN_FLIGHT where the token is in the slot's last_tokens entry
    token_slots: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    global_slots: Tensor  # [T] int64 token slots of every row
    sliding_tokens: Tensor  # [N] int64: which of the T rows outlive the step in sliding pages
    sliding_slots: Tensor  # [N] int64 their token slots
    decode: DecodeRows
    chunks: tuple[PrefillChunk, ...]
    sampling: SamplingBatch | None  # None when no request samples
    owners: Tensor | None  # debug: [T] int64 request numbers, on the CPU


def pack(
    batch: ScheduledBatch, cache: KVCache, staging: StagingBuffer, *, vocab_size: int, eos_token_ids: tuple[int, ...]
) -> InputBatch:
    """Pack and send one step. Raises InvalidInput when the batch breaks the contract of `modelserve_worker.batch`."""
    if not batch.num_tokens:
        raise InvalidInput(f"step {batch.step} has no tokens")
    geometry = cache.geometry
    for request in batch.requests:
        _check(request, geometry, vocab_size=vocab_size)
    requests = batch.requests
    num_decodes = next((i for i, r in enumerate(requests) if len(r.token_ids) != 1), len(requests))
    decodes, prefills = requests[:num_decodes], requests[num_decodes:]
    staging.begin()
    tokens = staging.put_ints([t for r in requests for t in r.token_ids])
    lengths = [len(r.token_ids) for r in requests]
    slots = staging.put_ints(np.repeat([r.slot for r in requests], lengths))
    positions = staging.put_ints(np.concatenate([np.arange(r.start, r.end) for r in requests]))
    global_rows = [_global_rows(r, cache) for r in requests]
    global_slots = staging.put_ints(
        np.concatenate([_global_slots(r, rows, geometry) for r, rows in zip(requests, global_rows, strict=True)])
    )
    kept_tokens, kept_slots = _sliding_writes(requests, cache)
    sliding_tokens, sliding_slots = staging.put_ints(kept_tokens), staging.put_ints(kept_slots)
    global_table = _padded(global_rows[:num_decodes])
    sliding_table = _padded([cache.page_rows(LayerKind.SLIDING, r.sliding_read.pages) for r in decodes])
    decode_global, decode_sliding = staging.put_ints(global_table), staging.put_ints(sliding_table)
    decode_first = staging.put_ints([r.sliding_read.first for r in decodes])
    tables = [
        (
            staging.put_ints(rows),
            staging.put_ints(cache.page_rows(LayerKind.SLIDING, r.sliding_read.pages)),
        )
        for r, rows in zip(prefills, global_rows[num_decodes:], strict=True)
    ]
    sampling = pack_sampling(batch, staging, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
    staging.send()
    offsets = np.cumsum([0, *lengths]).tolist()[num_decodes:]
    return InputBatch(
        token_ids=staging.ints(tokens),
        token_slots=staging.ints(slots),
        positions=staging.ints(positions),
        global_slots=staging.ints(global_slots),
        sliding_tokens=staging.ints(sliding_tokens),
        sliding_slots=staging.ints(sliding_slots),
        decode=DecodeRows(
            count=num_decodes,
            positions=staging.ints(positions)[:num_decodes],
            global_rows=staging.ints(decode_global).view(global_table.shape),
            sliding_rows=staging.ints(decode_sliding).view(sliding_table.shape),
            sliding_first=staging.ints(decode_first),
            ends=tuple(r.end for r in decodes),
        ),
        chunks=tuple(
            PrefillChunk(offset, r.start, r.end, staging.ints(pages), staging.ints(old), r.sliding_read.first)
            for r, offset, (pages, old) in zip(prefills, offsets, tables, strict=False)
        ),
        sampling=None if sampling is None else sampling.on_device(staging),
        owners=None if cache.stamps is None else _owners(batch),
    )


def staging_words(
    geometry: CacheGeometry, *, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int
) -> int:
    """64-bit words of the largest usual step: 6 per token, both tables of every request and 32 per request."""
    window_pages = geometry.sliding_page.pages(geometry.window - 1) + 1
    pages = geometry.global_page.pages(max_model_len) + window_pages
    return 6 * max_num_batched_tokens + max_num_seqs * (pages + 32)


def _check(request: ScheduledRequest, geometry: CacheGeometry, *, vocab_size: int) -> None:
    # On a GPU an index outside a table ends the process; here it ends one step.
    lowest = IN_FLIGHT if len(request.token_ids) == 1 else 0
    if not request.token_ids or min(request.token_ids) < lowest or max(request.token_ids) >= vocab_size:
        raise InvalidInput(f"request {request.request_id}: no tokens, or a token id outside 0..{vocab_size - 1}")
    window, start, end = geometry.window, request.start, request.end
    if geometry.global_page.layers and len(request.global_pages) < geometry.global_pages(end):
        raise InvalidInput(
            f"request {request.request_id}: {len(request.global_pages)} global pages do not cover {end} positions"
        )
    if geometry.sliding_page.layers:
        for name, table, first, stop in (
            ("sliding_read", request.sliding_read, max(0, start - window + 1), start),
            ("sliding_write", request.sliding_write, max(0, end - window + 1), end),
        ):
            if first < stop and not _covers(table, first, stop, geometry.sliding_page.page_tokens):
                raise InvalidInput(f"request {request.request_id}: {name} does not cover positions [{first}, {stop})")


def _covers(table: SlidingTable, first: int, stop: int, page_tokens: int) -> bool:
    return table.first * page_tokens <= first and stop <= (table.first + len(table.pages)) * page_tokens


def _global_rows(request: ScheduledRequest, cache: KVCache) -> np.ndarray:
    if not cache.geometry.global_page.layers:
        return np.zeros(0, dtype=np.int64)
    return cache.page_rows(LayerKind.GLOBAL, request.global_pages[: cache.geometry.global_pages(request.end)])


def _global_slots(request: ScheduledRequest, rows: np.ndarray, geometry: CacheGeometry) -> np.ndarray:
    """Token slots of the request's new rows; zeros when no global layer owns a cache and nobody reads them."""
    if not geometry.global_page.layers:
        return np.zeros(len(request.token_ids), dtype=np.int64)
    tokens = geometry.global_page.page_tokens
    positions = np.arange(request.start, request.end)
    slots: np.ndarray = rows[positions // tokens] * tokens + positions % tokens
    return slots


def _sliding_writes(requests: tuple[ScheduledRequest, ...], cache: KVCache) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the step that outlive it, [max(start, end - W + 1), end) of each request, and their token slots."""
    spec, window = cache.geometry.sliding_page, cache.geometry.window
    tokens: list[np.ndarray] = [np.zeros(0, dtype=np.int64)]
    slots: list[np.ndarray] = [np.zeros(0, dtype=np.int64)]
    offset = 0
    for request in requests:
        if spec.layers:
            kept = np.arange(max(request.start, request.end - window + 1), request.end)
            table = request.sliding_write
            rows = cache.page_rows(LayerKind.SLIDING, table.pages)
            tokens.append(kept - request.start + offset)
            logical = kept // spec.page_tokens - table.first
            slots.append(rows[logical] * spec.page_tokens + kept % spec.page_tokens)
        offset += len(request.token_ids)
    return np.concatenate(tokens), np.concatenate(slots)


def _padded(tables: list[np.ndarray]) -> np.ndarray:
    padded = np.zeros((len(tables), max((t.size for t in tables), default=0)), dtype=np.int64)
    for row, table in zip(padded, tables, strict=True):
        row[: table.size] = table
    return padded


def _owners(batch: ScheduledBatch) -> Tensor:
    numbers = [request_number(r.request_id) for r in batch.requests for _ in r.token_ids]
    return torch.tensor(numbers, dtype=torch.int64)
