"""What one grammar may cost to compile and to follow."""

from __future__ import annotations

from llguidance import LLParserLimits

MAX_GRAMMAR_CHARACTERS = 256 * 1024  # as the library's JSON, all of its parts together


def parser_limits() -> LLParserLimits:
    """Bounds in the library's own units, which unlike seconds do not depend on the machine: what one process accepts,
    the other does too. They allow schemas of some thousand properties, and a compilation of a few tenths of a second.
    """
    return LLParserLimits(
        max_items_in_row=8_000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=100_000,
        max_lexer_states=50_000,  # 1 to 2 kB each, per request
        max_grammar_size=200_000,
        verbose_errors=False,  # they quote the parser's state
    )
