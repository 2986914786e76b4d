"""What a failed step or a request without numbers costs: those concerned, and nobody else."""

from __future__ import annotations

import pytest
from scheduled import Driver, Step
from stamped_device import StampedDevice, StampedModel

from modelserve.model.architecture import LayerKind
from modelserve_worker.batch import NOT_A_NUMBER, TableUpdates
from modelserve_worker.request import FinishReason, Request, SamplingParams
from modelserve_worker.scheduling.admission import SchedulerLimits
from modelserve_worker.scheduling.scheduler import Scheduler

MODEL = StampedModel((LayerKind.SLIDING, LayerKind.GLOBAL))
GEOMETRY = MODEL.geometry(window=4, global_tokens=4, sliding_tokens=2, global_row=2, sliding_row=3)
PLENTY = 100 * GEOMETRY.held_bytes(100)


def driver(budget: int, of: type[Scheduler] = Scheduler) -> Driver:
    return Driver(of(SchedulerLimits(budget, 8, 100, ()), GEOMETRY, PLENTY))


class NeverRecomputing(Scheduler):
    def _preempt(self, *_: object, **__: object) -> None:
        pass


def request(name: str, prompt: int, max_tokens: int = 9) -> Request:
    return Request(name, tuple(range(10, 10 + prompt)), SamplingParams(seed=0, max_tokens=max_tokens))


def entries(updates: TableUpdates) -> set[tuple[int, int]]:
    """(slot, index) of each update."""
    return set(zip(updates.slots.tolist(), updates.indices.tolist(), strict=True))


def assert_names_every_page(step: Step, lengths: dict[int, int]) -> None:
    """The step's updates name all entries of requests of these known lengths, by slot."""
    for updates, pages in (
        (step.batch.global_updates, GEOMETRY.global_pages),
        (step.batch.sliding_updates, GEOMETRY.sliding_pages),
    ):
        assert entries(updates) == {(slot, i) for slot, length in lengths.items() for i in range(pages(length))}


def test_a_failed_step_ends_its_requests_and_the_next_names_every_page_of_the_others() -> None:
    target = driver(budget=6)
    target.add(request("a", prompt=5))
    target.answer(target.schedule())
    target.add(request("b", prompt=30), request("c", prompt=2))
    failed = target.schedule()
    assert failed.lengths == {"a": 1, "b": 3, "c": 2}
    target.add(request("d", prompt=2))
    outputs = target.fail(failed)
    assert set(outputs) == {"a", "b", "c"}
    assert {output.error for output in outputs.values()} == {"out of order"}
    step = target.schedule()
    assert step.lengths == {"d": 2}
    assert step["d"].admitted is not None
    assert target.answer(step)["d"].token_ids == (7,)
    assert target.scheduler.stats().failed_steps_total == 1


def test_a_request_that_only_waits_in_a_failed_step_is_sent_again_and_goes_on() -> None:
    """Four prompts, a budget that three of them take: the fourth holds its slot and pages, and has sent nothing yet."""
    target = driver(budget=4)
    target.add(request("a", prompt=40), request("b", prompt=2), request("c", prompt=30))
    first = target.schedule()
    assert first.lengths == {"a": 2, "b": 2}
    assert [admitted.request_id for admitted in first.batch.admitted] == ["a", "b"]
    assert target.scheduler.stats().num_running == 3, "c has its pages"
    assert set(target.fail(first)) == {"a", "b"}
    second = target.schedule()
    assert second.lengths == {"c": 4}
    assert second["c"].admitted is not None
    assert_names_every_page(second, {second["c"].slot: 30})
    assert target.scheduler.stats().preemptions_total == 0


def test_every_entry_is_sent_again_when_the_resending_step_fails_too() -> None:
    target = driver(budget=4)
    target.add(request("a", prompt=40), request("b", prompt=2), request("c", prompt=30), request("d", prompt=35))
    target.fail(target.schedule())
    second = target.schedule()
    assert second.lengths == {"c": 4}
    slots = {running: 30 if running == second["c"].slot else 35 for running in (2, 3)}
    assert_names_every_page(second, slots)
    assert set(target.fail(second)) == {"c"}
    third = target.schedule()
    assert third.lengths == {"d": 4}
    assert_names_every_page(third, {3: 35})
    target.answer(third)
    assert entries(target.schedule().batch.global_updates) == set(), "once is enough"


