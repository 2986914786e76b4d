"""Sampling by kernels: candidates of rows that need few, every other filter without a sort, and log probabilities.

The plain reference is in `kernels.sampling.sampling`.
"""

from __future__ import annotations

from torch import Tensor

from modelserve.sizing.activation import FILTERED_ROWS, VOCABULARY_CHUNK
from modelserve_worker.kernels.sampling.candidates_triton import draw, merge, select
from modelserve_worker.kernels.sampling.filtered_rows_triton import draw_filtered
from modelserve_worker.kernels.sampling.logprobs_triton import logprobs
from modelserve_worker.kernels.sampling.sampling import RowLogprobs, SampledRows


class TritonSampling:
    """`chunk`: logits of one program, a power of two from TOP_K_CAPACITY; it changes no token."""

    rows_at_once = FILTERED_ROWS

    def __init__(self, *, chunk: int = VOCABULARY_CHUNK) -> None:
        self._chunk = chunk

    def select(self, logits: Tensor, rows: SampledRows, *, first_token: int) -> Tensor:
        return select(logits, rows, first_token=first_token, chunk=self._chunk)

    def merge(self, candidates: Tensor, rows: SampledRows) -> Tensor:
        return merge(candidates, rows)

    def draw(self, candidates: Tensor, rows: SampledRows) -> Tensor:
        return draw(candidates, rows)

    def draw_filtered(self, logits: Tensor, rows: SampledRows, places: Tensor) -> Tensor:
        return draw_filtered(logits, rows, places, chunk=self._chunk)

    def logprobs(
        self, logits: Tensor, tokens: Tensor, places: Tensor, *, most: int, softcap: float | None
    ) -> RowLogprobs:
        return logprobs(logits, tokens, places, most=most, softcap=softcap, chunk=self._chunk)
