"""The adapters of one rank: those in host memory by digest, read in the background, and the slots that they go into."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from modelserve.model.architecture import ModelArchitecture
from modelserve_worker.adapters.reading import read_into_host
from modelserve_worker.adapters.slots import AdapterSlots, HostAdapter
from modelserve_worker.batch import ScheduledBatch


class AdapterStore:
    """One thread runs steps (`follow`); any may have an adapter read ahead (`read`)."""

    def __init__(self, slots: AdapterSlots, architecture: ModelArchitecture) -> None:
        self.slots = slots
        self._architecture = architecture
        self._host: dict[str, Future[HostAdapter]] = {}
        self._lock = threading.Lock()
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="adapters")

    def read(self, digest: str, directory: str) -> Future[HostAdapter]:
        """Have it in host memory. The result raises InvalidInput, UnsupportedModel, OSError; another call then tries it
        again."""
        with self._lock:
            found = self._host.get(digest)
            if found is None or (found.done() and found.exception() is not None):
                found = self._reading.submit(read_into_host, Path(directory), self._architecture, self.slots)
                self._host[digest] = found
            return found

    def follow(self, batch: ScheduledBatch) -> None:
        """Do what a step brings, before its rows. Of the ranks the first has read an adapter before a step places it;
        the others read it here, of files that the first has just read. Raises what `read` does."""
        for placing in batch.adapter_placings:
            self.slots.place(placing.slot, self.read(placing.digest, placing.directory).result())
        for digest in batch.adapters_gone:
            with self._lock:
                self._host.pop(digest, None)