def test_a_step_behind_a_failed_one_makes_everybody_else_recompute() -> None:
    """It ran on tables that nobody knows, and may have written over any page."""
    target = driver(budget=4)
    target.add(request("a", prompt=4), request("b", prompt=4))
    first, second = target.schedule(), target.schedule()
    assert (first.lengths, second.lengths) == ({"a": 4}, {"a": 1, "b": 3})
    (output,) = target.fail(first).values()
    assert (output.request_id, output.finish_reason, output.error) == ("a", FinishReason.ERROR, "out of order")
    assert target.answer(second) == {}
    third = target.schedule()
    assert (third["b"].start, third["b"].end) == (0, 4)
    assert third["b"].admitted is not None
    assert target.answer(third)["b"].token_ids == (7,)
    assert target.scheduler.stats().failed_steps_total == 1


def about_to_move_pages() -> tuple[Driver, Step]:
    """ "a" grows into bytes behind the pages of "waits", which is running and not in the step."""
    pool = GEOMETRY.held_bytes(6) + GEOMETRY.held_bytes(12) + GEOMETRY.held_bytes(60) + GEOMETRY.held_bytes(80)
    target = Driver(Scheduler(SchedulerLimits(4, 4, 100, ()), GEOMETRY, pool))
    target.add(request("gone", prompt=6, max_tokens=1), request("a", prompt=8, max_tokens=17))
    target.add(request("long", prompt=60, max_tokens=1), request("waits", prompt=80, max_tokens=1))
    while True:
        step = target.schedule()
        if step.batch.page_moves:
            assert set(step.shares) == {"a", "long"}
            return target, step
        target.answer(step)


def test_a_move_is_told_to_the_table_of_a_request_that_is_not_in_the_step() -> None:
    target, step = about_to_move_pages()
    others = entries(step.batch.sliding_updates)
    assert {slot for slot, _ in others} == {3}, "the slot of the youngest"
    assert len(others) == len(step.batch.page_moves) == 2
    target.answer(step)
    while "waits" not in step.shares:
        step = target.schedule()
        target.answer(step)
    assert (step["waits"].start, step["waits"].admitted is None) == (0, False), "it had computed nothing before"
    assert target.scheduler.stats().preemptions_total == 0


@pytest.mark.parametrize("recompute", [True, False])
def test_what_a_step_behind_a_failed_one_computed_is_of_no_use(
    recompute: bool,
) -> None:
    """On a device whose tables are lost, the recomputed request says its text and one that goes on does not."""
    target = driver(4, Scheduler if recompute else NeverRecomputing)
    target.add(request("a", prompt=4), request("b", prompt=4, max_tokens=1))
    device = StampedDevice(MODEL, GEOMETRY, PLENTY, lambda _, position: 10 + position, slots=8, longest=100)
    first, second = target.schedule(), target.schedule()
    device.lose(first.batch, behind=[second.batch])
    assert set(target.fail(first)) == {"a"}
    assert target.scheduler.update(device.execute(second.batch)) == []
    (output,) = target.scheduler.update(device.execute(target.schedule().batch))
    assert output.request_id == "b"
    assert (output.token_ids == (14,)) == recompute


def test_moves_of_a_failed_step_make_everybody_else_recompute() -> None:
    target, step = about_to_move_pages()
    assert set(target.fail(step)) == {"a", "long"}
    assert target.scheduler.stats().preemptions_total == 1
    again = target.schedule()
    assert (again["waits"].start, again["waits"].end) == (0, 4)
    assert again["waits"].admitted is not None
    assert_names_every_page(again, {again["waits"].slot: 80})
    while target.scheduler.has_requests:
        outputs = target.answer(again)
        again = target.poll() or again
    assert outputs["waits"].finish_reason is FinishReason.LENGTH


def test_a_request_without_numbers_ends_alone() -> None:
    target = driver(budget=16)
    target.add(*(request(name, prompt=4) for name in "abc"))
    first, second = target.schedule(), target.schedule()
    outputs = target.answer(first, b=NOT_A_NUMBER)
    assert outputs["a"].token_ids == outputs["c"].token_ids == (7,)
    assert (outputs["b"].token_ids, outputs["b"].finish_reason) == ((), FinishReason.ERROR)
    assert "the logits of this request are not numbers (NaN) at position 4" in (outputs["b"].error or "")
    third = target.schedule()
    assert third.lengths == {"a": 1, "c": 1}
    assert set(target.answer(second, b=NOT_A_NUMBER)) == {"a", "c"}, "what it sampled after that is discarded"
    assert set(target.answer(third)) == {"a", "c"}
    stats = target.scheduler.stats()
    assert (stats.failed_steps_total, stats.generation_tokens_total, stats.prompt_tokens_total) == (0, 6, 8)
    assert stats.held_bytes == 2 * GEOMETRY.held_bytes(6)
