"""Sends small arrays to the device without waiting, and a step's metadata and table updates as one buffer of 32-bit
words, in one copy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_STEPS_IN_FLIGHT = 2


def pinned(values: Tensor, device: torch.device) -> Tensor:
    """A copy that the device may read while the host goes on; the allocator keeps it until the copy is done."""
    return values.pin_memory() if device.type == "cuda" else values


def upload(values: NDArray[np.generic], device: torch.device) -> Tensor:
    """A small array on the device, sent without waiting."""
    return pinned(torch.from_numpy(values), device).to(device, non_blocking=True)


class StagingBuffer:
    """Named int32 sections at addresses that never change, so that a captured graph reads each new step there.

    Host buffers are pinned on a GPU and used in turn, for metadata one per step in flight; the device buffer is one,
    because the stream orders a copy after what still reads the old words. On the CPU host and device are one memory.
    """

    def __init__(self, sections: Mapping[str, int], device: torch.device, *, turns: int = _STEPS_IN_FLIGHT) -> None:
        """`sections`: words of each, by name. `turns`: host buffers, each filled again once it has been read."""
        self._on_gpu = device.type == "cuda"
        starts = np.cumsum([0, *(-(-words // 4) * 4 for words in sections.values())]).tolist()
        self._spans = {name: (start, start + sections[name]) for name, start in zip(sections, starts, strict=False)}
        count = starts[-1]
        hosts = [torch.zeros(count, dtype=torch.int32, pin_memory=self._on_gpu) for _ in range(turns)]
        self._device = torch.zeros(count, dtype=torch.int32, device=device) if self._on_gpu else hosts[0]
        self._hosts = hosts if self._on_gpu else hosts[:1]
        self._arrays = [host.numpy() for host in self._hosts]
        self._sent: list[torch.cuda.Event | None] = [None] * len(self._hosts)
        self._turn = 0

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._spans)

    def begin(self) -> None:
        """Take the next host buffer: wait until it has been read (a step's was, two steps ago)."""
        self._turn = (self._turn + 1) % len(self._hosts)
        sent = self._sent[self._turn]
        if sent is not None:
            sent.synchronize()

    def host(self, name: str) -> NDArray[np.int32]:
        """The section of the buffer being filled; it holds what was left there `turns` times ago."""
        start, end = self._spans[name]
        return self._arrays[self._turn][start:end]

    def send(self, *, last: str | None = None, words: int = 0) -> None:
        """Copy the buffer to the device on the current stream, without waiting for it: all of it, or what stands before
        section `last`, and the first `words` of that."""
        if not self._on_gpu:
            return
        end = self._device.numel() if last is None else self._spans[last][0] + words
        self._device[:end].copy_(self._hosts[self._turn][:end], non_blocking=True)
        event = self._sent[self._turn]  # recorded again: `begin` has waited for its last copy
        if event is None:
            event = self._sent[self._turn] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()

    def device(self, name: str) -> Tensor:
        """The section on the device, int32 [words]."""
        start, end = self._spans[name]
        return self._device[start:end]
