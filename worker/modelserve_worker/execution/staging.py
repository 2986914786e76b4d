"""One buffer of 64-bit words for all metadata of a step: packed on the host, sent to the device in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_STEPS_IN_FLIGHT = 2


@dataclass(frozen=True)
class Section:
    """Words [start, start + count) of the step's buffer."""

    start: int
    count: int


class StagingBuffer:
    """Collects arrays with `put_ints`/`put_floats`, sends them with `send`, hands out device views of them.

    Host buffers are pinned on a GPU and used in turn, one per step in flight; the device buffer is one, because the
    stream orders a copy after the step that still reads the old words. It has `capacity` words and grows (rarely:
    long lists of biased or stop tokens) by doubling.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._device = torch.empty(capacity, dtype=torch.int64, device=device)
        self._hosts = [self._host(capacity) for _ in range(_STEPS_IN_FLIGHT)]
        self._sent: list[torch.cuda.Event | None] = [None] * _STEPS_IN_FLIGHT
        self._turn = 0
        self._parts: list[np.ndarray] = []
        self._used = 0

    def begin(self) -> None:
        """Start a step: forget what was put and not sent."""
        self._parts = []
        self._used = 0

    def put_ints(self, values: Sequence[int] | np.ndarray) -> Section:
        return self._put(np.asarray(values, dtype=np.int64))

    def put_floats(self, values: Sequence[float] | np.ndarray) -> Section:
        return self._put(np.asarray(values, dtype=np.float64).view(np.int64))

    def send(self) -> None:
        """Copy all sections to the device on the current stream, without waiting for it."""
        if self._used > self._device.numel():
            capacity = max(self._used, 2 * self._device.numel())
            self._device = torch.empty(capacity, dtype=torch.int64, device=self._device.device)
            self._hosts = [self._host(capacity) for _ in range(_STEPS_IN_FLIGHT)]
            self._sent = [None] * _STEPS_IN_FLIGHT
        host, sent = self._hosts[self._turn], self._sent[self._turn]
        if sent is not None:
            sent.synchronize()  # the copy of two steps ago; at most two are in flight, so it is done
        if self._parts:
            np.concatenate(self._parts, out=host[: self._used].numpy())
        self._device[: self._used].copy_(host[: self._used], non_blocking=True)
        if self._on_gpu:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._sent[self._turn] = event
        self._turn = (self._turn + 1) % _STEPS_IN_FLIGHT

    def ints(self, section: Section) -> Tensor:
        """Device view int64 [count]; valid from `send` until the next step's `send`."""
        return self._device[section.start : section.start + section.count]

    def floats(self, section: Section) -> Tensor:
        """Device tensor float32 [count]."""
        return self.ints(section).view(torch.float64).float()

    def _put(self, words: np.ndarray) -> Section:
        section = Section(self._used, words.size)
        self._parts.append(words.reshape(-1))
        self._used += words.size
        return section

    def _host(self, capacity: int) -> Tensor:
        return torch.empty(capacity, dtype=torch.int64, pin_memory=self._on_gpu)
