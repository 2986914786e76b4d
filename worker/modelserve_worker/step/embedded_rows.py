"""Embeddings of the requests that have slots, and what a step takes of them: the rows that begin from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from modelserve_worker.batch import AdmittedRequest, ScheduledBatch
from modelserve_worker.embedded_spans import EmbeddedSpan
from modelserve_worker.kernels.step import EmbeddedRows, Step
from modelserve_worker.step.staging import pinned, upload


class SlotEmbeddings:
    """Of one runner. They stay where their request brought them, in host memory, until the last of them is in a step;
    on the device a step has its own rows alone, in `dtype`."""

    def __init__(self, *, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self._spans: dict[int, tuple[EmbeddedSpan, ...]] = {}  # by slot

    def admit(self, admitted: Sequence[AdmittedRequest]) -> None:
        """Requests take their slots."""
        for request in admitted:
            self._spans.pop(request.slot, None)
            if request.spans:
                self._spans[request.slot] = request.spans

    def put(self, step: Step, batch: ScheduledBatch) -> Step:
        """The step with its rows that begin from embeddings. Raises KeyError or IndexError for spans that no request
        has brought."""
        parts = batch.spans
        if not len(parts.segments):
            return step
        firsts = np.cumsum(batch.lengths) - batch.lengths
        rows, values = [], []
        for segment, number, start, length, _ in parts.rows():
            slot = int(batch.slots[segment])
            span = self._spans[slot][number]
            first, row = start - span.start, int(firsts[segment] + start - batch.starts[segment])
            rows.append(np.arange(row, row + length))
            values.append(span.embeddings[first : first + length])
            if number + 1 == len(self._spans[slot]) and first + length == len(span):
                del self._spans[slot]
        embedded = EmbeddedRows(
            upload(np.concatenate(rows), self._device),
            pinned(torch.from_numpy(np.concatenate(values)).to(self._dtype), self._device).to(
                self._device, non_blocking=True
            ),
        )
        last_keys = upload(batch.last_visible(), self._device) if parts.mutual else None
        return replace(step, embedded=embedded, last_keys=last_keys)
