"""Copies between cached pages and host memory, in one direction, beside compute.

A GPU has a stream for each direction, which only copies (compute_stream.py): behind an event of the compute
stream that the step's page moves precede, so that what is stored has been computed and what is loaded over is read no
more. A thread for each stream starts its copies and tells when they have ended. On the CPU a step is computed where it
is launched, and so are its copies.

The thread shares the interpreter with the one that computes steps, and after every call that leaves it waits until it
is let in again: 5 ms and more. So all copies of a step are started by one call (memory_copies.py).

A lane that fails copies nothing any more and raises nothing into a step: what it had issued has ended when it says so,
and what it had not is dropped. Only an error that its GPU does not recover from ends the engine (`fault`).
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from modelserve_worker.batch import HostCopy
from modelserve_worker.device_faults import device_lost
from modelserve_worker.engine_client import EngineDead
from modelserve_worker.host_pages import LANE_ENDED

_ISSUE_TIMEOUT_S = 10.0

logger = logging.getLogger(__name__)


class HostMemoryError(RuntimeError):
    """Pages are to be used that are still being loaded, and the copies do not start."""


@dataclass(eq=False)
class Lane:
    """Copies at once. `copy` starts copies on the current stream; `ended` hears of the last step whose copies have all
    ended, and of LANE_ENDED where nothing is copied any more."""

    name: str
    device: torch.device
    copy: Callable[[Sequence[HostCopy]], None]
    ended: Callable[[int], None]

    def __post_init__(self) -> None:
        self.fault: EngineDead | None = None  # behind which the engine cannot go on
        self._off = False

    def submit(self, step: int, copies: Sequence[HostCopy]) -> None:
        """Copy, behind what is on the compute stream by now. A lane that has ended drops them."""
        if copies and not self._off:
            try:
                self.copy(copies)
            except Exception as error:
                self._end(error)
            else:
                self.ended(step)

    def await_ended(self, step: int) -> None:  # noqa: ARG002
        """What comes next on the compute stream waits for the copies of steps up to this one: those of a lane that has
        ended have ended, or will never begin. Raises `fault`."""
        if self.fault is not None:
            raise self.fault

    def _end(self, error: Exception, fault: EngineDead | None = None) -> None:
        """What was issued is not on its way any more, unless there is a `fault`."""
        self.fault = fault or device_lost(error)
        self._off = True
        logger.error("the host's %s end here; nothing is copied in that direction any more", self.name, exc_info=error)
        self.ended(LANE_ENDED)


@dataclass(eq=False)
class StreamLane(Lane):
    """Copies on a stream and by a thread of their own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._jobs: queue.SimpleQueue[tuple[int, torch.cuda.Event, Sequence[HostCopy]]] = queue.SimpleQueue()
        self._issued = threading.Condition()
        self._submitted = self._newest = 0  # steps
        self._events: dict[int, torch.cuda.Event] = {}  # of copies on their way, by step
        self._stream: torch.cuda.Stream | None = None
        threading.Thread(target=self._run, name=f"host-{self.name}", daemon=True).start()

    def submit(self, step: int, copies: Sequence[HostCopy]) -> None:
        if copies and not self._off:
            behind = torch.cuda.Event()  # type: ignore[no-untyped-call]
            behind.record()
            with self._issued:
                self._submitted = step
                self._jobs.put((step, behind, copies))  # of a lane that has ended by now, nobody takes it

    def await_ended(self, step: int) -> None:
        """Raises HostMemoryError, too, where the copies do not start."""
        last = min(step, self._submitted)
        with self._issued:
            if not self._issued.wait_for(lambda: self._off or self._newest >= last, _ISSUE_TIMEOUT_S):
                raise HostMemoryError(f"the {self.name} of step {last} have not started after {_ISSUE_TIMEOUT_S:.0f} s")
            events = [event for number, event in self._events.items() if number <= step]
        super().await_ended(step)
        for event in events:
            torch.cuda.current_stream().wait_event(event)

    def _run(self) -> None:
        try:
            torch.cuda.set_device(self.device)
            stream = self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
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
        except Exception as error:
            self._end(error)

    def _end(self, error: Exception, fault: EngineDead | None = None) -> None:
        try:
            if self._stream is not None:
                self._stream.synchronize()
        except Exception as unknown:  # what was issued may still be on its way, into pages that others get
            error = unknown
            fault = device_lost(unknown) or EngineDead(
                f"nobody knows whether the host's {self.name} have ended: {unknown}"
            )
        with self._issued:
            super()._end(error, fault)
            self._jobs = queue.SimpleQueue()
            self._events.clear()
            self._issued.notify_all()
