"""Which adapters lie in the device's slots, and who waits for one.

An adapter comes into a slot as the first request that asks for it is admitted, in the place of the one that nobody
asked for the longest, once no running request has that. Where all are in use, the one that was asked for the longest
ago is *claimed*: it takes no more requests, so those that it has end in time and whoever waits gets its place; all
others go on taking theirs, past those that wait. One that is pinned is neither put out nor claimed. So neither do many
adapters of one tenant keep others out, nor does an adapter that is always asked for.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from modelserve.errors import InvalidInput
from modelserve_worker.batch import AdapterPlacing, Int32Array
from modelserve_worker.request import Request
from modelserve_worker.scheduling.stats import AdapterDrafts

NO_SLOT = -1  # of requests without an adapter


class AdapterColumns(NamedTuple):
    """As ScheduledBatch has them."""

    adapters: Int32Array
    adapter_placings: tuple[AdapterPlacing, ...]
    adapters_gone: tuple[str, ...]


class AdapterSlotTable:
    """Of `slots` slots. Adapters are named by a digest of what they are. `add` may be called by any thread."""

    def __init__(self, slots: int = 0) -> None:
        self._free = list(range(slots))
        self._directories: dict[str, str] = {}
        self._slots: OrderedDict[str, int] = OrderedDict()  # those asked for the longest ago first
        self._users: Counter[str] = Counter()
        self._claimed: str | None = None
        self._pinned: frozenset[str] = frozenset()
        self._drafts: dict[str, AdapterDrafts] = {}
        self._waiting: list[str] = []  # ids of requests that stand aside
        self._placings: list[AdapterPlacing] = []
        self._gone: list[str] = []

    def add(self, digest: str, directory: str) -> None:
        """It is in host memory; requests may ask for it."""
        if digest in self._gone:  # it has come back before a step could tell
            self._gone.remove(digest)
        self._directories[digest] = directory

    def remove(self, digest: str) -> None:
        """No request asks for it any more, and none that did runs."""
        self._directories.pop(digest, None)
        self._drafts.pop(digest, None)
        self._gone.append(digest)
        if (slot := self._slots.pop(digest, None)) is not None:
            self._free.append(slot)

    def pin(self, digests: Collection[str]) -> None:
        """These keep their slots from now on, once they have one, and no others. They leave a slot for others."""
        self._pinned = frozenset(digests)
        if self._claimed in self._pinned:
            self._claimed = None

    def check(self, request: Request) -> None:
        """Raise InvalidInput for an adapter that is not there."""
        if request.adapter and request.adapter not in self._directories:
            raise InvalidInput(f"the adapter {request.adapter!r} is not loaded; load it first", field="model")

    def seat(self, request: Request) -> bool:
        """Whether its adapter is in a slot, or will be before the next step's rows; else it waits (`take_waiting`)."""
        digest = request.adapter
        if not digest or (digest in self._slots and digest != self._claimed):
            return True
        if digest not in self._slots and (slot := self._vacant()) is not None:
            self._slots[digest] = slot
            self._placings.append(AdapterPlacing(slot, digest, self._directories[digest]))
            return True
        if digest not in self._slots and self._claimed is None:
            self._claimed = next((each for each in self._slots if each not in self._pinned), None)
        self._waiting.append(request.request_id)
        return False

    def enter(self, request: Request) -> int:
        """It runs from now on; its slot."""
        if not request.adapter:
            return NO_SLOT
        self._users[request.adapter] += 1
        self._slots.move_to_end(request.adapter)
        return self._slots[request.adapter]

    def leave(self, request: Request) -> None:
        """It has ended or is preempted; steps in flight may read its slot, behind which others are placed."""
        if not request.adapter:
            return
        self._users[request.adapter] -= 1
        if not self._users[request.adapter] and self._claimed == request.adapter:
            self._claimed = None

    def take_waiting(self) -> list[str]:
        """Those that waited while no slot could be had, where that may have changed."""
        if not self._waiting or self._claimed is not None:
            return []
        waiting, self._waiting = self._waiting, []
        return waiting

    def forget(self, request_id: str) -> None:
        """It waits no more."""
        if request_id in self._waiting:
            self._waiting.remove(request_id)
            if not self._waiting:
                self._claimed = None

    def resend(self) -> None:
        """What the slots hold is not known: the next step has all of them placed again."""
        self._placings = [AdapterPlacing(slot, each, self._directories[each]) for each, slot in self._slots.items()]

    def count_drafts(self, adapters: Iterable[str], drawn: Int32Array, counts: Int32Array) -> None:
        """A step drew `drawn` tokens of each request, of which `counts` count: all but one are drafts. `adapters`: of
        each the digest of its own, or nothing; not asked for where no request has one."""
        if not self._users:
            return
        for adapter, tokens, right in zip(adapters, drawn.tolist(), counts.tolist(), strict=True):
            if tokens > 1 and adapter:
                known = self._drafts.get(adapter) or AdapterDrafts(adapter)
                accepted = known.accepted + right - 1
                self._drafts[known.adapter] = known._replace(tokens=known.tokens + tokens - 1, accepted=accepted)

    def counts(self) -> dict[str, Any]:
        """Its part of EngineStats."""
        return {"adapter_drafts": tuple(self._drafts.values())}

    def of_step(self, slots: Int32Array) -> AdapterColumns:
        """What a step is told, whose segments have the adapters in these slots [R]."""
        told = AdapterColumns(
            slots if (slots != NO_SLOT).any() else slots[:0], tuple(self._placings), tuple(self._gone)
        )
        self._placings, self._gone = [], []
        return told

    def _vacant(self) -> int | None:
        if self._free:
            return self._free.pop()
        idle = next((each for each in self._slots if not self._users[each] and each not in self._pinned), None)
        return None if idle is None else self._slots.pop(idle)
