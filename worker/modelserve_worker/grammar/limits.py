"""Bounds what one grammar may cost to compile, to follow and to keep.

All bounds are in the library's own units, which unlike seconds do not depend on the machine or its load. What they
come to was measured with a vocabulary of 262,144 (tests/bench/host/grammar_gaps.py).
"""

from __future__ import annotations

import json

from llguidance import LLParserLimits

from modelserve.sizing.host.grammars import MOST_LEXER_STATES

MAX_GRAMMAR_CHARACTERS = 256 * 1024  # as the library's JSON, all of its parts together
# Names of parts, from which it follows how they are treated.
CLIENT_PART = "written"  # its rules are a client's own
DOCUMENT_PART = "document"  # a JSON document with names that no schema lists

# Items are partial matches. Between two lexemes there are as many as ways to go on: a schema's grow with the properties
# of an object, four for each optional one, and not with the answer. Rules that a client wrote may be ambiguous; then
# they grow with the answer, and a mask costs up to the cube of their number: 2 ms of one core at 300, 40 ms at 1,000.
# A grammar of Python's statements has 70.
MAX_SCHEMA_ITEMS = 2_500
MAX_WRITTEN_ITEMS = 300
_ITEMS_OF_A_MASK = 50_000  # over all tokens: a grammar of SQL needs 38,000, of 16 a row, in 5 ms


def parser_limits(grammar: str, *, max_lexer_states: int = MOST_LEXER_STATES) -> LLParserLimits:
    """The bounds of one grammar, the same wherever it is compiled. They allow objects of 600 optional properties, and
    a compilation of a few tenths of a second. Only `max_lexer_states` may differ: it bounds the memory of one answer.
    """
    return LLParserLimits(
        max_items_in_row=MAX_WRITTEN_ITEMS if CLIENT_PART in part_names(grammar) else MAX_SCHEMA_ITEMS,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=100_000,
        step_max_items=_ITEMS_OF_A_MASK,
        max_lexer_states=max_lexer_states,
        max_grammar_size=200_000,
        verbose_errors=False,  # they quote the parser's state
    )


def part_names(grammar: str) -> set[str]:
    """Of the library's JSON; anything else is the rules of a client."""
    if not grammar.startswith("{"):
        return {CLIENT_PART}
    return {part.get("name", "") for part in json.loads(grammar)["grammars"]}
