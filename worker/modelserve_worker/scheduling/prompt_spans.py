"""Embedded spans of prompts as an engine takes them: which it refuses, and which rows of a step are theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelserve.errors import InvalidInput
from modelserve_worker.batch import Int32Array
from modelserve_worker.embedded_spans import (
    KEY_BYTES,
    AudioFrames,
    Embedded,
    EmbeddedSpan,
    ImagePatches,
    SpanRows,
    span_pieces,
)
from modelserve_worker.request import Request


def check_spans(
    request: Request,
    max_num_batched_tokens: int,
    *,
    hidden_size: int,
    patch_values: int | None,
    frame_values: int | None,
) -> None:
    """Raise InvalidInput where a request's spans could never be computed. `hidden_size` 0: whatever embeddings have;
    `patch_values`: what patches of images must have, 0 where the model takes none, None: whatever they have;
    `frame_values`: the same of frames of sounds."""
    end, last = 0, len(request.prompt_token_ids) - 1
    for number, span in enumerate(request.spans):
        what = f"span {number} of the prompt, positions {span.start} to {span.end - 1},"
        problem = _problem(span.embeddings, hidden_size, patch_values, frame_values)
        if problem is None and len(span.key) != KEY_BYTES:
            problem = f"a key of {len(span.key)} bytes; it must have {KEY_BYTES}"
        if problem is not None:
            raise InvalidInput(f"span {number} of the prompt has {problem}", field="prompt")
        if span.start < end or span.end > last:
            raise InvalidInput(
                f"{what} must lie behind the span before it, which ends at {end}, and before the prompt's last token, "
                f"at {last}: put spans in order and a token behind the last one",
                field="prompt",
            )
        if span.mutual and len(span) > max_num_batched_tokens:
            raise InvalidInput(
                f"{what} has {len(span)} rows that see each other and are computed in one step, but a step has "
                f"{max_num_batched_tokens} (maxNumBatchedTokens); send a smaller image, or serve with "
                f"maxNumBatchedTokens of at least {len(span)}",
                field="prompt",
            )
        end = span.end


def _problem(embeddings: Embedded, hidden_size: int, patch_values: int | None, frame_values: int | None) -> str | None:
    """Of what a span brings; None where there is none."""
    if isinstance(embeddings, AudioFrames):
        if frame_values == 0:
            return "frames of a sound, and the model takes none: plan audio, or leave them out"
        if not 1 <= embeddings.rows <= max(1, len(embeddings.values)):
            return f"{embeddings.rows} rows of {len(embeddings.values)} frames; they must be 1 at least, and no more"
        return _shape_problem("frames", embeddings.values, frame_values or 0, np.float32)
    if not isinstance(embeddings, ImagePatches):
        return _shape_problem("embeddings", embeddings, hidden_size, np.float32)
    if patch_values == 0:
        return "patches of an image, and the model takes none: plan images, or leave them out"
    if embeddings.columns < 1:
        return f"patches in {embeddings.columns} columns; there must be 1 at least"
    return _shape_problem("patches", embeddings.values, patch_values or 0, np.uint8)


def _shape_problem(what: str, values: NDArray[Any], width: int, dtype: type[np.generic]) -> str | None:
    if values.ndim != 2 or not len(values) or values.shape[1] != (width or values.shape[1]):
        return f"{what} of shape {list(values.shape)}; they must be [rows, {width or 'any'}] with at least 1 row"
    return f"{what} of {values.dtype}; they must be {np.dtype(dtype)}" if values.dtype != dtype else None


def mutual_around(request: Request, position: int) -> EmbeddedSpan | None:
    """The mutual span inside which a chunk that ends at this position would end."""
    return next((span for span in request.spans if span.mutual and span.start < position < span.end), None)


def has_embedded_rows(requests: Sequence[Request], starts: Int32Array, ends: Int32Array) -> list[bool]:
    """Of which not all rows [start, end) are tokens', [P]."""
    rows = zip(requests, starts.tolist(), ends.tolist(), strict=True)
    return [any(span_pieces(request.spans, 0, start, end)) for request, start, end in rows]


def span_rows(requests: Sequence[Request], starts: Int32Array, ends: Int32Array) -> SpanRows:
    """Of the segments [start, end) of these requests, in order."""
    segments = enumerate(zip(requests, starts.tolist(), ends.tolist(), strict=True))
    return SpanRows.parts(
        [
            piece
            for number, (request, start, end) in segments
            for piece in span_pieces(request.spans, number, start, end)
        ]
    )
