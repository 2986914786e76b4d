"""Copies between cached pages and host memory, in one direction, beside compute.

A GPU has a stream for each direction, which only copies (kernels/compute_stream.py): behind an event of the compute
stream that the step's page moves precede, so that what is stored has been computed and what is loaded over is read no
more. A thread for each stream starts its copies and tells when they have ended. On the CPU a step is computed where it
is launched, and so are its copies.

The thread shares the interpreter with the one that computes steps, and after every call that leaves it waits until it
is let in again: 5 ms and more. So all copies of a step are started by one call (memory_copies.py).
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from modelserve_worker.batch import HostCopy

_ISSUE_TIMEOUT_S = 10.0

logger = logging.getLogger(__name__)


class HostMemoryError(RuntimeError):
    """Pages are to be used that are still being loaded, and the copies do not start."""


@dataclass(eq=False)
class Lane:
    """Copies at once. `copy` starts copies on the current stream; `ended` hears of the last step whose copies have all
    ended."""

    name: str
    device: torch.device
    copy: Callable[[Sequence[HostCopy]], None]
    ended: Callable[[int], None]

    def submit(self, step: int, copies: Sequence[HostCopy]) -> None:
        """Copy, behind what is on the compute stream by now."""
        if copies:
            self.copy(copies)
            self.ended(step)

    def await_ended(self, step: int) -> None:
        """What comes next on the compute stream waits for the copies of steps up to this one."""


@dataclass(eq=False)
class StreamLane(Lane):
    """Copies on a stream and by a thread of their own."""

    def __post_init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[int, torch.cuda.Event, Sequence[HostCopy]]] = queue.SimpleQueue()
        self._issued = threading.Condition()
        self._submitted = self._newest = 0  # steps
        self._events: dict[int, torch.cuda.Event] = {}  # of copies on their way, by step
        threading.Thread(target=self._run, name=f"host-{self.name}", daemon=True).start()

    def submit(self, step: int, copies: Sequence[HostCopy]) -> None:
        if copies:
            behind = torch.cuda.Event()  # type: ignore[no-untyped-call]
            behind.record()
            self._submitted = step
            self._jobs.put((step, behind, copies))

    def await_ended(self, step: int) -> None:
        """Raises HostMemoryError where the copies do not start."""
        last = min(step, self._submitted)
        with self._issued:
            if not self._issued.wait_for(lambda: self._newest >= last, _ISSUE_TIMEOUT_S):
                raise HostMemoryError(f"the {self.name} of step {last} have not started after {_ISSUE_TIMEOUT_S:.0f} s")
            events = [event for number, event in self._events.items() if number <= step]
        for event in events:
            torch.cuda.current_stream().wait_event(event)

    def _run(self) -> None:
        try:
            torch.cuda.set_device(self.device)
            stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            with torch.inference_mode(), torch.cuda.stream(stream):
                while True:
                    step, behind, copies = self._jobs.get()
                    stream.wait_event(behind)
                    self.copy(copies)
                    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                    event.record(stream)
                    with self._issued:
                        self._newest, self._events[step] = step, event
                        self._issued.notify_all()
                    event.synchronize()
                    with self._issued:
                        del self._events[step]
                    self.ended(step)
        except Exception:
            logger.exception("the host's %s end here; nothing is copied any more", self.name)
