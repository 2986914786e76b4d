"""A third tier behind the pool and host memory, by the interface of tiers: late, forgetful and mortal."""

from __future__ import annotations

from collections import deque
from typing import Any

from prefix_sessions import PUBLISHED, text
from test_host_hits import HostSessions

from modelserve_worker.host_pages import LANE_ENDED, HostProgress
from modelserve_worker.scheduling.tiers.tier import StepCopies, Tier

PROMPTS = [text(seed, 2_016) for seed in range(1, 9)]
DELAY = 3  # turns that a copy takes


class FarTier(Tier):
    """It stores what host memory has, and brings it back into the pool."""

    name, place = "far", "another pod"
    sessions: HostSessions

    def __init__(self, *args: Any) -> None:
        super().__init__(*args, capacity_bytes=20 * PUBLISHED.held_bytes(3_000))
        self.rows: dict[tuple[Any, int], Any] = {}
        self.on_their_way: deque[tuple[int, int, StepCopies]] = deque()
        self.turn = self.told = 0
        self.dead = False

    def prepare(self, needed_bytes: int) -> None:
        for prefix in () if self.spills.lane.off else self.sessions.tier.index.prefixes:
            copy = prefix.original and prefix.original.copies.get(self.index)
            if prefix not in self.spills.sources and not (copy and copy.live):
                self.spills.start(prefix)

    def heard(self, device: HostProgress) -> HostProgress:
        self.turn += 1
        while self.on_their_way and self.on_their_way[0][0] <= self.turn:
            self._arrive()
        return HostProgress(1 << 20, *((LANE_ENDED, LANE_ENDED) if self.dead else (self.told, self.told)))

    def send(self, step: int, copies: StepCopies) -> StepCopies:
        while self.on_their_way and self.on_their_way[0][1] <= copies.loads_awaited:
            self._arrive()
        self.on_their_way.append((self.turn + DELAY, step, copies))
        return StepCopies()

    def _arrive(self) -> None:
        _, self.told, copies = self.on_their_way.popleft()
        device, near = self.sessions.device, self.sessions.host
        for kind, page, place in () if self.dead else copies.stores:
            self.rows[kind, place] = near._places[kind, page].copy()
        for kind, page, place in () if self.dead else copies.loads:
            device.memory[device.page(kind, page)] = self.rows.get((kind, place), 0)
        if lost := {(kind, place) for kind, _, place in copies.loads} - self.rows.keys():
            self.lose(lost)


def test_sessions_hit_through_a_third_tier() -> None:
    sessions = HostSessions(host_requests=3, tiers=[FarTier])
    near, far = sessions.reuse.tiers
    assert isinstance(far, FarTier)
    far.sessions = sessions

    def hits(more: int) -> list[int]:
        return [sessions.ask(prompt + text(9, more)) for prompt in PROMPTS]

    assert hits(0) == [0] * len(PROMPTS)
    assert hits(20) == [2_016] * len(PROMPTS)
    assert (near.hits, far.hits) == (0, 2_016 * len(PROMPTS)), "host memory has lost each by its next turn"
    far.rows.clear()
    assert hits(20) == [0] * len(PROMPTS), "what is lost is computed"
    assert hits(20) == [2_035] * len(PROMPTS), "and kept again"
    far.dead = True
    assert hits(20) == [0] * len(PROMPTS), "a dead tier costs hits, and no answer"
    assert sessions.ask(PROMPTS[-2]) == 2_015, "host memory still has the last of them"
    assert sessions.scheduler.stats().tier("far").used_bytes == 0
