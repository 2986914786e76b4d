"""A grammar that exceeds its bounds, or fails, ends its own request; the others of its steps hear nothing of it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from masked_runner import MODEL, MaskedRunner, engine_of, request_of, run_steps
from numpy.typing import NDArray
from small_pages import EOS

from modelserve_worker.engine.engine import Engine
from modelserve_worker.grammar import mask_time
from modelserve_worker.grammar.compiler import GrammarCompiler
from modelserve_worker.request import FinishReason, Request, RequestOutput
from modelserve_worker.text.checkpoint_text import load_checkpoint_text

A = load_checkpoint_text(MODEL).vocabulary.ids["a"]
# The worst mask is unknown when it is compiled: each token adds to the ways in which the text so far may be read.
GROWING = 'start: s "c"\ns: "a" | s s | s s s | s s s s s | s s s s s s s'
MOST_TOKENS = 90


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    return GrammarCompiler((MODEL / "tokenizer.json").read_text(), vocab_size=2112, eos_token_ids=[EOS])


class _Panic(BaseException):
    """As the library's panics come through: no Exception."""


class _Faulty:
    """A matcher whose library fails where it is told to."""

    def __init__(self, at: str) -> None:
        self._at = at

    def unsafe_compute_mask_ptr(self, pointer: int, size: int) -> None:
        if self._at == "mask":
            raise _Panic("the library failed")

    def consume_token(self, token_id: int) -> bool:
        if self._at == "consume":
            raise _Panic("the library failed")
        return True

    def is_error(self) -> bool:
        return False

    def is_stopped(self) -> bool:
        return False


def _done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


def _ends(engine: Engine, *requests: Request) -> dict[str, RequestOutput]:
    return {each.request_id: each for step in run_steps(engine, *requests) for each in step if each.finish_reason}


def _one_letter(allowed: NDArray[np.int64]) -> int:
    """EOS wherever it may come, then a single letter."""
    return next(token for token in (EOS, A, int(allowed.max())) if token in allowed)


@pytest.mark.parametrize("launches_ahead", [True, False])
def test_a_grammar_beyond_its_budget_fails_alone_and_says_that_it_is_its_clients(grammars, launches_ahead) -> None:
    runner = MaskedRunner(launches_ahead=launches_ahead, choose=_one_letter)
    bound, greedy = (
        request_of("bound", grammar='start: "0123456789"'),
        request_of("greedy", grammar=GROWING, max_tokens=90),
    )
    steps = run_steps(engine_of(runner, grammars), greedy, bound, request_of("free", max_tokens=90))
    ends = {output.request_id: output for step in steps for output in step if output.finish_reason}
    assert ends["greedy"].finish_reason is FinishReason.ERROR, "EOS, which may come where there is no mask, is no end"
    assert ends["greedy"].error_field == "grammar"
    assert "exceeds what may be spent on one token" in (ends["greedy"].error or "")
    assert 10 < len(greedy.output_token_ids) < 90
    assert ends["bound"].finish_reason is FinishReason.STOP
    assert ends["free"].finish_reason is FinishReason.LENGTH
    told = [sum(len(output.token_ids) for output in step if output.request_id == "free") for step in steps]
    first = told.index(1)
    assert told[first : first + 90] == [1] * 90, "a token in every step"


