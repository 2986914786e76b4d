"""Embeddings of the requests that have slots, and what a step takes of them: the rows that begin from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelserve_worker.batch import AdmittedRequest, ScheduledBatch
from modelserve_worker.embedded_spans import EmbeddedSpan, ImagePatches
from modelserve_worker.kernels.step import EmbeddedRows, Step
from modelserve_worker.models.image_embedder import ImageEmbedder
from modelserve_worker.step.staging import pinned, upload


class SlotEmbeddings:
    """Of one runner. They stay where their request brought them, in host memory, until the last of them is in a step;
    on the device a step has its own rows alone, in `dtype`. `images` makes rows of patches, in the step that takes
    them: none of an image that a prefix cache has."""

    def __init__(self, *, device: torch.device, dtype: torch.dtype, images: ImageEmbedder | None) -> None:
        self._device = device
        self._dtype = dtype
        self._images = images
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
            values.append(self._rows(span.embeddings, first, length))
            if number + 1 == len(self._spans[slot]) and first + length == len(span):
                del self._spans[slot]
        embedded = EmbeddedRows(
            upload(np.concatenate(rows), self._device),
            torch.cat(values),
        )
        last_keys = upload(batch.last_visible(), self._device) if parts.mutual else None
        return replace(step, embedded=embedded, last_keys=last_keys)

    def _rows(self, embeddings: NDArray[np.float32] | ImagePatches, first: int, count: int) -> Tensor:
        """[count, H] on the device, of those from `first` on."""
        if isinstance(embeddings, ImagePatches):
            assert self._images is not None, "admission lets no patches in where nothing embeds them"
            rows: Tensor = self._images(embeddings)[first : first + count]
            return rows.to(self._dtype)
        some = torch.from_numpy(embeddings[first : first + count]).to(self._dtype)
        return pinned(some, self._device).to(self._device, non_blocking=True)
