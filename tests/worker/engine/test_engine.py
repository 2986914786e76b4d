"""The loop: one step ahead of the results, and what a failed step costs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from modelserve_worker.engine.engine import Engine
from modelserve_worker.engine_client import EngineDead
from modelserve_worker.request import FinishReason, Request, RequestOutput, SamplingParams


def request(name: str, prompt: int = 4, max_tokens: int = 5) -> Request:
    return Request(name, tuple(range(10, 10 + prompt)), SamplingParams(seed=0, max_tokens=max_tokens))


def run(engine: Engine) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    engine.scheduler.check_integrity()
    return outputs


def test_steps_overlap_and_say_the_same(build_engine: Callable[..., Engine], runner) -> None:
    engine = build_engine(budget=6)
    engine.scheduler.add(request("a"))
    engine.scheduler.add(request("b", prompt=7, max_tokens=2))
    outputs = run(engine)
    assert [token_id for output in outputs["a"] for token_id in output.token_ids] == [104, 105, 106, 107, 108]
    assert [token_id for output in outputs["b"] for token_id in output.token_ids] == [107, 108]
    assert all(outputs[name][-1].finish_reason is FinishReason.LENGTH for name in "ab")
    assert runner.most_in_flight == 2
    assert len(runner.batches) == 5, "no step is launched only to be discarded"


def test_the_next_step_is_launched_before_a_result_is_taken_even_when_it_is_there(
    build_engine: Callable[..., Engine], runner
) -> None:
    engine = build_engine()
    engine.scheduler.add(request("a", max_tokens=3))
    run(engine)
    assert runner.events == [
        ("launch", 1), ("launch", 2), ("result", 1), ("launch", 3), ("result", 2), ("result", 3),
    ]  # fmt: skip
    assert engine.steps_done == 3


def test_the_tokens_of_all_steps_are_those_of_prompts_and_answers(build_engine: Callable[..., Engine]) -> None:
    """The first token of an answer, which has no row of its own, included."""
    engine = build_engine(budget=6)
    for name, prompt, answer in (("a", 4, 5), ("b", 7, 2), ("c", 1, 3), ("d", 13, 1)):
        engine.scheduler.add(request(name, prompt=prompt, max_tokens=answer))
    run(engine)
    assert sum(engine.take_events().step_tokens) == (4 + 7 + 1 + 13) + (5 + 2 + 3 + 1)


def test_a_long_step_is_answered_before_the_next_is_scheduled_and_newcomers_are_in_that(
    build_engine: Callable[..., Engine], runner
) -> None:
    engine = build_engine(budget=64, mixed=8)
    engine.scheduler.add(request("long", prompt=40, max_tokens=3))
    engine.step()
    engine.scheduler.add(request("chat", prompt=3, max_tokens=3))
    (first,) = engine.step()
    assert (first.request_id, len(first.token_ids)) == ("long", 1)
    assert runner.events == [("launch", 1), ("result", 1)], "its token is told before the next step is made"
    outputs = run(engine)
    assert runner.events[2:3] == [("launch", 2)]
    assert runner.batches[1].lengths.tolist() == [1, 3], "the newcomer, and the long one's next token"
    assert runner.events[3:5] == [("launch", 3), ("result", 2)], "short steps are launched ahead as ever"
    assert [len(outputs[name]) for name in ("long", "chat")] == [2, 3], "and the long one's first"


def test_a_runner_that_does_not_launch_ahead_is_answered_at_once(build_engine: Callable[..., Engine], runner) -> None:
    runner.launches_ahead = False
    engine = build_engine()
    engine.scheduler.add(request("a", max_tokens=2))
    assert [token_id for output in engine.step() for token_id in output.token_ids] == [104]
    assert len(run(engine)["a"]) == 1
    assert runner.events == [("launch", 1), ("result", 1), ("launch", 2), ("result", 2)]


def test_steps_that_sample_nothing_count_as_done(build_engine: Callable[..., Engine]) -> None:
    engine = build_engine(budget=4)
    engine.scheduler.add(request("a", prompt=12, max_tokens=1))
    assert len(run(engine)["a"]) == 1
    assert engine.steps_done == 3


@pytest.mark.parametrize("where", ["launch_errors", "result_errors"])
def test_a_failed_step_fails_its_requests_only(build_engine: Callable[..., Engine], runner, where: str) -> None:
    getattr(runner, where)[2] = ValueError("cold solder")
    engine = build_engine(budget=4)
    engine.scheduler.add(request("a"))
    engine.scheduler.add(request("b", max_tokens=3))
    engine.scheduler.add(request("c", max_tokens=3))
    outputs = run(engine)
    assert [output.finish_reason for output in outputs["a"]] == [None, FinishReason.ERROR]
    assert outputs["a"][-1].error == outputs["b"][-1].error == "the step failed: ValueError: cold solder"
    assert [token_id for output in outputs["c"] for token_id in output.token_ids] == [104, 105, 106]
    assert engine.scheduler.stats().held_bytes == 0


def test_failures_in_a_row_end_the_engine(build_engine: Callable[..., Engine], runner) -> None:
    runner.result_errors.update(dict.fromkeys(range(3, 10), RuntimeError("illegal address")))
    engine = build_engine(budget=4)
    for i in range(8):
        engine.scheduler.add(request(f"r{i}"))
    with pytest.raises(EngineDead, match=r"3 steps failed in a row; the last: .*illegal address"):
        run(engine)


def test_a_step_that_says_the_engine_is_dead_ends_it_at_once(build_engine: Callable[..., Engine], runner) -> None:
    """A replica that has lost a rank must not take two more batches of requests down before it is replaced."""
    runner.result_errors[2] = EngineDead("modelserve-rank-1 ended")
    engine = build_engine()
    engine.scheduler.add(request("a"))
    with pytest.raises(EngineDead, match="modelserve-rank-1 ended"):
        run(engine)


def test_a_success_between_failures_forgives_them(build_engine: Callable[..., Engine], runner) -> None:
    runner.result_errors.update(dict.fromkeys((1, 2, 4, 5), RuntimeError("loose contact")))
    engine = build_engine(budget=4)
    for i in range(8):
        engine.scheduler.add(request(f"r{i}", max_tokens=2))
    reasons = {name: outputs[-1].finish_reason for name, outputs in run(engine).items()}
    assert set(reasons.values()) == {FinishReason.ERROR, FinishReason.LENGTH}
    assert len(reasons) == 8


def test_a_nan_row_ends_its_request_only(build_engine: Callable[..., Engine], runner) -> None:
    """Once a step, for more steps than may fail in a row: the engine goes on, and so does the request beside it."""
    engine = build_engine()
    engine.scheduler.add(request("good", max_tokens=30))
    for i in range(6):
        runner.nan_prompts.add(50 + i)
        engine.scheduler.add(request(f"bad{i}", prompt=50 + i))
    outputs = run(engine)
    assert [token_id for output in outputs["good"] for token_id in output.token_ids] == list(range(104, 134))
    for i in range(6):
        (output,) = outputs[f"bad{i}"]
        assert (output.finish_reason, output.token_ids) == (FinishReason.ERROR, ())
        assert "NaN" in (output.error or "")
