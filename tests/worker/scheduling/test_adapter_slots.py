"""Who gets a slot for an adapter, who gives one up, and who waits: nobody for ever, and nobody for somebody else's."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from architecture_of import architecture_of

from modelserve.errors import InvalidInput
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout, cache_geometry
from modelserve_worker.batch import AdapterPlacing, SampledTokens
from modelserve_worker.request import Request, SamplingParams
from modelserve_worker.scheduling.adapter_slots import NO_SLOT, AdapterSlotTable
from modelserve_worker.scheduling.admission import SchedulerLimits
from modelserve_worker.scheduling.scheduler import Scheduler
from modelserve_worker.scheduling.stats import AdapterDrafts

NOBODY = np.zeros(0, dtype=np.int32)


def request(name: str, adapter: str = "") -> Request:
    return Request(name, [1, 2], SamplingParams(seed=0, max_tokens=1), adapter=adapter)


def table(slots: int, *adapters: str) -> AdapterSlotTable:
    made = AdapterSlotTable(slots)
    for each in adapters:
        made.add(each, f"/adapters/{each}")
    return made


def run(slots: AdapterSlotTable, *requests: Request) -> list[int]:
    """Requests that find a slot, and run."""
    for each in requests:
        assert slots.seat(each)
    return [slots.enter(each) for each in requests]


def test_an_adapter_is_placed_once_and_the_one_asked_for_the_longest_ago_goes() -> None:
    slots = table(2, "a", "b", "c")
    one, two = request("1", "a"), request("2", "b")
    places = run(slots, one, two)
    told = slots.of_step(np.array(places, dtype=np.int32))
    assert told.adapter_placings == tuple(
        AdapterPlacing(place, name, f"/adapters/{name}") for place, name in zip(places, "ab", strict=True)
    )
    again = request("3", "a")
    assert run(slots, again) == places[:1]  # a was asked for last
    for each in (one, two, again):
        slots.leave(each)
    (place,) = run(slots, request("4", "c"))
    assert place == places[1]
    assert [each.digest for each in slots.of_step(NOBODY).adapter_placings] == ["c"]


def test_a_claimed_adapter_takes_no_more_while_others_and_the_base_go_on() -> None:
    slots = table(2, "a", "b", "c")
    first, second = request("1", "a"), request("2", "b")
    run(slots, first, second)
    waits = request("3", "c")
    assert not slots.seat(waits)
    late = request("4", "a")
    assert not slots.seat(late)  # it would keep the slot that c waits for
    assert run(slots, request("5", "b"), request("6")) == [slots.enter(request("7", "b")), NO_SLOT]
    assert slots.take_waiting() == []
    slots.leave(first)
    assert slots.take_waiting() == ["3", "4"]
    run(slots, waits)
    assert not slots.seat(late)


def test_whoever_leaves_the_queue_claims_nothing() -> None:
    slots = table(1, "a", "b")
    run(slots, request("1", "a"))
    assert not slots.seat(request("2", "b"))
    slots.forget("2")
    run(slots, request("3", "a"))


def test_a_failed_step_has_all_slots_placed_again_and_what_is_gone_is_told_once() -> None:
    slots = table(2, "a", "b")
    run(slots, request("1", "a"), request("2", "b"))
    before = slots.of_step(NOBODY).adapter_placings
    slots.resend()
    assert slots.of_step(NOBODY).adapter_placings == before
    slots.leave(request("2", "b"))
    slots.remove("b")
    assert slots.of_step(NOBODY).adapters_gone == ("b",)
    assert slots.of_step(NOBODY).adapters_gone == ()
    with pytest.raises(InvalidInput, match="'b' is not loaded"):
        slots.check(request("3", "b"))
    slots.check(request("4"))
    slots.remove("a")
    slots.add("a", "/adapters/a")  # of the same files, before a step: what is in host memory stays
    assert slots.of_step(NOBODY).adapters_gone == ()


@pytest.mark.parametrize("seed", range(20))
def test_in_random_traffic_nobody_waits_for_ever_and_no_used_slot_changes(seed: int) -> None:
    draw = random.Random(seed)
    names = [f"adapter-{number}" for number in range(9)]
    slots = table(3, *names)
    queue, running, held, waited = [], {}, {}, {}
    for step in range(600):
        if step < 400:  # mostly one tenant's adapters, many of them
            name = draw.choice(["", names[0], *names[1:] * 3])
            queue.append(request(str(step), name))
        ready = set(slots.take_waiting())
        queue.sort(key=lambda each: (each.request_id not in ready, int(each.request_id)))
        aside = []
        for each in queue:
            if each.request_id in waited and each.request_id not in ready:
                aside.append(each)
            elif slots.seat(each):
                waited.pop(each.request_id, None)
                running[each.request_id] = each, step + draw.randrange(1, 12), slots.enter(each)
            else:
                assert each.adapter
                waited[each.request_id] = waited.get(each.request_id, step)
                aside.append(each)
        queue = aside
        for placing in slots.of_step(NOBODY).adapter_placings:
            held[placing.slot] = placing.digest
        for each, until, slot in list(running.values()):
            assert slot == NO_SLOT or held[slot] == each.adapter
            if until <= step:
                slots.leave(each)
                del running[each.request_id]
        assert all(step - since < 300 for since in waited.values())
    assert not queue
    assert not running


def test_a_pinned_adapter_keeps_its_slot_while_others_come_and_go() -> None:
    slots = table(2, "a", "b", "c")
    slots.pin({"a"})
    (kept,) = run(slots, first := request("1", "a"))
    slots.leave(first)  # idle, and asked for the longest ago
    for number, name in enumerate(("b", "c", "b")):
        (place,) = run(slots, one := request(f"other-{number}", name))
        assert place != kept
        slots.leave(one)
    again = request("2", "a")
    assert run(slots, again) == [kept]
    assert [each.digest for each in slots.of_step(NOBODY).adapter_placings] == ["a", "b", "c", "b"]
    slots.leave(again)
    slots.pin(())
    run(slots, request("3", "b"))
    assert run(slots, request("4", "c")) == [kept]


def test_who_waits_claims_none_that_is_pinned() -> None:
    slots = table(2, "a", "b", "c")
    slots.pin({"a"})
    pinned, other, waits = request("1", "a"), request("2", "b"), request("3", "c")
    run(slots, pinned, other)
    assert not slots.seat(waits)
    assert slots.seat(request("4", "a")), "it takes requests as before"
    assert not slots.seat(request("5", "b")), "it is claimed"
    slots.pin({"b"})  # who is pinned while he is claimed is claimed no more
    assert slots.take_waiting() == ["3", "5"]
    assert slots.seat(request("6", "b"))
    assert not slots.seat(waits)
    assert not slots.seat(request("7", "a"))
    slots.leave(pinned)
    assert slots.take_waiting()
    assert slots.seat(waits)


def test_drafts_are_counted_by_adapter_as_long_as_it_is_loaded() -> None:
    """Of two requests, one with an adapter: its first draft of two is right, the other's both are."""
    geometry = cache_geometry(
        architecture_of("31B"), dtype=KVCacheDtype.BFLOAT16, layout=KVCacheLayout.V_ONLY, tensor_parallel_size=1
    )
    limits = SchedulerLimits(64, 2, 64, ())
    scheduler = Scheduler(limits, geometry, 4 * geometry.held_bytes(64), draft_tokens=2, adapter_slots=1)
    scheduler.adapters.add("a", "/adapters/a")
    for name in ("a", ""):
        scheduler.add(replace(request(f"of {name}", name), sampling=SamplingParams(seed=0, max_tokens=20)))
    first = scheduler.schedule()
    assert first is not None
    drafts, proposed = np.full((2, 2), 7, dtype=np.int32), np.full(2, 2, dtype=np.int32)
    ones = np.ones(2, dtype=np.int32)
    scheduler.update(SampledTokens(first.step, np.array([7, 7], dtype=np.int32), {}, ones, drafts, proposed))
    assert scheduler.stats().adapter_drafts == ()
    second = scheduler.schedule()
    assert second is not None
    assert second.drawn.tolist() == [3, 3]
    right = np.array([2, 3] if second.adapters[0] == 0 else [3, 2], dtype=np.int32)
    ids = np.full(5, 7, dtype=np.int32)
    scheduler.update(SampledTokens(second.step, ids, {}, right, drafts, 0 * proposed))
    assert scheduler.stats().adapter_drafts == (AdapterDrafts("a", 2, 1),)
    assert (scheduler.stats().draft_tokens_total, sum(scheduler.stats().accepted_per_position)) == (4, 3)
    scheduler.abort("of a")
    scheduler.adapters.remove("a")
    assert scheduler.stats().adapter_drafts == ()
