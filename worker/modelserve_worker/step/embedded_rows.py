"""Embeddings of the requests that have slots, and what a step takes of them: the rows that begin from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from modelserve.model.audio import TOWER_SOFT_TOKENS
from modelserve.model.images import BUDGETS
from modelserve.sizing.media.audio_embedder import kept_sounds
from modelserve.sizing.media.embedder import kept_images, packed_rows
from modelserve_worker.batch import AdmittedRequest, ScheduledBatch
from modelserve_worker.embedded_spans import AudioFrames, EmbeddedSpan, ImagePatches
from modelserve_worker.kernels.step import EmbeddedRows, Step
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM
from modelserve_worker.step.audio_rows import rows_of_sounds
from modelserve_worker.step.image_rows import KeptRows, packed, rows_of
from modelserve_worker.step.staging import pinned, upload


class MostRows(NamedTuple):
    """Of one image and of one sound."""

    image: int = BUDGETS[-1]
    sound: int = TOWER_SOFT_TOKENS


MOST_ROWS = MostRows()


class _Part(NamedTuple):
    """Rows [first, stop) of a request's span, which are [to, to + stop - first) of the step's embedded rows."""

    name: tuple[int, int]  # slot, number of the span
    span: EmbeddedSpan
    first: int
    stop: int
    to: int


class _Maker(NamedTuple):
    """What makes rows of one kind of spans: of whole ones, `packed` rows together, or with `by_row` of those frames
    alone that are wanted. Rows that later chunks take are in `kept`."""

    rows: Callable[[Sequence[Any]], Tensor]
    packed: int
    kept: KeptRows
    by_row: bool = False

    def wanted(self, part: _Part) -> tuple[ImagePatches | AudioFrames, int]:
        """What to make rows of, and which row of the span is the first of it."""
        media = part.span.embeddings
        assert isinstance(media, ImagePatches | AudioFrames)
        if self.by_row and isinstance(media, AudioFrames):
            return AudioFrames(media.values[part.first : part.stop], part.stop - part.first), part.first
        return media, 0


class SlotEmbeddings:
    """Of one runner. They stay where their request brought them, in host memory, until the last of them is in a step;
    on the device a step has its own rows alone, in the model's dtype. What the model makes rows of patches or frames
    with runs in the step that takes the first of them, for none of an image or sound that a prefix cache has; rows that
    later chunks take are kept. `most`: rows of an image and of a
    sound."""

    def __init__(
        self,
        model: Gemma4ForCausalLM,
        *,
        device: torch.device,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        most: MostRows = MOST_ROWS,
    ) -> None:
        self._device, self._dtype, self._hidden = device, model.dtype, model.architecture.hidden_size
        self._spans: dict[int, tuple[EmbeddedSpan, ...]] = {}  # by slot
        self._makers: dict[type, _Maker] = {}
        exact = model.operations.exact  # there bits of a span's rows depend on it alone

        def kept(places: int, rows: int) -> KeptRows:
            return KeptRows(places, rows, self._hidden, dtype=model.dtype, device=device)

        if (sees := model.image_embedder) is not None:
            self._makers[ImagePatches] = _Maker(
                lambda images: rows_of(images, sees),
                0 if exact else packed_rows(most.image, max_num_batched_tokens),
                kept(kept_images(sees.images, max_num_seqs=max_num_seqs), most.image),
            )
        if (hears := model.audio_embedder) is not None:
            self._makers[AudioFrames] = _Maker(
                lambda sounds: rows_of_sounds(sounds, hears),
                0 if exact else packed_rows(most.sound, max_num_batched_tokens),
                kept(kept_sounds(hears.audio, max_num_seqs=max_num_seqs), most.sound),
                by_row=hears.audio.tower is None,
            )

    @property
    def kept_bytes(self) -> int:
        """Of the room for rows between chunks."""
        return sum(maker.kept.nbytes for maker in self._makers.values())

    def admit(self, admitted: Sequence[AdmittedRequest]) -> None:
        """Requests take their slots."""
        for request in admitted:
            self._spans.pop(request.slot, None)
            for maker in self._makers.values():
                maker.kept.drop_slot(request.slot)
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
        new: dict[type, list[_Part]] = {}
        for part in parts:
            embeddings = part.span.embeddings
            if isinstance(embeddings, np.ndarray):
                some = torch.from_numpy(embeddings[part.first : part.stop]).to(self._dtype)
                values[part.to : part.to + len(some)].copy_(pinned(some, self._device), non_blocking=True)
                continue
            maker = self._makers.get(type(embeddings))
            assert maker is not None, "admission lets nothing in that nothing embeds"
            rows = maker.kept.find(part.name)
            if rows is None:
                new.setdefault(type(embeddings), []).append(part)
            else:
                _take(part, rows, values, maker.kept)
        for kind, wanted in new.items():
            self._make(self._makers[kind], wanted, values)
        return values

    def _make(self, maker: _Maker, parts: Sequence[_Part], values: Tensor) -> None:
        """Their rows, and put them where they are among `values`."""
        media = [maker.wanted(part) for part in parts]
        for together in packed([len(each) for each, _ in media], most=maker.packed):
            made = maker.rows([each for each, _ in media[together]]).to(self._dtype)
            split = torch.split(made, [len(each) for each, _ in media[together]])
            for part, (_, first), rows in zip(parts[together], media[together], split, strict=True):
                if part.stop < len(part.span) and not maker.by_row:
                    maker.kept.keep(part.name, rows)
                _take(part, rows, values, maker.kept, at=first)


def _take(part: _Part, rows: Tensor, values: Tensor, kept: KeptRows, *, at: int = 0) -> None:
    """Of a span's rows, the first of which is number `at`, those of this step; they are dropped with the last."""
    values[part.to : part.to + part.stop - part.first].copy_(rows[part.first - at : part.stop - at])
    if part.stop == len(part.span):
        kept.drop(part.name)
