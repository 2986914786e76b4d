"""What the scheduler puts into a step, and what it makes of the answers."""

from __future__ import annotations

import pytest
from stamped_device import StampedModel

from modelserve.architecture import LayerKind
from modelserve.errors import InvalidInput
from modelserve_worker.batch import IN_FLIGHT, SampledTokens, ScheduledBatch
from modelserve_worker.request import FinishReason, Request, RequestOutput, SampledToken, SamplingParams
from modelserve_worker.scheduling.admission import SchedulerLimits
from modelserve_worker.scheduling.scheduler import Scheduler

EOS = 1
GEOMETRY = StampedModel((LayerKind.SLIDING, LayerKind.GLOBAL)).geometry(
    window=4, global_tokens=4, sliding_tokens=2, global_row=2, sliding_row=3
)
PLENTY = 100 * GEOMETRY.held_bytes(100)


def scheduler(*, budget: int = 16, seqs: int = 8, max_model_len: int = 100, pool: int = PLENTY) -> Scheduler:
    return Scheduler(SchedulerLimits(budget, seqs, max_model_len, (EOS,)), GEOMETRY, pool)


def request(name: str, prompt: int = 3, max_tokens: int = 5, **sampling: object) -> Request:
    return Request(name, tuple(range(10, 10 + prompt)), SamplingParams(seed=0, max_tokens=max_tokens, **sampling))


def shares(batch: ScheduledBatch | None) -> dict[str, int]:
    """Tokens of each request of a step, in order."""
    assert batch is not None
    return {share.request_id: len(share.token_ids) for share in batch.requests}


def answer(target: Scheduler, batch: ScheduledBatch | None, token: int = 7) -> dict[str, RequestOutput]:
    assert batch is not None
    sampled = {share.request_id: SampledToken(token) for share in batch.requests if share.samples}
    outputs = target.update(SampledTokens(batch.step, sampled))
    target.check_integrity()
    return {output.request_id: output for output in outputs}


def test_prompts_are_cut_into_chunks_and_decodes_come_first() -> None:
    target = scheduler(budget=8)
    target.add(request("a", prompt=3))
    target.add(request("b", prompt=11))
    target.add(request("c", prompt=4))
    first = target.schedule()
    assert shares(first) == {"a": 3, "b": 5}
    assert [share.samples for share in first.requests] == [True, False]
    assert list(answer(target, first)) == ["a"]
    second = target.schedule()
    assert shares(second) == {"a": 1, "b": 6, "c": 1} or list(shares(second)) == ["a", "c", "b"]
    assert second.num_tokens == 8
    assert {share.request_id: (share.start, share.end) for share in second.requests}["b"] == (5, 11)
    answer(target, second)
    assert shares(target.schedule()) == {"a": 1, "b": 1, "c": 3}


def test_long_prompts_and_decodes_do_not_starve_each_other() -> None:
    target = scheduler(budget=4, seqs=8)
    for name in "abc":
        target.add(request(name, prompt=1, max_tokens=60))
    for i in range(4):
        target.add(request(f"long{i}", prompt=40, max_tokens=2))
    tokens = dict.fromkeys("abc", 0)
    finished: set[str] = set()
    for _ in range(60):
        batch = target.schedule()
        if batch is None:
            break
        assert batch.num_tokens <= 4
        outputs = answer(target, batch)
        for name in tokens:
            tokens[name] += len(outputs[name].tokens) if name in outputs else 0
        finished |= {name for name, output in outputs.items() if output.finish_reason}
    assert min(tokens.values()) == 60, "each decode moved in every step"
    assert "long0" in finished, "and a prefill got what the decodes left"


def test_the_next_step_is_scheduled_before_the_answer_of_the_last() -> None:
    target = scheduler()
    target.add(request("a", prompt=3, max_tokens=3))
    first = target.schedule()
    second = target.schedule()
    (share,) = second.requests
    assert (share.start, share.token_ids, share.num_output_tokens) == (3, (IN_FLIGHT,), 1)
    assert (first.requests[0].first_in_slot, share.first_in_slot) == (True, False)
    answer(target, first)
    third = target.schedule()
    assert third.requests[0].token_ids == (IN_FLIGHT,)
    answer(target, second)
    assert target.schedule() is None, "max_tokens is known ahead: no fourth step"
    assert answer(target, third)["a"].finish_reason is FinishReason.LENGTH
    assert target.stats().held_bytes == 0


