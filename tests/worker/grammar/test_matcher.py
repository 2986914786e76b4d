"""Which tokens a matcher lets follow beside its grammar's: the ends of an answer."""

from __future__ import annotations

import json

import numpy as np
import pytest
from trained_answers import MODEL

from modelserve.errors import InvalidInput
from modelserve_worker.grammar.answer import AnswerGrammar, Thought, choice_part
from modelserve_worker.grammar.compiler import GrammarCompiler
from modelserve_worker.grammar.matcher import GrammarMatcher, is_allowed
from modelserve_worker.grammar.schema import document_part, json_grammar
from modelserve_worker.text.checkpoint_text import load_checkpoint_text
from modelserve_worker.text.detokenizer import decode
from modelserve_worker.text.markers import Markers

VOCABULARY = load_checkpoint_text(MODEL).vocabulary
EOS = (1, 106, 50)
A, B, STOP = VOCABULARY.ids["a"], VOCABULARY.ids["b"], 46
SPELLS_A, SPELLS_B = ({t for t, data in enumerate(VOCABULARY.token_bytes) if data == text} for text in (b"a", b"b"))
GRAMMAR = "start: /ab?/"


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler((MODEL / "tokenizer.json").read_text(), vocab_size=2112, eos_token_ids=EOS)


def _matcher(compiler: GrammarCompiler, **fields) -> GrammarMatcher:
    fields = {"stop_token_ids": (), "ignore_eos": False, "min_tokens": 0} | fields
    return compiler.matcher(compiler.compile(GRAMMAR).result(), **fields)


def _allowed(compiler: GrammarCompiler, matcher: GrammarMatcher) -> set[int]:
    (row,) = compiler.masks([(matcher, ())])
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def test_the_tables_have_the_bytes_that_answers_are_read_with(compiler: GrammarCompiler) -> None:
    table = compiler._tokenizer
    for token, data in enumerate(VOCABULARY.token_bytes):
        if token not in VOCABULARY.special_ids and data != b"\xff":  # no text has that byte
            assert table.decode_bytes([token]) == data
        else:
            assert table.is_special_token(token)


def test_a_whole_answer_may_end_and_is_complete_when_nothing_may_follow(compiler) -> None:
    matcher = _matcher(compiler, stop_token_ids=[STOP, 1 << 30])
    assert A in _allowed(compiler, matcher) <= SPELLS_A
    matcher.consume(A)
    assert not matcher.complete
    assert _allowed(compiler, matcher) == {*SPELLS_B, STOP, *EOS}
    matcher.consume(B)
    assert matcher.complete
    assert matcher.error is None


def test_ends_wait_for_min_tokens_and_never_for_ever(compiler) -> None:
    matcher = _matcher(compiler, min_tokens=9, stop_token_ids=[STOP])
    matcher.consume(A)
    assert _allowed(compiler, matcher) == SPELLS_B
    matcher = _matcher(compiler, ignore_eos=True, stop_token_ids=[STOP])
    matcher.consume(A)
    assert _allowed(compiler, matcher) == {*SPELLS_B, STOP}


def test_a_token_that_does_not_match_is_an_error(compiler) -> None:
    matcher = _matcher(compiler)
    matcher.consume(B)
    assert matcher.error is not None
    assert not matcher.complete


def test_masks_behind_drafts_are_those_of_an_answer_that_has_them_and_leave_it_as_it_was(compiler) -> None:
    matcher, other = _matcher(compiler), _matcher(compiler)
    before = _allowed(compiler, matcher)
    masks = compiler.masks([(None, (A, A)), (matcher, (A, B)), (other, (B, A))])
    assert masks.shape == (9, 66)
    assert (masks[:3] == -1).all(), "of an answer that has ended"
    assert (masks[7:] == -1).all(), "behind a draft that may not follow, whose row is not accepted"
    assert np.array_equal(masks[3], masks[6])
    assert _allowed(compiler, matcher) == _allowed(compiler, other) == before
    for row in (4, 5):
        matcher.consume((A, B)[row - 4])
        assert np.array_equal(masks[row], compiler.masks([(matcher, ())])[0])
    assert matcher.complete


