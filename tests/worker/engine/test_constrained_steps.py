"""Constrained rows in a device that runs ahead: the step is launched early, its sampling when its masks are known."""

from __future__ import annotations

import pytest
from masked_runner import MODEL, MaskedRunner, engine_of, request_of, run_steps
from small_pages import EOS

from modelserve_worker.engine.engine import Engine
from modelserve_worker.grammar.compiler import GrammarCompiler
from modelserve_worker.request import Request


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    return GrammarCompiler((MODEL / "tokenizer.json").read_text(), vocab_size=2112, eos_token_ids=[EOS])


def _run(engine: Engine, *requests: Request) -> dict[str, list[list[int]]]:
    """Tokens of each step, by request."""
    steps: dict[str, list[list[int]]] = {request.request_id: [] for request in requests}
    for told in run_steps(engine, *requests):
        outputs = {output.request_id: output for output in told}
        for name, tokens in steps.items():
            tokens.append(list(outputs[name].token_ids) if name in outputs else [])
    return steps


def test_a_step_is_launched_before_the_masks_of_its_rows_are_known(grammars) -> None:
    runner = MaskedRunner()
    steps = _run(engine_of(runner, grammars), request_of("bound", grammar='start: "0123456789"'), request_of("free"))
    assert [t for told in steps["bound"] for t in told], "the answer was sampled under its masks"
    for number in range(2, 5):
        order = [("launch", number + 1), ("result", number), ("sample", number + 1)]
        places = [runner.events.index(event) for event in order]
        assert places == sorted(places), runner.events


def test_neighbours_keep_their_pace_and_a_constrained_answer_has_it_too(grammars) -> None:
    steps = _run(
        engine_of(MaskedRunner(), grammars), request_of("bound", grammar='start: "0123456789"'), request_of("free")
    )
    first = next(number for number, told in enumerate(steps["free"]) if told)
    assert [len(told) for told in steps["free"][first:]] == [1] * 12, "a token every step, from the first one on"
    bound = [len(told) for told in steps["bound"][first:]]
    length = sum(bound)
    assert bound[:length] == [1] * length
    assert length < 12, "it ended with its grammar; its token in flight was discarded"


@pytest.mark.parametrize("launches_ahead", [True, False])
def test_a_failed_step_fails_those_in_it_and_others_go_on(grammars, launches_ahead) -> None:
    runner = MaskedRunner(launches_ahead=launches_ahead, failing={2})
    engine = engine_of(runner, grammars)
    first = [request_of("bound", grammar="start: /[0-9]{30}/"), request_of("free")]
    for request in first:
        if request.grammar is not None:
            grammars.compile(request.grammar).result()
        engine.add(request)
    ends = {}
    while engine.has_work:
        ends |= {output.request_id: output.finish_reason for output in engine.step() if output.finish_reason}
    assert ends == {"bound": "error", "free": "error"}
    later = _run(engine, request_of("later", grammar='start: "0"'), request_of("free later", max_tokens=2))
    assert [t for told in later["free later"] for t in told] == [300, 300]
    assert len([t for told in later["later"] for t in told]) == 1


def test_an_engine_without_a_tokenizer_refuses_grammars_and_nothing_else() -> None:
    engine = engine_of(MaskedRunner(), None)
    with pytest.raises(Exception, match="cannot follow a grammar"):
        engine.add(request_of("bound", grammar='start: "a"'))
    assert [len(told) for told in _run(engine, request_of("free", max_tokens=1))["free"]].count(1) == 1
