"""Hostile grammars, schemas and expressions, in tools' schemas too: refused, or followed within the fuel of a token."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np
import pytest
from hostile_grammars import HOSTILE, random_hostile
from llguidance import LLInterpreter
from pydantic import ValidationError
from trained_answers import MODEL, TrainedModel

from modelserve_worker.grammar.compiler import GrammarCompiler
from modelserve_worker.grammar.limits import parser_limits
from modelserve_worker.server.errors.errors import ApiError

# Where the lexer's fuel ends inside a token, the library says that the token does not match.
EXCEEDED = re.compile("too many|Too many|Current row has|fuel exhausted|doesn't satisfy the grammar")
TOKENS = 25  # that each is followed for
CASES = 60
REFUSED = {  # by structure, by compiling or by the walk at admission
    "repetitions of nothing", "repetitions of repetitions", "five that begin alike", "300 lexemes",
    "400 optional letters", "without end", "2,000 rules", "parentheses", "an intersection",
    "letters of all scripts", "2,000 properties", "products of unions", "2,000 properties in a tool",
}  # fmt: skip


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler((MODEL / "tokenizer.json").read_text(), vocab_size=2112, eos_token_ids=[1, 106, 50])


def _admitted(model: TrainedModel, body: dict[str, Any]) -> str | None:
    """The grammar that goes to the engine; None where the front end refuses the body."""
    try:
        (spec,) = model.chat(messages=[{"role": "user", "content": "hi"}], **body)
    except (ApiError, ValidationError):  # both are answered with a 400
        return None
    assert spec.request.grammar is not None
    return spec.request.grammar


def _fuel_spent(compiler: GrammarCompiler, source: str, rng: random.Random) -> tuple[int, int]:
    """The most items and lexer operations of one token, as the library counts them, over a walk of random tokens."""
    limits = parser_limits(source)
    follower = LLInterpreter(
        compiler._tokenizer, source, enable_backtrack=False, enable_ff_tokens=False, log_level=0, limits=limits
    )
    follower.start_without_prompt()
    items, lexer, mask = 0, 0, np.zeros(66, dtype=np.int32)
    try:
        for _ in range(TOKENS):
            told = json.loads(follower.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes))
            for step in told["progress"]:
                if "stats" in step:
                    items, lexer = max(items, step["stats"]["all_items"]), max(lexer, step["stats"]["lexer_cost"])
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            if told["stop"] or not len(allowed):
                break
            follower.commit_token(int(rng.choice(allowed)))
    except ValueError as error:
        if not EXCEEDED.search(str(error)):
            raise
    return items, lexer


def _assert_within_fuel(compiler: GrammarCompiler, source: str, rng: random.Random) -> None:
    limits = parser_limits(source)
    items, lexer = _fuel_spent(compiler, source, rng)
    # Counted before a row of items is added, so by one row too late; a token is a mask and the bytes it adds.
    assert items <= 2 * (limits.step_max_items + limits.max_items_in_row)
    assert lexer <= limits.initial_lexer_fuel + 2 * limits.step_lexer_fuel


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_made_to_cost_is_refused_or_stays_within_its_fuel(model, compiler, name) -> None:
    source = _admitted(model, HOSTILE[name])
    assert (source is None) == (name in REFUSED), "what is refused does not change unnoticed"
    if source is not None:
        _assert_within_fuel(compiler, source, random.Random(1))


def test_random_hostile_requests_are_refused_or_stay_within_their_fuel(model, compiler) -> None:
    rng, admitted = random.Random(7), 0
    for _ in range(CASES):
        source = _admitted(model, random_hostile(rng))
        if source is not None:
            admitted += 1
            _assert_within_fuel(compiler, source, rng)
    assert admitted > CASES / 4, "most that is refused at once tests nothing of what is followed"
