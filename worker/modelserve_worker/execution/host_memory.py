"""Host memory of one rank for cached pages: pinned piece by piece in the background, copied to and from beside compute.

A GPU has a stream for each direction, which only copies (kernels/compute_stream.py): behind an event of the compute
stream that the step's page moves precede, so that what is stored has been computed and what is loaded over is read no
more. A thread for each stream starts its copies, since a full queue makes whoever adds to it wait, and tells when they
have ended. On the CPU a step is computed where it is launched, and so are its copies.

Nothing here raises into a step: a piece that cannot be had is not there, and a copy that fails is never told to have
ended, which costs hits (scheduling/host_tier.py).
"""

from __future__ import annotations

import logging
import mmap
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from modelserve_worker.batch import HostCopy, ScheduledBatch
from modelserve_worker.execution.kv_cache import KVCache
from modelserve_worker.host_pages import HostLayout, HostProgress

_ISSUE_TIMEOUT_S = 10.0

logger = logging.getLogger(__name__)


class HostMemoryError(RuntimeError):
    """Pages are to be used that are still being loaded, and the copies do not start."""


class HostMemory:
    """At most `capacity_bytes` bytes for pages of `cache`. `start` begins to pin them."""

    def __init__(self, cache: KVCache, capacity_bytes: int) -> None:
        self.layout = HostLayout.of(cache.geometry, capacity_bytes)
        self._cache = cache
        self._pieces: list[Tensor] = []
        self._told = HostProgress()
        self._lock = threading.Lock()
        self._listener: Callable[[HostProgress], None] | None = None
        device = cache.arena.device
        lane = _StreamLane if device.type == "cuda" else _Lane
        self._stores = lane("stores", device, lambda copies: self._copy(copies, to_host=True), self._stored)
        self._loads = lane("loads", device, lambda copies: self._copy(copies, to_host=False), self._loaded)
        self._stamps: dict[HostCopy, list[Tensor]] = {}  # debug: of what lies in each place

    @property
    def progress(self) -> HostProgress:
        """Any thread may ask."""
        return self._told

    def start(self, listener: Callable[[HostProgress], None] | None = None) -> None:
        """Begin to pin memory. `listener` hears of all progress, from any thread."""
        self._listener = listener
        threading.Thread(target=self._pin_all, name="host-memory", daemon=True).start()

    def launch(self, batch: ScheduledBatch) -> None:
        """Start the copies of a step, whose page moves are on the compute stream."""
        self._stores.submit(batch.step, batch.stores)
        self._loads.submit(batch.step, batch.loads)

    def await_loads(self, step: int) -> None:
        """What comes next on the compute stream waits for the loads of steps up to this one."""
        self._loads.await_ended(step)

    def _pin_all(self) -> None:
        began, device = time.monotonic(), self._cache.arena.device
        try:
            for _ in range(self.layout.num_pieces):
                self._pieces.append(_piece(self.layout.piece_bytes, device))
                self._tell(pieces=len(self._pieces))
        except Exception as error:
            logger.warning(
                "host memory for cached prefixes ends at %d of %d pieces of %d bytes: %s",
                len(self._pieces), self.layout.num_pieces, self.layout.piece_bytes, error,
            )  # fmt: skip
        total = len(self._pieces) * self.layout.piece_bytes
        logger.info("%.3f GiB of host memory are there after %.1f s", total / (1 << 30), time.monotonic() - began)

    def _stored(self, step: int) -> None:
        self._tell(stored=step)

    def _loaded(self, step: int) -> None:
        self._tell(loaded=step)

    def _tell(self, **news: int) -> None:
        with self._lock:
            self._told = self._told._replace(**news)
            if self._listener is not None:
                self._listener(self._told)

    def _copy(self, copies: Sequence[HostCopy], *, to_host: bool) -> None:
        """On the current stream; neighbours in both memories at once."""
        for run in _runs(copies, self._cache, self.layout):
            pool = self._cache.pages(run.copies[0].kind)[run.row : run.row + len(run.copies)]
            size = pool.shape[1]
            host = self._pieces[run.piece][run.index * size : (run.index + len(run.copies)) * size].view_as(pool)
            if to_host:
                host.copy_(pool, non_blocking=True)
            else:
                pool.copy_(host, non_blocking=True)
            if self._cache.stamps is not None:
                self._carry_stamps(run, to_host=to_host)

    def _carry_stamps(self, run: _Run, *, to_host: bool) -> None:
        assert self._cache.stamps is not None
        for row, copy in enumerate(run.copies, run.row):
            place = copy._replace(page=0)
            if to_host:
                self._stamps[place] = self._cache.stamps.of_page(copy.kind, row)
            else:
                self._cache.stamps.put_page(copy.kind, row, self._stamps[place])


