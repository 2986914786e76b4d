"""Block tables of all slots, on the host and on the device: int32 [slots, entries], one per page kind."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from modelserve.architecture import LayerKind
from modelserve.errors import InvalidInput
from modelserve.sizing.pages import CacheGeometry
from modelserve_worker.batch import TableUpdates

_ROW_MULTIPLE = 16  # entries of a row: kernels are compiled for row strides that divide by 16


def table_entries(geometry: CacheGeometry, kind: LayerKind, *, max_model_len: int) -> int:
    """Entries of one slot's table."""
    used = geometry.sliding_table_entries if kind is LayerKind.SLIDING else geometry.global_pages(max_model_len)
    return -(-max(1, used) // _ROW_MULTIPLE) * _ROW_MULTIPLE


class BlockTables:
    """What `TableUpdates` write and attention reads. Updates are ordered with steps on the current stream."""

    def __init__(self, geometry: CacheGeometry, *, max_num_seqs: int, max_model_len: int, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self.host = {
            kind: np.zeros((max_num_seqs, table_entries(geometry, kind, max_model_len=max_model_len)), dtype=np.int32)
            for kind in LayerKind
        }
        self.device: dict[LayerKind, Tensor] = {
            kind: torch.zeros(table.shape, dtype=torch.int32, device=device)
            if self._on_gpu
            else torch.from_numpy(table)
            for kind, table in self.host.items()
        }

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
        """Write the entries. A large update comes once per admission, a small one every page of tokens."""
        if not len(updates.slots):
            return
        table = self.host[kind]
        table[updates.slots, updates.indices] = updates.pages
        if not self._on_gpu:
            return
        places = updates.slots.astype(np.int64) * table.shape[1] + updates.indices
        words = torch.empty((2, len(places)), dtype=torch.int64, pin_memory=True)
        words[0], words[1] = torch.from_numpy(places), torch.from_numpy(updates.pages.astype(np.int64))
        sent = words.to(self.device[kind].device, non_blocking=True)
        self.device[kind].view(-1).index_copy_(0, sent[0], sent[1].int())
