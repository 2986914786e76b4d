"""Copies to a tier, or from there, that are queued or on their way: a lane is one direction.

A copy goes out with a step and ends some time after it; what the device reports is the last step whose copies have all
ended. Until then the place in the tier is kept. What happens to the page meanwhile is told by its number: it changes
with a move, and is gone with the page.

Where an error has ended the copies of one rank, those of the others may still be on their way: no place is given out
again in that direction, and pages that are being loaded over are waited for as ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from modelserve.model.architecture import LayerKind
from modelserve_worker.batch import HostCopy
from modelserve_worker.scheduling.pages.arena import Page
from modelserve_worker.scheduling.tiers.tier_pool import TierPage, TierPool

STALLED_S = 10.0  # a step takes a second or two at most, and copies wait for the one before them

AnyPage = TypeVar("AnyPage", Page, TierPage)


@dataclass(slots=True, eq=False)
class Copy:
    """A copy of a page goes to a tier, or comes back. `step` is 0 until it is sent."""

    page: Page | TierPage  # of the pool, or of a nearer tier
    tier_page: TierPage
    number: int = -1  # the page's, when it was sent
    step: int = 0
    ended: bool = False

    @property
    def moved(self) -> bool:
        """Whether the page has another number than what the device was told, or is gone."""
        return self.page.number != self.number


def in_memory_order(pages: list[AnyPage]) -> list[AnyPage]:
    """As the pool has them from its bottom up, so that neighbours can be copied at once."""
    return sorted(pages, key=lambda page: page.number if page.kind is LayerKind.SLIDING else -page.number)


class CopyLane:
    """A lane has the copies of one direction, to or from places of `pool`."""

    def __init__(self, pool: TierPool) -> None:
        self._pool = pool
        self.off = False  # an error has ended it: nothing is queued any more
        self._queued: list[Copy] = []
        self._sent: deque[tuple[float, list[Copy]]] = deque()

    @property
    def queued(self) -> bool:
        """Whether there is something to send."""
        return bool(self._queued)

    @property
    def sent(self) -> Iterator[Copy]:
        """Those on their way."""
        for _, copies in self._sent:
            yield from copies

    def stalled(self, now_s: float) -> bool:
        """Whether the oldest copies on their way are overdue."""
        return bool(self._sent) and now_s - self._sent[0][0] > STALLED_S

    def queue(self, copies: list[Copy]) -> None:
        """Send them with the next step; their places are kept until they have ended."""
        assert not self.off, "nothing is copied any more"
        for copy in copies:
            self._pool.keep(copy.tier_page)
        self._queued += copies

    def withdraw(self, copies: list[Copy]) -> None:
        """Do not send those of them that are still queued."""
        gone = {id(copy) for copy in copies if not copy.step}
        for copy in self._queued:
            if id(copy) in gone:
                self._pool.let_go(copy.tier_page)
        self._queued = [copy for copy in self._queued if id(copy) not in gone]

    def take(self, step: int, now_s: float) -> tuple[HostCopy, ...]:
        """All that are queued go out with `step`, by the numbers that pages have now."""
        if not self._queued:
            return ()
        copies, self._queued = self._queued, []
        for copy in copies:
            copy.number, copy.step = copy.page.number, step
        self._sent.append((now_s, copies))
        return tuple(HostCopy(copy.page.kind, copy.number, copy.tier_page.place) for copy in copies)

    def ended(self, step: int) -> list[Copy]:
        """Those that went out with steps up to this one have ended; their places are let go of."""
        ended: list[Copy] = []
        while self._sent and self._sent[0][1][0].step <= step:
            ended += self._sent.popleft()[1]
        for copy in ended:
            copy.ended = True
            self._pool.let_go(copy.tier_page)
        return ended

    def end(self) -> int:
        """An error has ended it. The last step of which copies may still be on their way, 0 for none."""
        self.off = True
        self.withdraw(self._queued)
        last = self._sent[-1][1][0].step if self._sent else 0
        self.ended(last)
        return last

    def kept(self) -> Iterator[TierPage]:
        """Places that it keeps, each as often as it does."""
        for copy in (*self._queued, *self.sent):
            yield copy.tier_page
