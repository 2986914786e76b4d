"""What a prompt's rows cost by their place, and how many a step takes: rules of the scheduler.

Plans use them too, but for steps that follow what waits.

A row at position p of a prompt takes 1 + p / D times what the first row takes: its products are the same everywhere,
the keys that it attends to on global layers grow with p. A step of R rows may take what R rows take up to position F,
so prompts of up to F tokens go in steps of R rows, and behind longer ones the rows of a step become fewer:

    cost of rows [s, s + n)      n + (2 s n + n^2) / (2 D)
    allowed to R rows            R (1 + F / D)

F is half of D: no step takes more than half again what its products take, which costs loads of up to 32,000 tokens a
prompt nothing, and longer ones 1 % of their rate (docs/history/performance-0.1.md). A prompt that fits a step has one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from modelserve.sizing.cuda_graphs import ROWS_APART

STEPS_OF_LONG_PROMPTS = 4  # mixed steps in one of a prompt that needs several: newcomers wait a fifth of a second
PREFILLS_AHEAD = 8  # prompts that an engine has at once, however long: short ones pass long ones. Fewer are no crowd
STEPS_OF_FEW = 8  # of the fewest rows beside decodes that take all prompts which wait: more rows would gain nobody much
MOST_OF_CROWD = 3  # times as many rows as else in a step, where a crowd waits
MOST_ROWS_OF_CROWD = 1536  # products gain nothing from more, and who decodes waits a sixth of a second


@dataclass(frozen=True, slots=True)
class PromptCost:
    """Costs in first rows. `doubling_context` D in tokens, infinite where all rows cost the same; `full_context` F."""

    doubling_context: float = math.inf
    full_context: float = 0

    @classmethod
    def of_steps(cls, doubling_context: float, max_num_batched_tokens: int) -> PromptCost:
        """The rule above for an engine."""
        if math.isinf(doubling_context):
            return cls()
        return cls(doubling_context, max(max_num_batched_tokens, doubling_context / 2))

    def cost(self, start: int, rows: float) -> float:
        """Of the rows [start, start + rows)."""
        return rows + rows * (start + rows / 2) / self.doubling_context

    def allowed(self, rows: int) -> float:
        """To a step of so many rows."""
        return rows * (1 + self.full_context / self.doubling_context)

    def rows(self, start: int, cost: float) -> float:
        """Rows from `start` on that cost so much."""
        first = 1 + start / self.doubling_context
        return 2 * cost / (first + math.sqrt(first * first + 2 * cost / self.doubling_context))

    def steps(self, tokens: float, rows: float) -> float:
        """Steps of at most `rows` rows that a prompt takes, a part of one counted as such."""
        full = min(tokens, self.full_context)
        behind = tokens - full
        return (full + behind * (1 + (full + behind / 2) / self.doubling_context) / self.allowed(1)) / rows


def rows_alone(longest: int, *, max_num_batched_tokens: int, max_num_mixed_tokens: int) -> int:
    """Most rows of a step in which nobody decodes, where the longest prompt has so many tokens.

    A prompt that fits is computed at once. While a longer one is computed, step after step, others come.
    """
    if longest <= max_num_batched_tokens:
        return max_num_batched_tokens
    return min(max_num_batched_tokens, STEPS_OF_LONG_PROMPTS * max_num_mixed_tokens)


def rows_beside_decodes(
    oldest: float,
    behind: float,
    *,
    decodes: float,
    max_num_batched_tokens: int,
    max_num_mixed_tokens: int,
    min_num_mixed_tokens: int,
    crowd_tokens: float,
) -> int:
    """Most rows of a step in which requests decode, where the `oldest` prompt has so many tokens left and those
    `behind` it so many in all, of each at most a step's.

    Where a few steps of the fewest rows take all of them, they have those: the rows hide behind the reading of the
    weights. Each step reads the cache of all that decode, once, however many rows of prompts it has: where more than
    `crowd_tokens` wait, steps grow with what waits, which serves more of them. Who decodes waits longer for a token
    then, and all wait less for the first. mixed_steps.py says what is few, and what a crowd.
    """
    if decodes + (oldest + behind) / STEPS_OF_FEW <= min_num_mixed_tokens:
        return min(min_num_mixed_tokens, max_num_batched_tokens)
    grown = int(max_num_mixed_tokens * behind / crowd_tokens) // ROWS_APART * ROWS_APART
    grown = min(grown, MOST_OF_CROWD * max_num_mixed_tokens, MOST_ROWS_OF_CROWD)
    return min(max(max_num_mixed_tokens, grown), max_num_batched_tokens)
