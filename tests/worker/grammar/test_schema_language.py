"""Schemas over all that is accepted: every finished answer is a valid document, and no constraint is there for show."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest
from schema_language import CONSTRAINTS, Walker, fault, random_schema, source_of, without
from trained_answers import MODEL

from modelserve.errors import InvalidInput
from modelserve_worker.grammar.check import check_grammar
from modelserve_worker.grammar.compiler import CompiledGrammar, GrammarCompiler
from modelserve_worker.grammar.matcher import GrammarMatcher
from modelserve_worker.text.checkpoint_text import load_checkpoint_text

CASES = 300
MOST_TRIES = 3000  # schemas until one tells that a constraint is off


class WithoutUniqueKeys(GrammarCompiler):
    """Its answers may say a name of an object twice."""

    def matcher(self, compiled: CompiledGrammar, **asked: Any) -> GrammarMatcher:
        return super().matcher(replace(compiled, free_names=False), **asked)


def walker_of(kind: type[GrammarCompiler]) -> Walker:
    compiler = kind((MODEL / "tokenizer.json").read_text(), vocab_size=2112, eos_token_ids=[1])
    return Walker(compiler, list(load_checkpoint_text(MODEL).vocabulary.token_bytes), eos=1)


@pytest.fixture(scope="module")
def walker() -> Walker:
    return walker_of(GrammarCompiler)


def test_every_finished_answer_is_valid_and_nearly_all_finish(walker) -> None:
    rng, walked, finished = random.Random(11), 0, 0
    while walked < CASES:
        schema = random_schema(rng)
        try:
            source = source_of(schema)
            check_grammar(source, field="schema")
        except InvalidInput:
            continue
        walked += 1
        answer = walker.walk(source, rng)
        if answer is not None:
            finished += 1
            assert fault(answer, schema) is None, json.dumps(schema)
    assert finished >= 0.9 * CASES


@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_an_answer_without_a_constraint_is_found_out(walker, constraint) -> None:
    rng = random.Random(5)
    for _ in range(MOST_TRIES):
        schema = random_schema(rng)
        less = without(schema, constraint)
        if less == schema:
            continue
        try:
            source_of(schema)
            source = source_of(less)
            check_grammar(source, field="schema")
        except InvalidInput:
            continue
        answer = walker.walk(source, rng)
        if answer is not None and fault(answer, schema) is not None:
            return
    pytest.fail(f"{constraint} is not told apart from its absence")


def test_a_repeated_name_is_found_out(walker) -> None:
    schema = {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 4, "maxProperties": 9}
    source, rng = source_of(schema), random.Random(3)
    answers = [walker.walk(source, rng) for _ in range(60)]
    assert [fault(answer, schema) for answer in answers if answer is not None] == [None] * 60
    careless = walker_of(WithoutUniqueKeys)
    answers = [careless.walk(source, rng) for _ in range(300)]
    assert any(answer is not None and "twice" in (fault(answer, schema) or "") for answer in answers)