class _Held(Executor):
    """Begins what it is given when it is let go."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **_: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((future, fn, args))
        return future

    def let_go(self) -> None:
        waiting, self.waiting = self.waiting, []
        for future, fn, args in waiting:
            future.set_result(fn(*args))


@pytest.mark.parametrize("launches_ahead", [True, False])
def test_nobody_waits_for_a_dear_mask_and_its_answer_is_as_ever(grammars, monkeypatch, launches_ahead) -> None:
    held = _Held()
    dear = request_of("dear", grammar='start: "0123" | "4567"')
    compiled = grammars.compile(dear.grammar or "").result()
    monkeypatch.setitem(grammars._compiled, dear.grammar, _done(replace(compiled, dear=True)))
    monkeypatch.setattr(grammars, "_background", held)
    cheap, free = request_of("cheap", grammar='start: "0123456789"'), request_of("free", max_tokens=30)
    engine = engine_of(MaskedRunner(launches_ahead=launches_ahead), grammars)
    for request in (dear, cheap, free):
        engine.add(request)
    for _ in range(20):
        engine.step()
    assert len(dear.output_token_ids) == 1, "its first mask came with the grammar; its second is not there"
    assert len(free.output_token_ids) > 15
    assert len(cheap.output_token_ids) == 10, "it has ended meanwhile"
    while engine.has_work:
        held.let_go()
        engine.step()
    engine.scheduler.check_integrity()
    alone = request_of("alone", grammar=dear.grammar)
    monkeypatch.undo()
    run_steps(engine_of(MaskedRunner(launches_ahead=launches_ahead), grammars), alone)
    assert alone.output_token_ids == dear.output_token_ids


def test_a_mask_that_took_long_makes_those_behind_it_dear(grammars, monkeypatch) -> None:
    monkeypatch.setattr(mask_time, "DEAR_S", -1.0)
    request = request_of("slow", grammar="start: /[0-9]{8}/")
    run_steps(engine_of(MaskedRunner(), grammars), request)
    assert request.constraint is not None
    assert request.constraint.dear
    assert request.constraint.complete


def test_masks_that_take_long_together_are_dear_but_for_those_that_fit_in_a_step() -> None:
    """None of them takes long alone; 24 answers of one grammar would hold their neighbours back a tenth of a second."""
    time = mask_time.MaskTime(threads=2)
    most = int(2 * mask_time.STEP_S / 0.003)
    for _ in range(3):
        time.begin_step()
        assert [time.is_dear(0.003) for _ in range(24)] == [number >= most for number in range(24)]
        assert not time.is_dear(mask_time.CHEAP_S), "an answer that takes next to nothing has a token in every step"


@pytest.mark.parametrize("launches_ahead", [True, False])
def test_answers_that_are_dear_together_are_the_same_as_alone(grammars, monkeypatch, launches_ahead) -> None:
    monkeypatch.setattr(mask_time, "CHEAP_S", -1.0)
    monkeypatch.setattr(grammars, "_mask_time", mask_time.MaskTime(threads=0))
    together = [request_of(f"t{i}", grammar="start: /[0-9]{8}/") for i in range(3)]
    free = request_of("free", max_tokens=30)
    engine = engine_of(MaskedRunner(launches_ahead=launches_ahead), grammars)
    run_steps(engine, *together, free)
    assert all(each.constraint is not None and each.constraint.dear for each in together)
    engine.scheduler.check_integrity()
    monkeypatch.undo()
    alone = request_of("alone", grammar="start: /[0-9]{8}/")
    run_steps(engine_of(MaskedRunner(launches_ahead=launches_ahead), grammars), alone)
    assert alone.constraint is not None
    assert not alone.constraint.dear
    assert [each.output_token_ids for each in together] == [alone.output_token_ids] * 3


@pytest.mark.parametrize("at", ["mask", "consume"])
@pytest.mark.parametrize("beside", [True, False])
def test_a_matcher_that_fails_fails_its_request_and_no_other(grammars, monkeypatch, at, beside) -> None:
    faulty, bound = (
        request_of("faulty", grammar="start: /[0-9]{20}/"),
        request_of("bound", grammar='start: "0123456789"'),
    )
    compiled = grammars.compile(faulty.grammar or "").result()
    make = grammars.matcher

    def matcher(of: Any, **fields: Any) -> Any:
        made = make(of, **fields)
        made.matcher = _Faulty(at) if of is compiled else made.matcher
        return made

    monkeypatch.setattr(grammars, "matcher", matcher)
    engine = engine_of(MaskedRunner(), grammars)
    ends = _ends(engine, faulty, request_of("free"), *([bound] if beside else []))
    assert ends["faulty"].finish_reason is FinishReason.ERROR
    assert "cannot be followed" in (ends["faulty"].error or "")
    assert ends["faulty"].error_field is None, "it is not the client's doing"
    assert ends["free"].finish_reason is FinishReason.LENGTH
    if beside:
        assert ends["bound"].finish_reason is FinishReason.STOP
    engine.scheduler.check_integrity()


def test_an_answer_that_outgrows_its_share_of_memory_ends_alone() -> None:
    """States of the lexer are the memory of a grammar: each counted character has some of its own."""
    small = GrammarCompiler(
        (MODEL / "tokenizer.json").read_text(), vocab_size=2112, eos_token_ids=[EOS], max_lexer_states=100
    )
    greedy, bound = (
        request_of("greedy", grammar="start: /.{0,3000}a/", max_tokens=90),
        request_of("bound", grammar='start: "0123"'),
    )
    ends = _ends(engine_of(MaskedRunner(), small), greedy, bound)
    assert ends["greedy"].finish_reason is FinishReason.ERROR
    assert "too many states" in (ends["greedy"].error or "")
    assert ends["bound"].finish_reason is FinishReason.STOP
