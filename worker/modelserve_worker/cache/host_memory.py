"""Host memory of one rank for cached pages: pinned piece by piece in the background, copied to and from beside compute.

Nothing here raises into a step: a piece that cannot be had is not there, and a copy that fails ends the copies of its
direction, which costs hits (scheduling/tiers/tier.py). An error that the GPU does not recover from is told by `check`.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelserve.model.architecture import LayerKind
from modelserve_worker.batch import HostCopy, ScheduledBatch
from modelserve_worker.cache.host_lanes import Lane, StreamLane
from modelserve_worker.cache.kv_cache import KVCache
from modelserve_worker.cache.memory_copies import Stretches, copy_at_once, copy_on_stream
from modelserve_worker.device_faults import device_lost
from modelserve_worker.engine_client import EngineDead
from modelserve_worker.host_pages import HostLayout, HostProgress

logger = logging.getLogger(__name__)


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
        self._on_gpu = device.type == "cuda"
        lane = StreamLane if self._on_gpu else Lane
        self._stores = lane("stores", device, lambda copies: self._copy(copies, to_host=True), self._stored)
        self._loads = lane("loads", device, lambda copies: self._copy(copies, to_host=False), self._loaded)
        self._fault: EngineDead | None = None
        self._stamps: dict[tuple[LayerKind, int], list[Tensor]] = {}  # debug: of what lies in each place

    @property
    def progress(self) -> HostProgress:
        """Any thread may ask."""
        return self._told

    def check(self) -> None:
        """Raises EngineDead where an error that the GPU does not recover from has met what runs beside steps."""
        for fault in (self._fault, self._stores.fault, self._loads.fault):
            if fault is not None:
                raise fault

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
            self._fault = device_lost(error)
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
        places: list[NDArray[np.int64]] = []
        for kind in LayerKind:
            of_kind = np.array([(copy.page, copy.place) for copy in copies if copy.kind is kind], dtype=np.int64)
            if len(of_kind):
                rows = self._cache.page_rows(kind, of_kind[:, 0])
                places.append(self._stretches(kind, rows, of_kind[:, 1]))
                if self._cache.stamps is not None:
                    self._carry_stamps(kind, rows.tolist(), of_kind[:, 1].tolist(), to_host=to_host)
        pool, host, sizes = np.concatenate(places, axis=1)
        self.copy(Stretches(host, pool, sizes) if to_host else Stretches(pool, host, sizes))

    def copy(self, stretches: Stretches) -> None:
        """Start all copies of a step with one call, on a GPU on the current stream."""
        (copy_on_stream if self._on_gpu else copy_at_once)(stretches)

    def _stretches(self, kind: LayerKind, rows: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Addresses in the pool, in host memory, and bytes, [3, n], of pages in these rows of the pool's view and these
        places of host memory, [pages] each."""
        size = self._cache.geometry.page(kind).page_bytes
        pieces, within = np.divmod(places, self.layout.per_piece[kind])
        goes_on = (np.diff(rows) == 1) & (np.diff(within) == 1) & (np.diff(pieces) == 0)
        starts = np.flatnonzero(np.concatenate(([True], ~goes_on)))
        pool = self._cache.pages(kind).data_ptr() + rows[starts] * size
        host = np.array([self._pieces[piece].data_ptr() for piece in pieces[starts]]) + within[starts] * size
        return np.stack((pool, host, np.diff(starts, append=len(rows)) * size))

    def _carry_stamps(self, kind: LayerKind, rows: list[int], places: list[int], *, to_host: bool) -> None:
        assert self._cache.stamps is not None
        for row, place in zip(rows, places, strict=True):
            if to_host:
                self._stamps[kind, place] = self._cache.stamps.of_page(kind, row)
            else:
                self._cache.stamps.put_page(kind, row, self._stamps[kind, place])


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
