"""What the scheduler puts into a step, and what it makes of the answers."""

from __future__ import annotations

import numpy as np
import pytest
from scheduled import Driver, Step
from stamped_device import StampedModel

from modelserve.errors import InvalidInput
from modelserve.model.architecture import LayerKind
from modelserve_worker.batch import IN_FLIGHT, SampledTokens
from modelserve_worker.request import FinishReason, Request, RequestOutput, SamplingParams, TokenLogprobs
from modelserve_worker.scheduling.admission import SchedulerLimits
from modelserve_worker.scheduling.scheduler import Scheduler

EOS = 1
GEOMETRY = StampedModel((LayerKind.SLIDING, LayerKind.GLOBAL)).geometry(
    window=4, global_tokens=4, sliding_tokens=2, global_row=2, sliding_row=3
)
PLENTY = 100 * GEOMETRY.held_bytes(100)


def driver(*, budget: int = 16, seqs: int = 8, max_model_len: int = 100, pool: int = PLENTY) -> Driver:
    return Driver(Scheduler(SchedulerLimits(budget, seqs, max_model_len, (EOS,)), GEOMETRY, pool))


def request(name: str, prompt: int = 3, max_tokens: int = 5, **sampling: object) -> Request:
    return Request(name, tuple(range(10, 10 + prompt)), SamplingParams(seed=0, max_tokens=max_tokens, **sampling))


def test_prompts_are_cut_into_chunks_and_decodes_come_first() -> None:
    target = driver(budget=8)
    target.add(request("a", prompt=3), request("b", prompt=11), request("c", prompt=4))
    first = target.schedule()
    assert list(first.lengths.items()) == [("b", 1), ("a", 3), ("c", 4)], "a single token comes first"
    assert [first[name].samples for name in "abc"] == [True, False, True]
    assert list(target.answer(first)) == ["a", "c"]
    second = target.schedule()
    assert list(second.lengths.items()) == [("a", 1), ("c", 1), ("b", 6)]
    assert (second["b"].start, second["b"].end) == (1, 7)
    assert second["b"].token_ids == (11, 12, 13, 14, 15, 16)
    assert second.batch.num_tokens == 8
    target.answer(second)
    assert target.schedule().lengths == {"a": 1, "c": 1, "b": 4}


def test_long_prompts_and_decodes_do_not_starve_each_other() -> None:
    target = driver(budget=4)
    for name in "abc":
        target.add(request(name, prompt=1, max_tokens=60))
    for i in range(4):
        target.add(request(f"long{i}", prompt=40, max_tokens=2))
    tokens = dict.fromkeys("abc", 0)
    finished: set[str] = set()
    for _ in range(60):
        step = target.poll()
        if step is None:
            break
        assert step.batch.num_tokens <= 4
        outputs = target.answer(step)
        for name in tokens:
            tokens[name] += len(outputs[name].token_ids) if name in outputs else 0
        finished |= {name for name, output in outputs.items() if output.finish_reason}
    assert min(tokens.values()) == 60, "each decode moved in every step"
    assert "long0" in finished, "and a prefill got what the decodes left"


def test_the_next_step_is_scheduled_before_the_answer_of_the_last() -> None:
    target = driver()
    target.add(request("a", prompt=3, max_tokens=3))
    first, second = target.schedule(), target.schedule()
    share = second["a"]
    assert (share.start, share.token_ids, share.output_count) == (3, (IN_FLIGHT,), 1)
    assert first["a"].admitted is not None
    assert share.admitted is None, "a request is sent once per admission"
    target.answer(first)
    third = target.schedule()
    assert third["a"].token_ids == (IN_FLIGHT,)
    target.answer(second)
    assert target.poll() is None, "max_tokens is known ahead: no fourth step"
    assert target.answer(third)["a"].finish_reason is FinishReason.LENGTH
    assert target.scheduler.stats().held_bytes == 0


