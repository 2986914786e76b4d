"""The adapters of one rank: those in host memory by digest, read in the background, and the slots that they go into."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from modelserve.model.architecture import ModelArchitecture
from modelserve_worker.adapters.reading import read_into_host
from modelserve_worker.adapters.slots import AdapterSlots, HostAdapter
from modelserve_worker.batch import ScheduledBatch
from modelserve_worker.layers.adapter_strengths import StrengthRecorder, rows_to_measure
from modelserve_worker.request import AdapterStrength
from modelserve_worker.step.staging import upload


class AdapterStore:
    """One thread runs steps (`follow`) and asks for `strengths`; any may have an adapter read ahead (`read`).

    The first step that scores a prompt of an adapter measures its terms, as the probe's does, unless it is replayed.
    """

    def __init__(self, slots: AdapterSlots, architecture: ModelArchitecture, *, ranks: int = 1) -> None:
        self.slots = slots
        self._architecture, self._ranks = architecture, ranks
        self._host: dict[str, Future[HostAdapter]] = {}
        self._lock = threading.Lock()
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._in_slots: dict[int, str] = {}
        self._measured: dict[str, StrengthRecorder] = {}

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
            self._in_slots[placing.slot] = placing.digest
        for digest in batch.adapters_gone:
            self._measured.pop(digest, None)
            with self._lock:
                self._host.pop(digest, None)
        self.slots.rows.recorders = tuple(self._recorders(batch))

    def strengths(self, digest: str) -> tuple[AdapterStrength, ...]:
        """Of this rank's share of each matrix that may be adapted; empty where no step has measured it. Waits for the
        device."""
        recorder = self._measured.get(digest)
        if recorder is None or not recorder.squares:
            return ()
        found = [recorder.squares.get(id(each)) for each in self.slots.factors]
        layers = [layer for layer, squares in zip(self.slots.layers, found, strict=True) if squares is not None]
        measured = [each for each in found if each is not None]
        host = torch.split(torch.cat(measured).cpu(), [len(each) for each in measured])
        told = []
        for layer, squares in zip(layers, host, strict=True):
            term, product = squares.sum(0).tolist()
            # Of a share of several ranks nothing is known of the others'.
            silent = () if self._ranks > 1 else tuple(torch.nonzero(squares[:, 0] == 0)[:, 0].tolist())
            ratio = (term / product) ** 0.5 if product else None
            told.append(AdapterStrength(layer.linear, layer.layer, ratio, silent))
        return tuple(told)

    def _recorders(self, batch: ScheduledBatch) -> Iterator[StrengthRecorder]:
        """What measures adapters whose prompts the step scores, and that nothing has measured."""
        if not len(batch.given) or not len(batch.adapters):
            return
        for slot in dict.fromkeys(batch.adapters[batch.given > 0].tolist()):
            digest = self._in_slots.get(slot)
            known = self._measured.get(digest) if digest is not None else None
            if digest is not None and (known is None or not known.squares):
                chosen = rows_to_measure(slot, np.repeat(batch.adapters, batch.lengths))
                places, rows = (upload(each, self.slots.device) for each in chosen)
                self._measured[digest] = StrengthRecorder(slot, places, rows)
                yield self._measured[digest]