def test_known_tokens_are_sent_when_nothing_is_in_flight() -> None:
    target = scheduler()
    target.add(request("a"))
    answer(target, target.schedule(), token=42)
    assert target.schedule().requests[0].token_ids == (42,)


def test_a_stop_is_found_one_step_late_and_its_pages_return_with_the_last_step() -> None:
    target = scheduler()
    target.add(request("a", max_tokens=20))
    first, second = target.schedule(), target.schedule()
    output = answer(target, first, token=EOS)["a"]
    assert (output.finish_reason, output.stop_token_id) == (FinishReason.STOP, EOS)
    assert target.stats().held_bytes > 0
    assert target.schedule() is None
    assert answer(target, second) == {}, "the token after the stop is discarded"
    assert target.stats().held_bytes == 0


@pytest.mark.parametrize(
    ("sampling", "token", "expected"),
    [
        ({}, EOS, [FinishReason.STOP]),
        ({"ignore_eos": True}, EOS, [None, None, FinishReason.LENGTH]),
        ({"stop_token_ids": (9,)}, 9, [FinishReason.STOP]),
        ({"ignore_eos": True, "stop_token_ids": (EOS,)}, EOS, [FinishReason.STOP]),
        ({"min_tokens": 1}, EOS, [None, FinishReason.STOP]),
        ({}, 9, [None, None, FinishReason.LENGTH]),
    ],
)
def test_why_requests_end(sampling: dict[str, object], token: int, expected: list[FinishReason | None]) -> None:
    target = scheduler()
    target.add(request("a", max_tokens=3, **sampling))
    reasons = []
    while batch := target.schedule():
        reasons.append(answer(target, batch, token)["a"].finish_reason)
    assert reasons == expected


def test_the_context_ends_a_request() -> None:
    target = scheduler(max_model_len=6)
    target.add(request("a", prompt=4, max_tokens=50))
    outputs = []
    while batch := target.schedule():
        outputs.append(answer(target, batch)["a"].finish_reason)
    assert outputs == [None, FinishReason.LENGTH]


def test_requests_that_can_never_run_are_refused_with_the_arithmetic() -> None:
    target = scheduler(max_model_len=50, pool=GEOMETRY.held_bytes(20))
    target.add(request("fits", prompt=11, max_tokens=10))
    with pytest.raises(
        InvalidInput, match=r"hold 66 bytes of cache \(6 global pages of 8 bytes and 3 sliding pages of 6"
    ) as refusal:
        target.add(request("a", prompt=12, max_tokens=10))
    assert f"the pool has {GEOMETRY.held_bytes(20)}; keep prompt and max_tokens within 21 tokens" in str(refusal.value)
    with pytest.raises(InvalidInput, match=r"50 tokens and needs room for at least 1 more.*shorten the prompt by 1"):
        target.add(request("b", prompt=50, max_tokens=1))
    with pytest.raises(InvalidInput, match="no tokens"):
        target.add(request("c", prompt=0))
    with pytest.raises(InvalidInput, match="max_tokens is 0"):
        target.add(request("d", max_tokens=0))
    with pytest.raises(InvalidInput, match="'fits' is in use"):
        target.add(request("fits"))


def test_slots_limit_how_many_run() -> None:
    target = scheduler(seqs=2)
    for name in "abc":
        target.add(request(name, max_tokens=1))
    batch = target.schedule()
    assert list(shares(batch)) == ["a", "b"]
    assert {share.slot for share in batch.requests} == {0, 1}
    assert target.schedule() is None
    answer(target, batch)
    assert shares(target.schedule()) == {"c": 3}


def test_abort_ends_a_request_wherever_it_is() -> None:
    target = scheduler(seqs=1)
    target.add(request("a"))
    target.add(request("b"))
    batch = target.schedule()
    for name in "ab":
        assert target.abort(name) == RequestOutput(name, (), FinishReason.ABORT)
        assert target.abort(name) is None
    assert answer(target, batch) == {}
    assert not target.has_requests
    assert target.stats().held_bytes == 0


def preempted() -> tuple[Scheduler, ScheduledBatch]:
    """ "a" needed a page more than the pool has while both had a token in flight: "b", the younger, is preempted."""
    target = scheduler(pool=2 * GEOMETRY.held_bytes(8))
    target.add(request("a", prompt=4, max_tokens=12))
    target.add(request("b", prompt=4, max_tokens=12))
    pending = target.schedule()
    while batch := target.schedule():
        answer(target, pending, token=50)
        pending = batch
    assert target.stats().preemptions_total == 1
    return target, pending