def test_known_tokens_are_sent_when_nothing_is_in_flight() -> None:
    target = driver()
    target.add(request("a"))
    target.answer(target.schedule(), token=42)
    assert target.schedule()["a"].token_ids == (42,)


def test_a_steady_decode_step_sends_an_update_only_where_a_page_begins() -> None:
    target = driver(seqs=3)
    target.add(*(request(name, prompt=5, max_tokens=40) for name in "abc"))
    target.answer(target.schedule())
    for start in range(5, 24):
        step = target.schedule()
        assert step.lengths == {"a": 1, "b": 1, "c": 1}
        updates = step.batch.global_updates
        if start % 4 == 0:
            assert updates.slots.tolist() == [step[name].slot for name in "abc"]
            assert updates.indices.tolist() == [start // 4] * 3
        else:
            assert len(updates.slots) == 0
        assert len(step.batch.sliding_updates.slots) == 0, "the ring of 3 pages is full from 5 tokens on"
        target.answer(step)


def test_a_stop_is_found_one_step_late_and_its_pages_return_with_the_last_step() -> None:
    target = driver()
    target.add(request("a", max_tokens=20))
    first, second = target.schedule(), target.schedule()
    output = target.answer(first, token=EOS)["a"]
    assert (output.finish_reason, output.stop_token_id) == (FinishReason.STOP, EOS)
    assert target.scheduler.stats().held_bytes > 0
    assert target.poll() is None
    assert target.answer(second) == {}, "the token after the stop is discarded"
    assert target.scheduler.stats().held_bytes == 0


def test_several_requests_end_in_the_step_in_which_an_aborted_one_retires() -> None:
    target = driver()
    target.add(*(request(name, max_tokens=20) for name in "abcd"))
    step = target.schedule()
    target.scheduler.abort("d")
    outputs = target.answer(step, a=EOS, b=EOS, c=8)
    assert {name: output.finish_reason for name, output in outputs.items()} == {
        "a": FinishReason.STOP, "b": FinishReason.STOP, "c": None,
    }  # fmt: skip
    assert target.scheduler.stats().held_bytes == GEOMETRY.held_bytes(3)


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
    target = driver()
    target.add(request("a", max_tokens=3, **sampling))
    reasons = []
    while step := target.poll():
        reasons.append(target.answer(step, token)["a"].finish_reason)
    assert reasons == expected


def test_the_context_ends_a_request() -> None:
    target = driver(max_model_len=6)
    target.add(request("a", prompt=4, max_tokens=50))
    outputs = []
    while step := target.poll():
        outputs.append(target.answer(step)["a"].finish_reason)
    assert outputs == [None, FinishReason.LENGTH]


def test_logprobs_reach_the_request_that_asked() -> None:
    target = driver()
    target.add(request("a"), request("b", prompt=30), request("c"))
    step = target.schedule()
    assert [name for name, share in step.shares.items() if share.samples] == ["a", "c"]
    logprobs = TokenLogprobs(-0.5, 1, ((9, -0.5),))
    outputs = target.scheduler.update(SampledTokens(step.batch.step, np.array([8, 9], dtype=np.int32), {1: logprobs}))
    assert [(output.request_id, output.token_ids, output.logprobs) for output in outputs] == [
        ("a", (8,), ()),
        ("c", (9,), (logprobs,)),
    ]


def test_requests_that_can_never_run_are_refused_with_the_arithmetic() -> None:
    target = driver(max_model_len=50, pool=GEOMETRY.held_bytes(20))
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
    assert target.scheduler.stats().num_waiting == 1
    assert target.schedule().lengths == {"fits": 11}, "who was accepted is not disturbed"


def test_slots_limit_how_many_run() -> None:
    target = driver(seqs=2)
    target.add(*(request(name, max_tokens=1) for name in "abc"))
    step = target.schedule()
    assert {name: share.slot for name, share in step.shares.items()} == {"a": 0, "b": 1}
    assert target.poll() is None
    target.answer(step)
    assert target.schedule().lengths == {"c": 3}


def test_abort_ends_a_request_wherever_it_is() -> None:
    target = driver(seqs=1)
    target.add(request("a"), request("b"))
    step = target.schedule()
    for name in "ab":
        assert target.scheduler.abort(name) == RequestOutput(name, (), FinishReason.ABORT)
        assert target.scheduler.abort(name) is None
    assert target.answer(step) == {}
    assert not target.scheduler.has_requests
    assert target.scheduler.stats().held_bytes == 0


def preempted() -> tuple[Driver, Step]:
    """ "a" needed a page more than the pool has while both had a token in flight: "b", the younger, is preempted."""
    target = driver(pool=2 * GEOMETRY.held_bytes(8))
    target.add(request("a", prompt=4, max_tokens=12), request("b", prompt=4, max_tokens=12))
    pending = target.schedule()
    while step := target.poll():
        target.answer(pending, token=50)
        pending = step
    assert target.scheduler.stats().preemptions_total == 1
    return target, pending


def run_on(target: Driver, pending: Step | None) -> list[Step]:
    """Every further step until all requests have ended, one step ahead of the answers."""
    steps = []
    while target.scheduler.has_requests:
        step = target.poll()
        if pending:
            target.answer(pending, token=50)
        if step:
            steps.append(step)
        pending = step
    return steps


def test_the_youngest_is_preempted_and_recomputed_from_all_its_tokens() -> None:
    target, pending = preempted()
    held = target.scheduler.stats().held_bytes
    assert held == 2 * GEOMETRY.held_bytes(8), "its pages are in use until the step is answered"
    assert list(target.answer(pending, token=50)) == ["a"], "its token in flight is discarded"
    assert target.scheduler.stats().held_bytes == GEOMETRY.held_bytes(8)
    sampled_before = pending["b"].output_count
    steps = run_on(target, None)
    assert steps[0].lengths == {"a": 1}
    share = next(step["b"] for step in steps if "b" in step.shares)
    assert (share.start, share.samples, share.output_count) == (0, True, sampled_before)
    assert share.admitted is not None
    assert share.admitted.prompt_token_ids == (10, 11, 12, 13)
    assert share.admitted.output_token_ids == (50,) * sampled_before
    assert share.token_ids == share.admitted.prompt_token_ids + share.admitted.output_token_ids


def test_the_preempted_request_goes_to_the_front() -> None:
    target, pending = preempted()
    target.add(request("c", prompt=2, max_tokens=1))
    steps = run_on(target, pending)
    assert [admitted.request_id for step in steps for admitted in step.batch.admitted] == ["b", "c"]


def test_the_youngest_waits_instead_of_preempting_an_older_request() -> None:
    target = driver(pool=GEOMETRY.held_bytes(9) + GEOMETRY.held_bytes(8))
    target.add(request("a", prompt=4, max_tokens=9), request("b", prompt=4, max_tokens=9))
    steps, reasons = [], {}
    while step := target.poll():
        steps.append("".join(step.lengths))
        for name, output in target.answer(step).items():
            reasons[name] = output.finish_reason
    assert steps == ["ab"] * 5 + ["a"] * 4 + ["b"] * 4
    assert reasons == {"a": FinishReason.LENGTH, "b": FinishReason.LENGTH}
    assert target.scheduler.stats().preemptions_total == 0


def test_stats_count_what_was_done() -> None:
    target = driver()
    target.add(request("a", prompt=3, max_tokens=2), request("b", prompt=5, max_tokens=2))
    while step := target.poll():
        running = target.scheduler.stats()
        target.answer(step)
    assert running.global_pages_used == 3
    assert running.held_bytes == GEOMETRY.held_bytes(4) + GEOMETRY.held_bytes(6)
    assert running.kv_cache_usage == pytest.approx(running.held_bytes / PLENTY)
    done = target.scheduler.stats()
    assert (done.prompt_tokens_total, done.generation_tokens_total, done.num_running, done.held_bytes) == (8, 4, 0, 0)
