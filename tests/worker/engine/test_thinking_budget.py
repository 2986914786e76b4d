"""A thought ends at its budget to the token, whatever else holds the answer, and whatever happens to it on the way."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from masked_runner import MODEL, MaskedRunner, engine_of, request_of, run_steps
from numpy.typing import NDArray
from small_pages import EOS

from modelserve_worker.grammar.answer import AnswerGrammar, Thought, choice_part
from modelserve_worker.grammar.compiler import GrammarCompiler
from modelserve_worker.request import FinishReason, Request, ThinkingBudget
from modelserve_worker.text.checkpoint_text import load_checkpoint_text
from modelserve_worker.text.markers import Markers

IDS = load_checkpoint_text(MODEL).vocabulary.ids
MARKERS = Markers.of(IDS)
OPEN, CLOSE, CALL = MARKERS.thought_open, MARKERS.thought_close, MARKERS.call_open
A = IDS["a"]


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    return GrammarCompiler((MODEL / "tokenizer.json").read_text(), vocab_size=2112, eos_token_ids=[EOS])


def _budget(tokens: int, *, begun: bool = False) -> ThinkingBudget:
    assert OPEN is not None
    assert CLOSE is not None
    assert CALL is not None
    return ThinkingBudget(tokens, OPEN, (CLOSE, CALL), begun)


def _thinks(allowed: NDArray[np.int64]) -> int:
    """Begins a thought whenever it may, and never ends one."""
    return next(token for token in (OPEN, A, int(allowed.max())) if token in allowed)


def _bound(tokens: int, *, begun: bool = False, grammar: str | None = None, max_tokens: int = 12) -> Request:
    request = request_of("thinker", grammar=grammar, max_tokens=max_tokens)
    request.thinking_budget = _budget(tokens, begun=begun)
    return request


@pytest.mark.parametrize("launches_ahead", [True, False])
@pytest.mark.parametrize(("tokens", "begun"), [(1, False), (5, False), (5, True), (1, True)])
def test_a_thought_is_closed_at_its_budget_and_no_other_begins(grammars, tokens, begun, launches_ahead) -> None:
    thinker, free = _bound(tokens, begun=begun), request_of("free")
    # In a thought the runner opens another, which stays the same thought; then it says "a".
    runner = MaskedRunner(launches_ahead=launches_ahead, choose=lambda allowed: _say(allowed, thinker))
    run_steps(engine_of(runner, grammars), thinker, free)
    said = thinker.output_token_ids
    thought = [] if begun else [OPEN]
    assert said[: len(thought) + tokens + 1] == [*thought, *[A] * tokens, CLOSE]
    assert OPEN not in said[len(thought) :]
    assert len(free.output_token_ids) == 12


def _say(allowed: NDArray[np.int64], request: Request) -> int:
    begins = OPEN in allowed and not request.output_token_ids and not (request.thinking_budget or _budget(0)).begun
    return OPEN if begins and OPEN is not None else A if A in allowed else int(allowed.max())


def test_a_budget_of_nothing_lets_no_thought_begin_and_ends_one_that_has_begun(grammars) -> None:
    none, begun = _bound(0), _bound(0, begun=True)
    run_steps(engine_of(MaskedRunner(choose=_thinks), grammars), none)
    assert OPEN not in none.output_token_ids
    run_steps(engine_of(MaskedRunner(choose=_thinks), grammars), begun)
    assert begun.output_token_ids[0] == CLOSE
    assert OPEN not in begun.output_token_ids


@pytest.mark.parametrize("thought", [Thought.POSSIBLE, Thought.OPEN])
def test_behind_the_budget_comes_what_the_grammar_asks_for(grammars, thought) -> None:
    source = AnswerGrammar(part=choice_part(["yes", "no"])).source(MARKERS, thought)
    thinker = _bound(4, begun=thought is Thought.OPEN, grammar=source, max_tokens=30)
    steps = run_steps(engine_of(MaskedRunner(choose=_thinks), grammars), thinker)
    (end,) = [output.finish_reason for step in steps for output in step if output.finish_reason]
    assert end is FinishReason.STOP
    said = thinker.output_token_ids
    assert said.index(CLOSE) == 4 + (thought is Thought.POSSIBLE)


def test_a_preempted_thought_has_what_was_left_of_its_budget(grammars) -> None:
    thinker = _bound(6)
    engine = engine_of(MaskedRunner(choose=lambda allowed: _say(allowed, thinker)), grammars)
    engine.add(thinker)
    while len(thinker.output_token_ids) < 4:
        engine.step()
    engine.scheduler._preempt(engine.scheduler._running.by_id["thinker"])
    while engine.has_work:
        engine.step()
    assert thinker.output_token_ids[:8] == [OPEN, *[A] * 6, CLOSE]


def test_least_tokens_are_left_to_the_device_where_there_is_no_grammar(grammars) -> None:
    """Its masks see to them where there is one; a budget knows nothing of ends."""
    engine = engine_of(MaskedRunner(choose=_thinks), grammars)
    thinker = _bound(3)
    thinker.sampling = replace(thinker.sampling, min_tokens=5)
    engine.add(thinker)
    batch = engine.scheduler.schedule()
    assert batch is not None
    assert batch.admitted[0].sampling.min_tokens == 5


@pytest.mark.parametrize("grammar", [None, AnswerGrammar(part=choice_part(["yes"])).source(MARKERS, Thought.POSSIBLE)])
def test_drafts_count_against_the_budget_only_when_they_are_sampled(grammars, grammar) -> None:
    request = _bound(2, grammar=grammar)
    compiled = None if grammar is None else grammars.compile(grammar).result()
    constraint, other = grammars.constraint(request, compiled), grammars.constraint(request, compiled)
    drafts = (OPEN, A, A)
    masks = grammars.masks([(constraint, drafts)])
    for row, token in enumerate(drafts):
        (mask,) = grammars.masks([(other, ())])
        assert np.array_equal(masks[row], mask), "as if it were sampled"
        other.consume(token)
    assert np.flatnonzero(np.unpackbits(masks[3].view(np.uint8), bitorder="little")).tolist() == [CLOSE]
    assert np.array_equal(grammars.masks([(constraint, drafts)]), masks), "and taken back"
