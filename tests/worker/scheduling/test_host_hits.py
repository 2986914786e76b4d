"""Where requests resume whose rows have gone to host memory: the pool has lost them all."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from prefix_sessions import PUBLISHED, Sessions, text
from stamped_host import StampedHost

from modelserve_worker.batch import ScheduledBatch
from modelserve_worker.request import Request
from modelserve_worker.scheduling.tiers.copy_lane import STALLED_S
from modelserve_worker.scheduling.tiers.tier import TierOf

PREFIX = text(1, 2_016)
ANSWER = text(4, 40)


class HostSessions(Sessions):
    """With room for `pool_requests` of 3,000 tokens in the pool, and for `host_requests` in host memory."""

    def __init__(
        self, *, pool_requests: float = 1, host_requests: float = 20, pieces: int | None = None, drafts: int = 0,
        tiers: Sequence[TierOf] = (),
    ) -> None:  # fmt: skip
        held = PUBLISHED.held_bytes(3_000)
        super().__init__(
            pool_bytes=int(pool_requests * held), host_bytes=int(host_requests * held), drafts=drafts, tiers=tiers
        )
        self.tier = self.reuse.tiers[0]
        self.now_s = 0.0
        self.tier._clock = lambda: self.now_s
        self.host = self.device.host = StampedHost(self.device.memory, self.device.page, Random(1))
        self.pieces = self.tier.pool.layout.num_pieces if pieces is None else pieces

    def step(self) -> ScheduledBatch | None:
        self.now_s += 0.1
        self.reuse.copied(self.host.progress(self.pieces))
        batch = super().step()
        self.scheduler.check_integrity()
        return batch

    def served(self) -> HostSessions:
        """A prompt of 2,016 tokens has been answered with 40, and the pool has forgotten it."""
        assert self.ask(PREFIX, ANSWER) == 0
        for seed in (2, 3):
            self.ask(text(seed, 2_900))
        assert not any(prefix.end in (2_016, 2_055) for prefix in self.reuse.cache.prefixes)
        return self

    def ask_request(self, prompt: list[int], answer: list[int] | None = None, **fields: object) -> Request:
        request = self.add(prompt, answer or [5], **fields)  # type: ignore[arg-type]
        while self.scheduler.has_requests:
            self.step()
        return request


@pytest.mark.parametrize(
    ("prompt", "resumes"),
    [
        pytest.param(PREFIX, 2_015, id="the same prompt"),
        pytest.param(PREFIX + ANSWER + text(5, 300), 2_055, id="the next turn"),
        pytest.param(PREFIX + text(5, 500), 2_016, id="a sibling"),
        pytest.param(PREFIX[:-1] + text(5, 300), 2_015, id="parts 1 before the end"),
        pytest.param(PREFIX[:-11] + text(5, 300), 2_005, id="parts 11 before the end"),
        pytest.param(PREFIX[:-24] + text(5, 300), 1_992, id="parts where the answer's prefix begins to serve"),
        pytest.param(PREFIX[:-1_024] + text(5, 300), 0, id="parts before all prefixes"),
    ],
)
def test_a_request_resumes_where_the_last_prefix_in_host_memory_ends(prompt: list[int], resumes: int) -> None:
    """Of the prompt's prefix and the answer's, the later one was kept: superseded ones are not worth their copies."""
    sessions = HostSessions().served()
    request = sessions.ask_request(prompt)
    assert (request.cached_tokens, request.host_cached_tokens) == (resumes, resumes)
    assert sessions.scheduler.stats().prompt_tokens_host_total == resumes


def test_what_the_pool_has_is_not_copied() -> None:
    """Two turns after each other: the second one finds the first in the pool."""
    sessions = HostSessions().served()
    sessions.ask_request(PREFIX + ANSWER + text(5, 300))
    before = sessions.scheduler.stats().tier("host").restored_bytes_total
    again = sessions.ask_request(PREFIX + ANSWER + text(5, 300) + [5] + text(6, 10))
    assert (again.cached_tokens, again.host_cached_tokens) == (2_356, 0)
    assert sessions.scheduler.stats().tier("host").restored_bytes_total == before


def test_another_salt_finds_nothing() -> None:
    assert HostSessions().served().ask_request(PREFIX, cache_salt="mine").cached_tokens == 0


def test_a_request_that_waits_for_its_rows_lets_others_past() -> None:
    sessions = HostSessions().served()
    sessions.host.never = {"loaded"}
    waiting, other = sessions.add(PREFIX + text(5, 10)), sessions.add(text(6, 100))
    for _ in range(20):
        sessions.step()
    assert not waiting.admitted
    assert other.output_token_ids == [5]
    sessions.host.never = set()
    while sessions.scheduler.has_requests:
        sessions.step()
    assert waiting.host_cached_tokens == 2_016


def test_copies_that_never_end_cost_the_hit_and_no_answer() -> None:
    sessions = HostSessions().served()
    sessions.host.never = {"loaded"}
    request = sessions.ask_request(PREFIX + text(5, 10))
    assert (request.cached_tokens, request.output_token_ids) == (0, [5])
    assert sessions.now_s > STALLED_S
    began = sessions.now_s
    assert sessions.ask_request(text(6, 2_900)).output_token_ids == [5], "the pages that were to be filled are free"
    assert sessions.ask_request(PREFIX + text(7, 10)).output_token_ids == [5]
    assert sessions.now_s - began < STALLED_S, "nobody waits any more"


def test_loads_that_an_error_has_ended_cost_hits_at_once_and_no_answer() -> None:
    """Who waits computes now, not when the copies are overdue, a step that fails meanwhile fails alone, and nothing is
    kept in host memory that nobody can have."""
    sessions = HostSessions().served()
    sessions.host.never = {"loaded"}
    waiting = sessions.add(PREFIX + text(5, 10))
    for _ in range(3):
        sessions.step()
    assert not waiting.admitted
    sessions.host.off = {"loaded"}
    began = sessions.now_s
    while sessions.scheduler.has_requests:
        sessions.step()
    assert (waiting.cached_tokens, waiting.output_token_ids) == (0, [5])
    assert sessions.now_s - began < 2.0
    sessions.add(text(6, 300))
    batch = sessions.scheduler.schedule()
    assert batch is not None
    assert [output.error for output in sessions.scheduler.fail(batch.step, "out of order")] == ["out of order"]
    assert sessions.ask_request(PREFIX + text(7, 10)).output_token_ids == [5]
    stats, host = sessions.scheduler.stats(), sessions.tier.counters()
    assert (host.loads_off, host.stores_off, stats.failed_steps_total) == (True, True, 1)
    assert host.used_bytes == 0
    assert sessions.host.copies_after_off == 0


def test_stores_that_an_error_has_ended_leave_what_is_there() -> None:
    sessions = HostSessions().served()
    before = sessions.scheduler.stats().tier("host").stored_bytes_total
    sessions.host.off = {"stored"}
    assert sessions.ask_request(PREFIX + text(5, 10)).host_cached_tokens == 2_016
    for seed in (6, 7):
        began = sessions.now_s
        assert sessions.ask_request(text(seed, 2_900)).output_token_ids == [5]
        assert sessions.now_s - began < 1.0, "nobody is held back for copies that are not made"
    assert sessions.ask_request(PREFIX + text(8, 10)).host_cached_tokens == 2_016
    host = sessions.scheduler.stats().tier("host")
    assert (host.loads_off, host.stores_off, host.stored_bytes_total) == (False, True, before)
    assert sessions.host.copies_after_off == 0


def test_stores_that_never_end_hold_an_admission_back_for_a_second_at_most() -> None:
    sessions = HostSessions()
    sessions.host.never = {"stored"}
    for seed in range(2, 6):
        began = sessions.now_s
        assert sessions.ask_request(text(seed, 2_900)).output_token_ids == [5]
        assert sessions.now_s - began < 3.0
    assert not list(sessions.tier.index.prefixes)


def test_host_memory_that_cannot_be_had_costs_hits_and_no_answer() -> None:
    sessions = HostSessions(pieces=0).served()
    request = sessions.ask_request(PREFIX)
    assert (request.cached_tokens, request.output_token_ids) == (0, [5])
    assert sessions.scheduler.stats().tier("host").capacity_bytes == 0


def test_a_request_that_is_aborted_while_it_waits_leaves_its_rows_to_the_next() -> None:
    sessions = HostSessions().served()
    sessions.host.never = {"loaded"}
    waiting = sessions.add(PREFIX + text(5, 10))
    for _ in range(3):
        sessions.step()
    assert sessions.scheduler.abort(waiting.request_id) is not None
    assert not sessions.scheduler.has_requests
    assert sessions.scheduler.stats().held_bytes == 0
    assert sessions.reuse.arriving_bytes == 0
    sessions.host.never = set()
    assert sessions.ask_request(PREFIX + text(5, 10)).cached_tokens == 2_016


def test_a_turn_that_is_lost_leaves_the_one_before_it_the_last_again() -> None:
    """Its copy went first while the pool had the later one; that never came to host memory."""
    sessions = HostSessions().served()
    (before,) = (prefix for prefix in sessions.tier.index.prefixes if prefix.end == 2_055)
    sessions.host.never = {"stored"}
    assert sessions.ask_request(PREFIX + ANSWER + text(5, 300)).cached_tokens == 2_055
    assert before.superseded
    for seed in (6, 7):
        sessions.ask(text(seed, 2_900))
    assert not before.superseded
    assert sessions.ask_request(PREFIX + ANSWER + text(5, 300)).host_cached_tokens == 2_055


def test_two_requests_wait_for_one_copy() -> None:
    sessions = HostSessions().served()
    first, second = sessions.add(PREFIX + text(5, 10)), sessions.add(PREFIX + text(6, 10))
    while sessions.scheduler.has_requests:
        sessions.step()
    assert (first.cached_tokens, second.cached_tokens) == (2_016, 2_016)
    assert sessions.scheduler.stats().tier("host").restored_bytes_total <= PUBLISHED.held_bytes(2_100) + 3 * 32


def test_one_client_does_not_push_everybody_out_of_host_memory() -> None:
    sessions = HostSessions(host_requests=4)
    sessions.ask_request(PREFIX, client="a")
    for seed in range(5, 12):
        sessions.ask_request(text(seed, 2_900), client="b")
    assert sessions.scheduler.stats().tier("host").evictions_total > 2
    assert sessions.ask_request(PREFIX, client="a").host_cached_tokens == 2_015


def test_more_sessions_than_the_pool_holds_are_served_from_host_memory() -> None:
    """By turns. Two have had several turns before: their prefixes have each other's pages, so that none of them alone
    frees any, and yet they go first once host memory has them. Else those that it does not have yet would go."""
    sessions = HostSessions(pool_requests=6, host_requests=13)
    histories = [text(seed, 2_000) for seed in range(12)]

    def turn(number: int) -> int:
        request = sessions.ask_request(histories[number], text(50 + number, 16))
        histories[number] = histories[number] + text(100 * number + len(histories[number]), 30)
        return request.cached_tokens

    assert [turn(number) for number in (0, 1, 0, 0, 1, 1)] == [0, 0, 2_000, 2_030, 2_000, 2_030]
    assert [turn(number) for number in range(2, 12)] == [0] * 10
    for _ in range(2):
        assert min(turn(number) for number in range(12)) >= 2_000
    assert sessions.scheduler.stats().prompt_tokens_host_total > 12 * 2_000


@pytest.mark.parametrize("drafts", [3, 16])
def test_hits_from_host_memory_with_drafts_are_hits_without(drafts: int) -> None:
    """Sessions by turns, each of which the pool forgets before its next one; answers go on over rows that came back,
    and what is read is checked row by row."""

    def hits(k: int) -> list[tuple[int, int]]:
        sessions, dice, found = HostSessions(drafts=k), Random(drafts), []
        histories = [text(seed, 1_900) for seed in range(3)]
        for turn in range(3):
            for number, history in enumerate(histories):
                cut = len(history) - (dice.choice([0, 0, 11]) if turn else 0)
                prompt, answer = (
                    history[:cut] + text(10 * turn + number, 30),
                    text(100 * turn + number, dice.randint(20, 90)),
                )
                request = sessions.ask_request(prompt, answer)
                found.append((request.cached_tokens, request.host_cached_tokens))
                histories[number] = prompt + answer
        assert k == 0 or sessions.device.accepted > 100
        return found

    without = hits(0)
    assert sum(host > 1_000 for _, host in without) == 6
    assert hits(drafts) == without
