"""Bytes that operations of PyTorch hold, at most, while they run: of tensors, not of what kernels have within."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class AllocatedBytes(TorchDispatchMode):
    """`most` of what was allocated since it was entered and not given back. What was there before does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        given = {_storage(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        result = func(*args, **(kwargs or {}))
        self._held = {name: held for name, held in self._held.items() if not held[0].expired()}
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and _storage(each) not in given:
                storage = each.untyped_storage()
                self._held[_storage(each)] = StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, sum(size for _, size in self._held.values()))
        return result


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
