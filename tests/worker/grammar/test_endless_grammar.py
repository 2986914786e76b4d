"""Grammars that clients write: those that no answer could end under, or that cost without end, are refused by name."""

from __future__ import annotations

import pytest

from modelserve.errors import InvalidInput
from modelserve_worker.grammar.answer import AnswerGrammar, Thought, grammar_part
from modelserve_worker.grammar.check import check_grammar
from modelserve_worker.text.markers import Markers

DOUBLING = "start: a40\n" + "\n".join(f"a{i}: a{i - 1} a{i - 1}" for i in range(1, 41)) + '\na0: "x"'


def _check(source: str) -> None:
    part = grammar_part(source, field="grammar")
    check_grammar(AnswerGrammar(part=part).source(Markers.of({}), Thought.NONE), field="grammar")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ('start: "a" start', "grammar: no finite text matches rule 'start': it needs 'start', and so on without end"),
        ('root ::= "a" root', "no finite text matches rule 'start'"),
        ('start: "x" | a\na: b "c"\nb: ("d" a)+ | "e" b', "rule 'a': it needs 'b', which needs 'a'"),
        ('start: a{2,3}\na: [X] (a | b)\nb: a "y"\nX: /x/', "no finite text matches rule 'a'"),
        ('root ::= item*\nitem ::= "[" item "]"', "no finite text matches rule 'item'"),
        (DOUBLING, "the shortest text of rule 'start' has 1099511627776 characters; the limit is 1048576"),
        ('start: ("ab"~1000)~2000', "has 4000000 characters"),
        ('start: (("a"?)~0..10000)~0..10000', "repeats up to 10000 times what may be empty; the limit is 16"),
        ('start: ("a"?)~0..10000', "what may be empty"),
        ('start: x{17}\nx: y | "z"\ny: "b"* [C]\nC: "c"', "rule 'start' repeats up to 17 times"),
    ],
)  # fmt: skip
def test_a_grammar_without_end_is_refused_by_name(source, words) -> None:
    with pytest.raises(InvalidInput, match=r"^grammar: ") as refusal:
        _check(source)
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    "source",
    [
        'start: ("a"{1,100}){1,100}',
        "start: " + " ".join(["a?"] * 400) + '\na: "a"',
        "start: s\ns: " + " | ".join(['"a"', *(" ".join("s" * count) for count in range(2, 20))]),
        "start: " + " | ".join(f"r{i}" for i in range(600)) + "\n" + "\n".join(f'r{i}: "{i}"' for i in range(600)),
    ],
)  # fmt: skip
def test_one_whose_cost_grows_with_the_answer_is_refused_by_its_fuel(source) -> None:
    with pytest.raises(InvalidInput, match=r"too expensive to follow: .*(items|expressions).* Make it less ambiguous"):
        _check(source)


@pytest.mark.parametrize(
    "source",
    [
        'start: "a" | start "a"',
        'start: "a" | "a" start',
        'start: ("a"?)* "b"',
        'start: ("a"?){0,16} "b"',
        'start: "a"{0,100000}',
        'start: a\na: b | "x"\nb: "(" a ")"',
        'start: unused | "x"\nunused: "y"\nlost: lost "z"',
        'root ::= expr\nexpr ::= term (("+" | "-") term)*\nterm ::= [0-9]+ | "(" expr ")"',
        'start: NAME "=" expr// note\n?expr: NUMBER | expr "*" expr\nNAME: /[a-z]+/\nNUMBER: "0".."9"\n%ignore " "',
        'start: "SELECT " name ("," name){0,3} " FROM " name\nname: /[a-z]{1,5}/',
        "start: thing\nthing: %json {\"type\": \"integer\"}",
        'start: "\\x41\\u0042\\n" x["y"]\nx: /[^"]/',
    ],
)  # fmt: skip
def test_grammars_that_end_are_followed(source) -> None:
    _check(source)


def test_the_longest_chain_of_rules_is_read_in_one_pass() -> None:
    rules = [f"r{i}: r{i + 1} | r{i + 2}" for i in range(3000)]
    _ = grammar_part("start: r0\n" + "\n".join(rules) + '\nr3000: "a"\nr3001: r0 "b"', field="grammar")
    with pytest.raises(InvalidInput, match="no finite text"):
        grammar_part("start: r0\n" + "\n".join(rules) + '\nr3000: r0 "a"\nr3001: r0 "b"', field="grammar")


@pytest.mark.parametrize(
    "source",
    [
        "start: /" + "[" * 60_000,
        'start: "a"{' + " " * 60_000,
        'start: "a"{' + "9" * 60_000 + "}",
        'start: "a" ~' + " " * 60_000,
        'start: "a"' + " " * 60_000 + ".",
        "start: " + '"a' * 20_000,
        "start: a\na: " + "(" * 60_000,
        "start: " + "[" * 60_000,
    ],
)
def test_what_is_no_grammar_is_read_once(source) -> None:
    """Text that a reader with second thoughts would go over again and again, for minutes."""
    with pytest.raises(InvalidInput):
        _check(source)
