# ruff: noqa: ARG002 - NoReuse has the signatures of PrefixReuse
"""The door between a scheduler and a prefix cache, and what is behind it where there is none."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from modelserve_worker.batch import Int32Array
from modelserve_worker.host_pages import HostProgress
from modelserve_worker.request import Request
from modelserve_worker.scheduling.pages.arena import Page
from modelserve_worker.scheduling.prefix.tails import Hit
from modelserve_worker.scheduling.running import RunningRequest, RunningRequests
from modelserve_worker.scheduling.tiers.host_tier import HostCopies

NO_SLOTS = np.zeros(0, dtype=np.int32)
NO_COPIES = HostCopies()


class NoReuse:
    """Every request computes all of its prompt, and leaves nothing."""

    keeps_pages = False
    has_host_tier = False
    has_checks = False  # pages to look at
    has_errands = False  # copies to or from host memory, or pages to look at, for the next step
    arriving_bytes = 0  # of pages whose rows are on their way from host memory

    def counts(self) -> dict[str, int]:
        """What `EngineStats` says of it."""
        return {}

    def find(self, request: Request) -> Hit[Page] | None:
        """Where a waiting request would resume."""
        return None

    def shared_bytes(self, hit: Hit[Page] | None) -> int:
        """Bytes of its pages that running requests hold already, and that it will not write."""
        return 0

    def begin(self, running: RunningRequest, hit: Hit[Page] | None) -> int:
        """Reserve the pages of a stay. The position at which it begins."""
        running.table.reserve(running.request.num_tokens)
        return 0

    def holds_back(self, request: Request, hit: Hit[Page] | None, needed_bytes: int) -> bool:
        """Whether an admission that needs so many bytes, those of its hit included, waits for what is being stored in
        host memory."""
        return False

    def fetch(self, request: Request, hit: Hit[Page] | None) -> bool:
        """Whether a request that would be admitted with this hit waits for rows from host memory first."""
        return False

    def copied(self, progress: HostProgress) -> None:
        """How far copies to and from host memory have come."""

    def take_ready(self) -> list[str]:
        """Requests that wait for host memory no longer."""
        return []

    def prepare(self, needed_bytes: int) -> None:
        """The first in the queue needs so many bytes."""

    def take_errands(self, step: int, *, moves_pages: bool) -> HostCopies:
        """What goes out with a step, whose moves and page numbers are fixed."""
        return NO_COPIES

    def cut(self, stays: Sequence[RunningRequest], starts: Int32Array, shares: Int32Array) -> None:
        """End chunks at checkpoints that lie inside them; `shares` [P] are changed in place."""

    def write(
        self, running: RunningRequests, slots: Int32Array, starts: Int32Array, ends: Int32Array, *, decodes: int
    ) -> Int32Array:
        """Prepare the tables of a step's requests [R] behind its decodes. The slots through which they store rows for a
        tail: [R], -1 for none, or empty where nobody has one."""
        return NO_SLOTS

    def computed(
        self,
        running: RunningRequests,
        slots: Int32Array,
        ends: Int32Array,
        samples: NDArray[np.bool_],
        *,
        decodes: int,
    ) -> None:
        """A step is scheduled, and its updates are taken: tails are due where they are worth it."""

    def settle(self) -> None:
        """Leave the tails that are due, before the next step is scheduled."""

    def ended(self, running: RunningRequest, computed: int, *, sound: bool) -> None:
        """A stay ends with so many rows computed, which others may read where they are `sound`."""

    def distrust(self, running: RunningRequest, *, read: bool = False) -> None:
        """What this stay has written is no numbers, or unknown. Where `read`, what it has read is looked at."""

    def checked(self, step: int, unsound: Collection[int]) -> None:
        """A step has looked at the pages that it took along, and found rows in these that are not finite."""

    def step_failed(self, step: int) -> None:
        """It may not have done what it took along."""

    def gone(self, request_id: str) -> None:
        """The request has ended."""

    def clear(self) -> None:
        """What cached pages hold is unknown."""

    def tell(self) -> None:
        """Tell whoever listens what is cached since the last call, and what no longer is."""

    def check_integrity(self) -> None:
        """Raise AssertionError unless every keeper of a page is known."""
