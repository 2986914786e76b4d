"""A ScheduledBatch as bytes and back: what rank 0 tells the other ranks, packed once however many they are.

All arrays of a step are int32 words back to back behind a count of each, so a step of decodes is one concatenation.
Only requests that are given a slot in this step carry objects, and adapters that come and go; they come behind the
words, as a pickle, with requests' token ids as words of their own.
"""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from modelserve.model.architecture import LayerKind
from modelserve.sizing.pages import KVCacheDtype
from modelserve_worker.batch import AdmittedRequest, Asked, HostCopy, PageCheck, PageMove, ScheduledBatch, TableUpdates
from modelserve_worker.embedded_spans import NO_SPANS, SpanRows
from modelserve_worker.request import CacheTrial

_KINDS = tuple(LayerKind)
# Step, awaited loads, generated segments, drafts and trial; slots, starts, lengths, sampled, given, targets, output
# counts, tokens, constrained, spare slots, adapters, moves, stores, loads, checks, two tables
# of three columns, spans of five.
_SECTIONS = 23
_WORD = 4
_ROUNDED = (None, *KVCacheDtype)

Words = NDArray[np.int32]


def encode_batch(batch: ScheduledBatch) -> bytes:
    """One step; never empty."""
    moves = [(_KINDS.index(move.kind), move.source, move.destination) for move in batch.page_moves]
    sections = (
        np.array(
            [batch.step, batch.loads_awaited, batch.generated, *batch.asked, *_trial(batch.trial)], dtype=np.int32
        ),
        batch.slots,
        batch.starts,
        batch.lengths,
        batch.sampled,
        batch.given,
        batch.targets,
        batch.output_counts,
        batch.token_ids,
        batch.constrained,
        batch.spare_slots,
        batch.adapters,
        np.array(moves, dtype=np.int32).reshape(-1),
        _copies(batch.stores),
        _copies(batch.loads),
        _copies(batch.checks),
        *_columns(batch.global_updates),
        *_columns(batch.sliding_updates),
        np.concatenate(batch.spans) if len(batch.spans.segments) else batch.spans.segments,
    )
    counts = np.fromiter((len(section) for section in sections), dtype=np.int32, count=_SECTIONS)
    words = np.concatenate((counts, *sections)).tobytes()
    if not (batch.admitted or batch.adapter_placings or batch.adapters_gone):
        return words
    admitted = [
        (
            each.slot,
            each.request_id,
            each.sampling,
            _ids(each.prompt_token_ids),
            _ids(each.output_token_ids),
            each.banned_token_ids,
            each.shares_rows_as,
            _ids(each.predicted_token_ids),
            each.spans,
        )
        for each in batch.admitted
    ]
    return words + pickle.dumps((admitted, batch.adapter_placings, batch.adapters_gone), protocol=5)


def decode_batch(message: bytes | bytearray) -> ScheduledBatch:
    """The step that `encode_batch` made the message of."""
    counts = np.frombuffer(message, dtype=np.int32, count=_SECTIONS)
    ends = np.cumsum(counts) + _SECTIONS
    words = np.frombuffer(message, dtype=np.int32, count=int(ends[-1]))
    first, *arrays = (words[end - count : end] for count, end in zip(counts.tolist(), ends.tolist(), strict=True))
    (
        slots, starts, lengths, sampled, given, targets, output_counts, token_ids, constrained, spare_slots,
        adapters, moves, stores, loads, checks, *tables, spans,
    ) = arrays  # fmt: skip
    rest = memoryview(message)[int(ends[-1]) * _WORD :]
    admitted, placings, gone = pickle.loads(rest) if len(rest) else ([], (), ())  # noqa: S301 - written by our own rank 0
    return ScheduledBatch(
        step=int(first[0]),
        slots=slots,
        starts=starts,
        lengths=lengths,
        sampled=sampled,
        given=given,
        targets=targets,
        output_counts=output_counts,
        token_ids=token_ids,
        admitted=tuple(AdmittedRequest(*each) for each in admitted),
        page_moves=tuple(PageMove(_KINDS[kind], *pages) for kind, *pages in moves.reshape(-1, 3).tolist()),
        global_updates=TableUpdates(*tables[:3]),
        sliding_updates=TableUpdates(*tables[3:]),
        constrained=constrained,
        spare_slots=spare_slots,
        adapters=adapters,
        adapter_placings=placings,
        adapters_gone=gone,
        stores=_host_copies(stores),
        loads=_host_copies(loads),
        loads_awaited=int(first[1]),
        checks=tuple(PageCheck(_KINDS[kind], *rest) for kind, *rest in checks.reshape(-1, 4).tolist()),
        generated=int(first[2]),
        asked=Asked(int(first[3]), int(first[4])),
        trial=CacheTrial(int(first[5]), _ROUNDED[first[6]]) if first[5] else None,
        spans=SpanRows(*spans.reshape(5, -1)) if len(spans) else NO_SPANS,
    )


def _trial(trial: CacheTrial | None) -> tuple[int, int]:
    return (0, 0) if trial is None else (trial.slice_tokens, _ROUNDED.index(trial.rounded_to))


def _columns(updates: TableUpdates) -> tuple[Words, Words, Words]:
    return updates.slots, updates.indices, updates.pages


def _copies(copies: Sequence[HostCopy | PageCheck]) -> Words:
    words = [(_KINDS.index(kind), *numbers) for kind, *numbers in copies]
    return np.array(words, dtype=np.int32).reshape(-1)


def _host_copies(words: Words) -> tuple[HostCopy, ...]:
    return tuple(HostCopy(_KINDS[kind], page, place) for kind, page, place in words.reshape(-1, 3).tolist())


def _ids(tokens: Sequence[int]) -> array[int]:
    return array("i", tokens)
