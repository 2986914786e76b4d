"""Embeddings of the requests that have slots, and what a step takes of them: the rows that begin from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from modelserve.model.images import BUDGETS
from modelserve.sizing.media.embedder import kept_images, packed_rows
from modelserve_worker.batch import AdmittedRequest, ScheduledBatch
from modelserve_worker.embedded_spans import EmbeddedSpan, ImagePatches
from modelserve_worker.kernels.step import EmbeddedRows, Step
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM
from modelserve_worker.step.image_rows import KeptRows, packed, rows_of
from modelserve_worker.step.staging import pinned, upload


class _Part(NamedTuple):
    """Rows [first, stop) of a request's span, which are [to, to + stop - first) of the step's embedded rows."""

    name: tuple[int, int]  # slot, number of the span
    span: EmbeddedSpan
    first: int
    stop: int
    to: int


class SlotEmbeddings:
    """Of one runner. They stay where their request brought them, in host memory, until the last of them is in a step;
    on the device a step has its own rows alone, in the model's dtype. What the model makes rows of patches with runs in
    the step that takes the first of them, for none of an image that a prefix cache has; rows that later chunks take are
    kept. An image has at most `max_soft_tokens` rows."""

    def __init__(
        self,
        model: Gemma4ForCausalLM,
        *,
        device: torch.device,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_soft_tokens: int = BUDGETS[-1],
    ) -> None:
        self._device, self._dtype, self._hidden = device, model.dtype, model.architecture.hidden_size
        self._images = embedder = model.image_embedder
        self._spans: dict[int, tuple[EmbeddedSpan, ...]] = {}  # by slot
        self._packed, places = 0, 0
        if embedder is not None:
            exact = model.operations.exact  # there bits of an image's rows depend on it alone
            self._packed = 0 if exact else packed_rows(max_soft_tokens, max_num_batched_tokens)
            places = kept_images(embedder.images, max_num_seqs=max_num_seqs)
        self._kept = KeptRows(places, max_soft_tokens, self._hidden, dtype=model.dtype, device=device)

    def admit(self, admitted: Sequence[AdmittedRequest]) -> None:
        """Requests take their slots."""
        for request in admitted:
            self._spans.pop(request.slot, None)
            self._kept.drop_slot(request.slot)
            if request.spans:
                self._spans[request.slot] = request.spans

    def put(self, step: Step, batch: ScheduledBatch) -> Step:
        """The step with its rows that begin from embeddings. Raises KeyError or IndexError for spans that no request
        has brought."""
        spans = batch.spans
        if not len(spans.segments):
            return step
        firsts = np.cumsum(batch.lengths) - batch.lengths
        rows, parts, to = [], [], 0
        for segment, number, start, length, _ in spans.rows():
            slot = int(batch.slots[segment])
            span = self._spans[slot][number]
            first, row = start - span.start, int(firsts[segment] + start - batch.starts[segment])
            rows.append(np.arange(row, row + length))
            parts.append(_Part((slot, number), span, first, first + length, to))
            to += length
            if number + 1 == len(self._spans[slot]) and first + length == len(span):
                del self._spans[slot]
        embedded = EmbeddedRows(upload(np.concatenate(rows), self._device), self._values(parts, to))
        last_keys = upload(batch.last_visible(), self._device) if spans.mutual else None
        return replace(step, embedded=embedded, last_keys=last_keys)

    def _values(self, parts: Sequence[_Part], count: int) -> Tensor:
        """[count, H] on the device."""
        values = torch.empty(count, self._hidden, dtype=self._dtype, device=self._device)
        new: list[tuple[_Part, ImagePatches]] = []
        for part in parts:
            embeddings = part.span.embeddings
            if isinstance(embeddings, ImagePatches):
                kept = self._kept.find(part.name)
                if kept is None:
                    new.append((part, embeddings))
                else:
                    self._take(part, kept, values)
            else:
                some = torch.from_numpy(embeddings[part.first : part.stop]).to(self._dtype)
                values[part.to : part.to + len(some)].copy_(pinned(some, self._device), non_blocking=True)
        for together in packed([len(each) for _, each in new], most=self._packed):
            assert self._images is not None, "admission lets no patches in where nothing embeds them"
            images = [each for _, each in new[together]]
            made = torch.split(rows_of(images, self._images).to(self._dtype), [len(each) for each in images])
            for (part, _), rows in zip(new[together], made, strict=True):
                if part.stop < len(part.span):
                    self._kept.keep(part.name, rows)
                self._take(part, rows, values)
        return values

    def _take(self, part: _Part, rows: Tensor, values: Tensor) -> None:
        """Of an image's rows those of this step; they are dropped with the last."""
        values[part.to : part.to + part.stop - part.first].copy_(rows[part.first : part.stop])
        if part.stop == len(part.span):
            self._kept.drop(part.name)
