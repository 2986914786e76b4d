"""Block tables of all slots, on the host and on the device: int32 [slots, entries], one per page kind."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from modelserve.architecture import LayerKind
from modelserve.errors import InvalidInput
from modelserve.sizing.kernel_buffers import TABLE_ROW_MULTIPLE
from modelserve.sizing.pages import CacheGeometry
from modelserve_worker.batch import TableUpdates
from modelserve_worker.execution.staging import StagingBuffer

_ENTRIES_SENT = 2048  # in one copy: a request of 131,072 tokens enters with as many
_COPIES_IN_FLIGHT = 8  # before the host waits for the first of them


def table_entries(geometry: CacheGeometry, kind: LayerKind, *, max_model_len: int) -> int:
    """Entries of one slot's table."""
    used = geometry.sliding_table_entries if kind is LayerKind.SLIDING else geometry.global_pages(max_model_len)
    return -(-max(1, used) // TABLE_ROW_MULTIPLE) * TABLE_ROW_MULTIPLE


class BlockTables:
    """What `TableUpdates` write and attention reads. Updates are ordered with steps on the current stream."""

    def __init__(self, geometry: CacheGeometry, *, max_num_seqs: int, max_model_len: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.host = {
            kind: np.zeros((max_num_seqs, table_entries(geometry, kind, max_model_len=max_model_len)), dtype=np.int32)
            for kind in LayerKind
        }
        self.device: dict[LayerKind, Tensor] = {
            kind: torch.zeros(table.shape, dtype=torch.int32, device=device) if on_gpu else torch.from_numpy(table)
            for kind, table in self.host.items()
        }
        sections = dict.fromkeys(("places", "pages"), _ENTRIES_SENT)
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

    def apply(self, kind: LayerKind, updates: TableUpdates) -> None:
        """Write the entries. A large update comes once per admission, a small one every page of tokens.

        They cross in buffers made once: pinning memory for a size not seen before would hold the host up.
        """
        table = self.host[kind]
        table[updates.slots, updates.indices] = updates.pages
        if self._staging is None:
            return
        places = updates.slots * table.shape[1] + updates.indices
        for first in range(0, len(places), _ENTRIES_SENT):
            span = slice(first, first + _ENTRIES_SENT)
            count = len(places[span])
            self._staging.begin()
            self._staging.host("places")[:count] = places[span]
            self._staging.host("pages")[:count] = updates.pages[span]
            self._staging.send()
            where, pages = (self._staging.device(name)[:count] for name in ("places", "pages"))
            self.device[kind].view(-1).index_copy_(0, where.long(), pages)
