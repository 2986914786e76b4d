"""Block tables of all slots, on the host and on the device: int32 [slots, entries], one per page kind."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from modelserve.errors import InvalidInput
from modelserve.model.architecture import LayerKind
from modelserve.sizing.kernel_buffers import TABLE_ROW_MULTIPLE
from modelserve.sizing.pages import CacheGeometry
from modelserve_worker.batch import TableUpdates
from modelserve_worker.step.staging import StagingBuffer

_WORDS_PER_PLACE = 2  # 64 bits, which index_copy_ takes as they are
_ENTRIES_SENT = 2048  # in one copy: a request of 131,072 tokens enters with as many
_COPIES_IN_FLIGHT = 8  # before the host waits for the first of them


def table_entries(geometry: CacheGeometry, kind: LayerKind, *, max_model_len: int) -> int:
    """Entries of one slot's table. The global one has those of a drafter's ring behind the pages of the longest context
    of the model, which may be longer than what is served."""
    draft = geometry.draft
    if kind is LayerKind.GLOBAL and draft is not None and draft.ring_entries:
        return _padded(draft.first_ring_entry + draft.ring_entries)
    return context_entries(geometry, kind, max_model_len=max_model_len)


def context_entries(geometry: CacheGeometry, kind: LayerKind, *, max_model_len: int) -> int:
    """Of them those that the model's attention may read, the first ones."""
    used = geometry.sliding_table_entries if kind is LayerKind.SLIDING else geometry.global_pages(max_model_len)
    return _padded(max(1, used))


def _padded(entries: int) -> int:
    return -(-entries // TABLE_ROW_MULTIPLE) * TABLE_ROW_MULTIPLE


class BlockTables:
    """What `TableUpdates` write and attention reads. Updates are ordered with steps on the current stream.

    `context_entries`: how many entries of a row, the first ones, the model's attention may read."""

    def __init__(self, geometry: CacheGeometry, *, max_num_seqs: int, max_model_len: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        words = {kind: max_num_seqs * table_entries(geometry, kind, max_model_len=max_model_len) for kind in LayerKind}
        self.context_entries = {
            kind: context_entries(geometry, kind, max_model_len=max_model_len) for kind in LayerKind
        }
        ends = dict(zip(LayerKind, np.cumsum(list(words.values())).tolist(), strict=True))
        # All tables are one array, so that a step's updates are one copy and one launch, whatever their kinds.
        self._all_host = np.zeros(sum(words.values()), dtype=np.int32)
        self._all = torch.from_numpy(self._all_host)
        if on_gpu:
            self._all = torch.zeros(len(self._all_host), dtype=torch.int32, device=device)
        self._first = {kind: ends[kind] - words[kind] for kind in LayerKind}
        spans = {kind: slice(self._first[kind], ends[kind]) for kind in LayerKind}
        self.host = {kind: self._all_host[span].reshape(max_num_seqs, -1) for kind, span in spans.items()}
        self.device: dict[LayerKind, Tensor] = {
            kind: self._all[span].view(max_num_seqs, -1) for kind, span in spans.items()
        }
        sections = {"places": _WORDS_PER_PLACE * _ENTRIES_SENT, "pages": _ENTRIES_SENT}
        self._staging = StagingBuffer(sections, device, turns=_COPIES_IN_FLIGHT) if on_gpu else None

    def check(self, kind: LayerKind, updates: TableUpdates, *, num_pages: int) -> None:
        """Raise InvalidInput for an update outside the table or the arena: on a GPU it would end the process."""
        rows, entries = self.host[kind].shape
        for name, values, limit in (
            ("slot", updates.slots, rows),
            ("table entry", updates.indices, entries),
            ("page", updates.pages, num_pages),
        ):
            if len(values) and not (values.min() >= 0 and values.max() < limit):
                raise InvalidInput(f"{kind.value} {name} {values.min()}..{values.max()} is outside 0..{limit - 1}")

    def apply(self, updates: Mapping[LayerKind, TableUpdates]) -> None:
        """Write the entries. A large update comes once per admission, a small one every page of tokens.

        They cross in buffers made once: pinning memory for a size not seen before would hold the host up.
        """
        changed = {kind: entries for kind, entries in updates.items() if len(entries.pages)}
        if not changed:
            return
        places = np.concatenate(
            [
                entries.slots.astype(np.int64) * self.host[kind].shape[1] + (entries.indices + self._first[kind])
                for kind, entries in changed.items()
            ]
        )
        pages = np.concatenate([entries.pages for entries in changed.values()])
        self._all_host[places] = pages
        if self._staging is None:
            return
        for first in range(0, len(places), _ENTRIES_SENT):
            span = slice(first, first + _ENTRIES_SENT)
            count = len(places[span])
            self._staging.begin()
            self._staging.host("places").view(np.int64)[:count] = places[span]
            self._staging.host("pages")[:count] = pages[span]
            self._staging.send()
            where = self._staging.device("places").view(torch.int64)[:count]
            self._all.index_copy_(0, where, self._staging.device("pages")[:count])
