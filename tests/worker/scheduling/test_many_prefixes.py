"""What a request behind a prefix that thousands of others have in common costs the host: as much as the first ones.

Operations are counted, never timed, of the whole scheduler. `tests/bench/host/many_prefixes.py` is the same at the
sizes of a published model, with times.
"""

from __future__ import annotations

import pytest
from operations import counted
from prefix_sessions import MODEL, Sessions, text
from run_length import share

AT_ONCE = 16
SHARED = text(1, 330)
GEOMETRY = MODEL.geometry(window=8, global_tokens=64, sliding_tokens=32, global_row=1, sliding_row=1)
MOST = 1.3


class Crowd:
    """Requests that have `SHARED` in common, then `own` tokens; AT_ONCE of them at a time."""

    def __init__(self, own: int, *, prefixes: int, host_prefixes: int = 0) -> None:
        """Memory for about so many prefixes of theirs."""
        self.own, self.asked = own, 0
        size = GEOMETRY.held_bytes(own + 64)
        running = (AT_ONCE + 2) * GEOMETRY.held_bytes(len(SHARED) + own + 64)
        self.sessions = Sessions(
            GEOMETRY, chunk=AT_ONCE * (own + 16) + len(SHARED), slots=2 * AT_ONCE, longest=700, stamped=False,
            pool_bytes=running + prefixes * size, host_bytes=host_prefixes * size,
        )  # fmt: skip
        self.ask(1)
        self.ask(1)

    @property
    def prefixes(self) -> int:
        return sum(1 for _ in self.sessions.reuse.cache.prefixes)

    def ask(self, requests: int) -> None:
        for _ in range(requests):
            self.asked += 1
            self.sessions.add(SHARED + text(1 + self.asked, self.own), text(2, 3))
        while self.sessions.scheduler.has_requests:
            self.sessions.step()
        self.sessions.requests.clear()
        self.sessions.texts.clear()

    def ask_until(self, number: int) -> None:
        while self.asked < number:
            self.ask(AT_ONCE)

    def cost(self) -> int:
        """Operations of AT_ONCE requests: the least of three times, since now and then a request has another's luck."""
        return min(counted(lambda: self.ask(AT_ONCE)) for _ in range(3))


@pytest.mark.drawn
@pytest.mark.parametrize("own", [10, 63, 300])
def test_request_ten_thousand_behind_one_prefix_costs_what_request_fifty_did(own: int) -> None:
    last = share(10_000)
    crowd = Crowd(own, prefixes=22_000)
    crowd.ask_until(50)
    early = crowd.cost()
    crowd.ask_until(last)
    assert crowd.cost() <= MOST * early
    assert crowd.sessions.reuse.hits >= last * 320, "each resumed behind what it has in common with the others"
    assert not crowd.sessions.reuse.cache.evictions


@pytest.mark.drawn
@pytest.mark.parametrize("own", [63, 300])
@pytest.mark.parametrize("host", [False, True])
def test_giving_up_one_of_many_prefixes_costs_what_one_of_few_does(own: int, host: bool) -> None:
    few, many = (Crowd(own, prefixes=prefixes, host_prefixes=2 * prefixes if host else 0) for prefixes in (40, 400))
    costs = []
    for crowd, prefixes in ((few, 40), (many, 400)):
        crowd.ask_until(4 * prefixes)
        costs.append(crowd.cost())
        assert crowd.sessions.reuse.cache.evictions > prefixes
    assert many.prefixes > 3 * few.prefixes
    assert costs[1] <= MOST * costs[0]