@dataclass
class _Run:
    """Copies of pages in rising rows of the pool's view and rising places of one piece, without gaps."""

    row: int
    piece: int
    index: int
    copies: list[HostCopy] = field(default_factory=list)


def _runs(copies: Sequence[HostCopy], cache: KVCache, layout: HostLayout) -> Iterator[_Run]:
    run: _Run | None = None
    for copy in copies:
        (row,) = cache.page_rows(copy.kind, (copy.page,)).tolist()
        piece, index = layout.locate(copy.kind, copy.place)
        if run is not None:
            count = len(run.copies)
            goes_on = (row, piece, index) == (run.row + count, run.piece, run.index + count)
            if goes_on and copy.kind is run.copies[0].kind:
                run.copies.append(copy)
                continue
            yield run
        run = _Run(row, piece, index, [copy])
    if run is not None:
        yield run


def _piece(size: int, device: torch.device) -> Tensor:
    """Plain memory on the CPU; on a GPU it is touched first, so that the driver pins what is there already."""
    if device.type != "cuda":
        return torch.empty(size, dtype=torch.uint8)
    piece = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    piece.zero_()
    torch.cuda.set_device(device)
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(int(runtime.cudaHostRegister(piece.data_ptr(), size, 0)))
    return piece


class _Lane:
    """Copies in one direction, at once."""

    def __init__(
        self,
        name: str,
        device: torch.device,
        copy: Callable[[Sequence[HostCopy]], None],
        ended: Callable[[int], None],
    ) -> None:
        """`copy` starts copies on the current stream; `ended` hears of the last step whose copies have all ended."""
        self._name = name
        self._device = device
        self._copy = copy
        self._ended = ended

    def submit(self, step: int, copies: Sequence[HostCopy]) -> None:
        """Copy, behind what is on the compute stream by now."""
        if copies:
            self._copy(copies)
            self._ended(step)

    def await_ended(self, step: int) -> None:
        """What comes next on the compute stream waits for the copies of steps up to this one."""


class _StreamLane(_Lane):
    """Copies in one direction, on a stream and by a thread of their own."""

    def __init__(
        self,
        name: str,
        device: torch.device,
        copy: Callable[[Sequence[HostCopy]], None],
        ended: Callable[[int], None],
    ) -> None:
        super().__init__(name, device, copy, ended)
        self._jobs: queue.SimpleQueue[tuple[int, torch.cuda.Event, Sequence[HostCopy]]] = queue.SimpleQueue()
        self._issued = threading.Condition()
        self._submitted = self._newest = 0  # steps
        self._events: dict[int, torch.cuda.Event] = {}  # of copies on their way, by step
        threading.Thread(target=self._run, name=f"host-{name}", daemon=True).start()

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
                raise HostMemoryError(f"the loads of step {last} have not been started after {_ISSUE_TIMEOUT_S:.0f} s")
            events = [event for number, event in self._events.items() if number <= step]
        for event in events:
            torch.cuda.current_stream().wait_event(event)

    def _run(self) -> None:
        try:
            torch.cuda.set_device(self._device)
            stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            with torch.inference_mode(), torch.cuda.stream(stream):
                while True:
                    step, behind, copies = self._jobs.get()
                    stream.wait_event(behind)
                    self._copy(copies)
                    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                    event.record(stream)
                    with self._issued:
                        self._newest, self._events[step] = step, event
                        self._issued.notify_all()
                    event.synchronize()
                    with self._issued:
                        del self._events[step]
                    self._ended(step)
        except Exception:
            logger.exception("the host's %s end here; nothing is copied any more", self._name)
