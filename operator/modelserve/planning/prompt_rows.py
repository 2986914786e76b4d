"""What a prompt's rows cost by their place, and how many a step takes: one rule for the scheduler and for plans.

A row at position p of a prompt takes 1 + p / D times what the first row takes: its products are the same everywhere,
the keys that it attends to on global layers grow with p. A step of R rows may take what R rows take up to position F,
so prompts of up to F tokens go in steps of R rows, and behind longer ones the rows of a step become fewer:

    cost of rows [s, s + n)      n + (2 s n + n^2) / (2 D)
    allowed to R rows            R (1 + F / D)

F is half of D: no step takes more than half again what its products take, which costs loads of up to 32,000 tokens a
prompt nothing, and longer ones 1 % of their rate (docs/performance-log.md). A prompt that fits a step has one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from modelserve.sizing.cuda_graphs import ROWS_APART

STEPS_OF_LONG_PROMPTS = 4  # mixed steps in one of a prompt that needs several: newcomers wait a fifth of a second
PREFILLS_AHEAD = 8  # prompts that an engine has at once, however long: short ones pass long ones there
STEPS_OF_QUEUE = 48  # mixed steps that prompts may wait for, about three seconds, before steps become longer
MOST_OF_QUEUE = 4  # times as long
MOST_ROWS_OF_QUEUE = 2048  # products gain nothing from more


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
    waiting: float, *, doubling_context: float, max_num_batched_tokens: int, max_num_mixed_tokens: int
) -> int:
    """Most rows of a step in which requests decode, where the prompts behind the oldest have so many tokens left, of
    each at most a step's.

    Each step reads the cache of all that decode, once, however many rows of prompts it has. Where prompts wait long,
    longer steps serve more of them: who decodes waits longer for a token, and all wait less for the first. Not on the
    CPU, whose rates are not known (`doubling_context` is infinite) and which multiplies for nearly all of a step.
    """
    if math.isinf(doubling_context):
        return min(max_num_mixed_tokens, max_num_batched_tokens)
    queued = int(waiting) // STEPS_OF_QUEUE // ROWS_APART * ROWS_APART
    queued = min(queued, MOST_OF_QUEUE * max_num_mixed_tokens, MOST_ROWS_OF_QUEUE)
    return min(max(max_num_mixed_tokens, queued), max_num_batched_tokens)
