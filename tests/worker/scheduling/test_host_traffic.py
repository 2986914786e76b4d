"""The random traffic with a tier of host memory behind the prefix cache: copies happen and end whenever they like, or
never, pieces of memory come late or not at all, and every answer is what it would have been; every byte of both tiers
is accounted for after every turn."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from stamped_host import StampedHost
from test_traffic import Traffic

from modelserve_worker.scheduling.admission import SchedulerLimits
from modelserve_worker.scheduling.scheduler import Scheduler
from modelserve_worker.scheduling.tiers.copy_lane import Copy
from modelserve_worker.scheduling.tiers.host_tier import host_tiers
from modelserve_worker.scheduling.tiers.transfer import Transfer


class HostTraffic(Traffic):
    """`breaks`: at some turn no store, or no load, ends any more, or an error has ended them. Some of the pieces asked
    for are never there."""

    shortest, recent, cached_failures = 30, 16, 0.1  # rows worth a restore, of requests that the pool has forgotten

    def __init__(
        self,
        seed: int,
        seen: Counter[str],
        *,
        breaks: bool,
        drafting: bool = False,
        draft_rows: bool = False,
        ignore_awaited: bool = False,
    ) -> None:
        self.now_s = 0.0
        super().__init__(seed, seen, prefix_caching=True, drafting=drafting, draft_rows=draft_rows)
        self.host = self.device.host = StampedHost(
            self.device.memory, self.device.page, self.random, ignore_awaited=ignore_awaited
        )
        self.breaks_at = self.random.randint(80, 300) if breaks else -1
        self.turn = 0

    def make_scheduler(self, limits: SchedulerLimits, *, drafts: int, prefix_caching: bool) -> Scheduler:
        host_bytes = self.pool_bytes * self.random.choice([1, 2, 6])
        scheduler = Scheduler(
            limits,
            self.geometry,
            self.pool_bytes,
            draft_tokens=drafts,
            prefix_caching=prefix_caching,
            tiers=host_tiers(host_bytes),
        )
        (self.tier,) = scheduler.prefixes.tiers
        self.tier._clock = lambda: self.now_s
        scheduler.prefixes._least_gap = self.random.choice([1, 4])  # restores of little are worth it here
        self.pieces = int(self.random.choice([1.0, 1.0, 1.0, 0.3]) * self.tier.pool.layout.num_pieces)
        return scheduler

    @property
    def waits_for_copies(self) -> bool:
        return bool(self.tier.spills.sources) or bool(self.scheduler._queue._fetching)

    def schedule(self) -> None:
        self.turn += 1
        self.now_s += self.random.choice([0.01, 0.2])
        if self.turn == self.breaks_at:
            broken = {self.random.choice(["stored", "loaded"])}
            if self.random.random() < 0.5:
                self.host.never = broken
            else:
                self.host.off = broken
        self.scheduler.prefixes.copied(self.host.progress(min(self.turn, self.pieces)))
        super().schedule()

    def run(self) -> None:
        super().run()
        host = self.scheduler.stats().tier("host")
        self.seen["stored"] += host.stored_bytes_total
        self.seen["restored"] += host.restored_bytes_total
        self.seen["host hits"] += host.hits_total
        self.seen["host evictions"] += host.evictions_total
        self.seen["awaited"] += self.host.awaited
        self.seen["broken"] += bool(self.host.never)
        self.seen["ended"] += bool(self.host.off)


def run(*, examples: int, first: int = 0, breaks: bool = False, **options: Any) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in range(first, first + examples):
        try:
            HostTraffic(seed, seen, breaks=breaks, **options).run()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
    return seen


@pytest.mark.timeout(300)
@pytest.mark.parametrize("breaks", [False, True], ids=["ends", "never"])
def test_rows_come_back_from_host_memory_and_no_byte_is_lost(breaks: bool) -> None:
    seen = run(examples=12, breaks=breaks)
    assert seen["host hits"] > 10
    assert seen["host evictions"] > 15
    assert seen["moves"] > 50
    assert seen["preemptions"] > 0
    assert seen["failures"] > 2
    assert (seen["broken"] > 3) is (seen["ended"] > 3) is breaks


@pytest.mark.timeout(300)
def test_drafts_go_on_over_rows_that_came_back_and_are_stored_by_nobody() -> None:
    seen = run(examples=8, breaks=True, drafting=True)
    assert seen["accepted drafts"] > 100
    assert seen["host hits"] > 5
    assert seen["preemptions"] > 0


@pytest.mark.parametrize(
    "seed",
    [pytest.param(10, id="a prefix all of whose pages are being copied with another one's is not there yet")],
)
def test_traffic_that_once_broke_a_host_tier(seed: int) -> None:
    HostTraffic(seed, Counter(), breaks=True).run()


def test_the_simulation_notices_pages_that_are_used_while_they_are_being_loaded() -> None:
    with pytest.raises(AssertionError, match="rows that are not its own"):
        run(examples=100, first=200, breaks=True, ignore_awaited=True)


def test_the_simulation_notices_stores_of_pages_that_went_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Copy, "moved", property(lambda copy: False))
    monkeypatch.setattr(Transfer, "give_up_gone", lambda transfer: None)
    with pytest.raises(AssertionError, match=r"rows that are not its own|is outside"):
        run(examples=100)