def run_on(target: Scheduler, pending: ScheduledBatch | None) -> list[ScheduledBatch]:
    """Every further step until all requests have ended, one step ahead of the answers."""
    steps = []
    while target.has_requests:
        batch = target.schedule()
        if pending:
            answer(target, pending, token=50)
        if batch:
            steps.append(batch)
        pending = batch
    return steps


def test_the_youngest_is_preempted_and_recomputed_from_all_its_tokens() -> None:
    target, pending = preempted()
    assert target.stats().held_bytes == 2 * GEOMETRY.held_bytes(8), "its pages are in use until the step is answered"
    assert list(answer(target, pending, token=50)) == ["a"], "its token in flight is discarded"
    assert target.stats().held_bytes == GEOMETRY.held_bytes(8)
    sampled_before = pending.requests[1].num_output_tokens
    steps = run_on(target, None)
    assert shares(steps[0]) == {"a": 1}
    share = next(share for step in steps for share in step.requests if share.request_id == "b")
    assert (share.start, share.first_in_slot, share.samples) == (0, True, True)
    assert share.prompt_token_ids == (10, 11, 12, 13)
    assert share.output_token_ids == (50,) * sampled_before
    assert share.token_ids == share.prompt_token_ids + share.output_token_ids
    assert share.num_output_tokens == sampled_before


def test_the_preempted_request_goes_to_the_front() -> None:
    target, pending = preempted()
    target.add(request("c", prompt=2, max_tokens=1))
    steps = run_on(target, pending)
    assert [share.request_id for step in steps for share in step.requests if share.first_in_slot] == ["b", "c"]


def test_the_youngest_waits_instead_of_preempting_an_older_request() -> None:
    target = scheduler(pool=GEOMETRY.held_bytes(9) + GEOMETRY.held_bytes(8))
    target.add(request("a", prompt=4, max_tokens=9))
    target.add(request("b", prompt=4, max_tokens=9))
    steps, reasons = [], {}
    while batch := target.schedule():
        steps.append("".join(shares(batch)))
        for name, output in answer(target, batch).items():
            reasons[name] = output.finish_reason
    assert steps == ["ab"] * 5 + ["a"] * 4 + ["b"] * 4
    assert reasons == {"a": FinishReason.LENGTH, "b": FinishReason.LENGTH}
    assert target.stats().preemptions_total == 0


def test_a_failed_step_ends_its_requests_and_the_others_go_on() -> None:
    target = scheduler(budget=4)
    target.add(request("a", prompt=4))
    target.add(request("b", prompt=4))
    first, second = target.schedule(), target.schedule()
    assert shares(second) == {"a": 1, "b": 3}
    (output,) = target.fail(first.step, "out of order")
    assert (output.request_id, output.finish_reason, output.error) == ("a", FinishReason.ERROR, "out of order")
    assert answer(target, second) == {}
    target.check_integrity()
    assert shares(target.schedule()) == {"b": 1}
    assert target.stats().failed_steps_total == 1


def test_moves_of_a_failed_step_make_everybody_else_recompute() -> None:
    target = scheduler(budget=4)
    target.add(request("a", prompt=4))
    target.add(request("b", prompt=3))
    first, second = target.schedule(), target.schedule()
    target._in_flight[0].moves_pages = True
    assert [output.request_id for output in target.fail(first.step, "out of order")] == ["a"]
    assert answer(target, second) == {}, "what b sampled came from pages of unknown content"
    again = target.schedule()
    assert [(share.request_id, share.start, share.first_in_slot) for share in again.requests] == [("b", 0, True)]
    assert answer(target, again)["b"].tokens == (SampledToken(7),)


def test_stats_count_what_was_done() -> None:
    target = scheduler()
    target.add(request("a", prompt=3, max_tokens=2))
    target.add(request("b", prompt=5, max_tokens=2))
    while batch := target.schedule():
        running = target.stats()
        answer(target, batch)
    assert running.global_pages_used == 3
    assert running.held_bytes == GEOMETRY.held_bytes(4) + GEOMETRY.held_bytes(6)
    assert running.kv_cache_usage == pytest.approx(running.held_bytes / PLENTY)
    done = target.stats()
    assert (done.prompt_tokens_total, done.generation_tokens_total, done.num_running, done.held_bytes) == (8, 4, 0, 0)
