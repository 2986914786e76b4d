"""Embedded spans of prompts as an engine takes them: which it refuses, and which rows of a step are theirs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from modelserve.errors import InvalidInput
from modelserve_worker.batch import Int32Array
from modelserve_worker.embedded_spans import KEY_BYTES, SpanRows, span_pieces
from modelserve_worker.request import Request


def check_spans(request: Request, max_num_batched_tokens: int, hidden_size: int) -> None:
    """Raise InvalidInput where a request's spans could never be computed. `hidden_size` 0: whatever they have."""
    end, last = 0, len(request.prompt_token_ids) - 1
    for number, span in enumerate(request.spans):
        what = f"span {number} of the prompt, positions {span.start} to {span.end - 1},"
        shape = span.embeddings.shape
        if len(shape) != 2 or not len(span) or shape[1] != (hidden_size or shape[1]):
            raise InvalidInput(
                f"span {number} of the prompt has embeddings of shape {list(shape)}; they must be [rows, {hidden_size}]"
                " with at least 1 row",
                field="prompt",
            )
        if span.embeddings.dtype != np.float32 or len(span.key) != KEY_BYTES:
            raise InvalidInput(
                f"{what} has embeddings of {span.embeddings.dtype} and a key of {len(span.key)} bytes; they must be "
                f"float32 with a key of {KEY_BYTES}",
                field="prompt",
            )
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