def test_what_fails_behind_a_draft_is_no_fault_of_the_answer(compiler) -> None:
    matcher = _matcher(compiler)
    assert not matcher.propose(B)
    assert not matcher.propose(EOS[0]), "a token that ends the answer has nothing behind it"
    matcher.consume(A)
    allowed = _allowed(compiler, matcher)
    assert matcher.propose(B)
    matcher.matcher.consume_token(A)  # the library gives up
    assert (compiler.masks([(matcher, ())]) == -1).all(), "what is drawn of it does not count"
    assert matcher.error is not None
    matcher.roll_back(1)
    assert matcher.error is None
    assert _allowed(compiler, matcher) == allowed
    matcher.consume(B)
    assert matcher.complete


def test_rows_of_requests_that_have_ended_are_free_and_grammars_are_kept(compiler) -> None:
    first, second = _matcher(compiler), _matcher(compiler)
    first.consume(A)
    masks = compiler.masks([(None, ()), (first, ()), (second, ())])
    assert masks.shape == (3, 66)
    assert (masks[0] == -1).all()
    assert not np.array_equal(masks[1], masks[2]), "each answer has its own state"
    assert compiler.compile(GRAMMAR) is compiler.compile(GRAMMAR)
    for number in range(70):
        compiler.compile(f'start: "{number}"')
    assert len(compiler._compiled) == 64


@pytest.mark.parametrize("said", ["<unk>", "a<bos>b", '<|"|>', "<|tool_call>call", "x<turn|>"])
@pytest.mark.parametrize("as_json", [False, True])
def test_text_that_spells_a_control_token_is_written_as_text(compiler, said, as_json) -> None:
    """A schema may name <unk>; a mask that asked for the control token instead would end the answer with an error."""
    part = json_grammar({"const": said}) if as_json else choice_part([said])
    source = AnswerGrammar(part=part).source(Markers.of({}), Thought.NONE)
    matcher = compiler.matcher(compiler.compile(source).result(), stop_token_ids=(), ignore_eos=False, min_tokens=0)
    written: list[int] = []
    while not matcher.complete:
        written.append(min(_allowed(compiler, matcher) - set(EOS)))
        matcher.consume(written[-1])
        assert matcher.error is None
    assert not VOCABULARY.special_ids & set(written)
    assert decode(written, VOCABULARY) == (json.dumps(said) if as_json else said)


def test_a_tokenizer_that_cannot_be_read_is_named() -> None:
    with pytest.raises(InvalidInput, match=r"tokenizer\.json"):
        GrammarCompiler("{}", vocab_size=10, eos_token_ids=EOS)


def test_names_of_drafts_are_taken_back(compiler) -> None:
    part = document_part({"type": "object", "additionalProperties": {"type": "null"}}, field="schema")
    compiled = compiler.compile(AnswerGrammar(part=part).source(Markers.of({}), Thought.NONE)).result()
    matcher = compiler.matcher(compiled, stop_token_ids=(), ignore_eos=False, min_tokens=0)
    once, twice = [_spelling(text) for text in ('{"a":null', ',"a')]
    quote = _spelling('"')[0]
    for token in once[:-1]:
        matcher.consume(token)
    masks = compiler.masks([(matcher, (once[-1], *twice))])
    assert not is_allowed(masks[-1], quote), "it would stand there twice"
    assert np.array_equal(compiler.masks([(matcher, (once[-1], *twice))]), masks)
    other = _spelling(',"b')
    matcher.consume(once[-1])
    assert is_allowed(compiler.masks([(matcher, other)])[-1], quote)


def _spelling(text: str) -> list[int]:
    """A token for each character."""
    return [next(t for t, data in enumerate(VOCABULARY.token_bytes) if data == each.encode()) for each in text]
