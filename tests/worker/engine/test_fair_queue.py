"""Clients and calls take turns at the engine, whatever one of them sends."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from modelserve_worker.engine.fair_queue import FairLimits, FairQueue
from modelserve_worker.engine_client import EngineBusy
from modelserve_worker.request import Request, SamplingParams


def _requests(name: str, count: int, *, tokens: int = 4) -> list[Request]:
    return [Request(f"{name}-{number}", (5,) * tokens, SamplingParams(0, 9)) for number in range(count)]


def _names(requests: list[Request]) -> list[str]:
    return [request.request_id.rpartition("-")[0] for request in requests]


def _run(queue: FairQueue, taken: list[Request]) -> None:
    for request in taken:
        queue.started(request.request_id)


def test_a_call_of_many_prompts_leaves_places_and_shares_what_comes_free() -> None:
    queue = FairQueue(FairLimits(places=32, step_tokens=2048, max_waiting=1024))
    queue.add("a", _requests("big", 512))
    first = queue.take()
    assert len(first) == 30, "two places of 32 stay free"
    _run(queue, first)
    queue.add("a", _requests("small", 1))
    assert _names(queue.take()) == ["small"], "at once, though 482 came before it"
    queue.add("a", _requests("other", 20))
    assert set(_names(queue.take())) == {"other"}
    for request in first[:10]:
        queue.ended(request.request_id)
    later = Counter(_names(queue.take()))
    assert later["big"] >= 3 <= later["other"], "they take turns"


def test_a_client_of_many_calls_counts_as_one_while_others_are_about() -> None:
    now = 0.0
    queue = FairQueue(FairLimits(places=32, step_tokens=2048, max_waiting=1024), clock=lambda: now)
    for number in range(100):
        queue.add("a", _requests(f"stream{number}", 1))
    alone = queue.take()
    assert len(alone) == 34, "alone it may have all places"
    _run(queue, alone)
    queue.add("b", _requests("mine", 1))
    queue.ended(alone[0].request_id)
    assert _names(queue.take()) == ["mine"], "before the 66 that came before it"
    for request in alone[1:10]:
        queue.ended(request.request_id)
    assert len(queue.take()) == 5, "two places stay free while the other client is about"
    now = 100.0
    queue.add("a", _requests("late", 1))
    assert len(queue.take()) == 4, "and no longer than that"


@pytest.mark.parametrize("one_client", [True, False])
def test_whoever_runs_a_few_and_asks_for_one_more_finds_a_place(one_client: bool) -> None:
    """Four streams run when the crowd comes: the short requests beside them wait for nobody's end."""
    queue = FairQueue(FairLimits(places=32, step_tokens=2048, max_waiting=1024))
    own = "b" if not one_client else "a"
    for number in range(4):
        queue.add(own, _requests(f"stream{number}", 1))
    _run(queue, queue.take())
    queue.add("a", _requests("big", 512))
    _run(queue, queue.take())
    for number in range(50):
        queue.add(own, _requests(f"short{number}", 1))
        (short,) = queue.take()
        assert short.request_id == f"short{number}-0", "at once"
        queue.started(short.request_id)
        queue.ended(short.request_id)
        assert queue.take() == [], "the place stays free for the next one"


def test_long_prompts_of_one_client_do_not_stand_before_a_short_one_of_another() -> None:
    queue = FairQueue(FairLimits(places=64, step_tokens=1000, max_waiting=1024))
    for number in range(40):
        queue.add("a", _requests(f"long{number}", 1, tokens=5000))
    assert len(queue.take()) == 8
    queue.add("b", _requests("short", 1))
    assert _names(queue.take()) == ["short"]


def test_a_full_queue_takes_no_more_from_who_filled_it() -> None:
    queue = FairQueue(FairLimits(places=2, step_tokens=100, max_waiting=10))
    queue.add("a", _requests("whole", 50))
    queue.take()
    with pytest.raises(EngineBusy, match="49 requests are waiting already \\(the limit is 10\\)"):
        queue.add("a", _requests("more", 1))
    queue.add("b", _requests("mine", 5))
    with pytest.raises(EngineBusy):
        queue.add("b", _requests("again", 1))
    assert queue.num_waiting == 54


def test_only_those_are_held_back_that_have_a_place() -> None:
    queue = FairQueue(FairLimits(places=12, step_tokens=1000, max_waiting=1024))
    queue.add("a", _requests("long", 20, tokens=5000))
    assert queue.held_back_tokens == 12_000, "of each a step's"
    sent = queue.take()
    assert (len(sent), queue.num_waiting) == (8, 12)
    assert queue.held_back_tokens == 4000, "four more have a place; the others wait for answers to end"
    for number in range(8, 19):
        assert queue.remove(f"long-{number}")
    assert (queue.num_waiting, queue.held_back_tokens) == (1, 1000), "who left is in no number"
    assert queue.remove("long-19")
    assert queue.held_back_tokens == 0


def test_what_leaves_the_queue_is_never_sent() -> None:
    queue = FairQueue(FairLimits(places=1, step_tokens=100, max_waiting=10))
    queue.add("a", _requests("x", 4))
    assert [request.request_id for request in queue.take()] == ["x-0"]
    assert not queue.remove("x-0"), "the engine has it"
    assert queue.remove("x-1")
    assert not queue.remove("x-1")
    queue.ended("x-0")
    assert [request.request_id for request in queue.take()] == ["x-2"]


@pytest.mark.parametrize("seed", range(20))
def test_everything_is_sent_once_and_places_are_kept(seed: int) -> None:
    rng = random.Random(seed)
    limits = FairLimits(places=rng.randint(1, 12), step_tokens=rng.randint(1, 50), max_waiting=10_000)
    queue = FairQueue(limits, clock=lambda: 0.0)
    added: set[str] = set()
    sent: list[str] = []
    running: list[str] = []
    for turn in range(300):
        if rng.random() < 0.3:
            call = _requests(f"c{turn}", rng.randint(1, 8), tokens=rng.randint(1, 60))
            queue.add(rng.choice("abc"), call)
            added |= {request.request_id for request in call}
        if added and rng.random() < 0.1:
            name = rng.choice(sorted(added))
            if queue.remove(name):
                added.discard(name)
        taken = [request.request_id for request in queue.take()]
        sent += taken
        running += taken
        assert len(running) <= limits.places + limits.reserve
        assert running or not queue.num_waiting, "an idle engine is given work"
        most = limits.step_tokens * min(queue.num_waiting, max(0, limits.places - len(running)))
        assert 0 <= queue.held_back_tokens <= most
        assert (queue.held_back_tokens > 0) == (most > 0)
        for name in rng.sample(running, rng.randint(0, len(running))):
            if rng.random() < 0.5:
                queue.started(name)
            else:
                queue.ended(name)
                running.remove(name)
    while running:
        queue.ended(running.pop())
        taken = [request.request_id for request in queue.take()]
        sent += taken
        running += taken
    assert queue.num_waiting == queue.held_back_tokens == 0
    assert sorted(sent) == sorted(added)
