"""How a step's prefill tokens are shared among the requests that still have prompt to compute.

Half goes to the oldest prefill, rounded up. The rest goes to the shortest remaining first, and what they do not take
falls to the longer ones, the oldest in its place among them. Tokens are shared by what they cost
(`modelserve.planning.speed.prompt_rows`): behind a long context a step has fewer of them, so that it takes no longer.
With T prefill tokens a step, T >= 2:

Short prompts do not wait for long ones. A prompt of n tokens beside any number of longer ones has its first token in
ceil(n / floor(T / 2)) steps; shorter ones add their own tokens to n. Of all orders, shortest remaining first has the
least mean time to the first token that half of the tokens can buy.

Long prompts do not starve. The oldest prefill gets at least half of every step, and a token at least, whatever arrives,
so it needs at most twice the steps that it needs alone; then the next oldest takes its place. A prompt therefore ends
within the steps that it and its elders need at half speed, a bound that no younger request can change.

Nothing is wasted: the whole of T is used while any prefill has tokens left, or what T may cost. Equal prompts are
computed one after the other (ties go to the oldest), so a step reads few contexts, as first come first served would.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from modelserve.planning.speed.prompt_rows import PromptCost
from modelserve_worker.batch import Int32Array
from modelserve_worker.scheduling.admission import SchedulerLimits
from modelserve_worker.scheduling.costs.mixed_pace import FEWEST_ROWS, MixedPace
from modelserve_worker.scheduling.running import SlotCounters

_ROUNDING = 1e-6  # of a row: what floating point may lose of a whole one


def prefill_shares(
    limits: SchedulerLimits,
    pace: MixedPace | None,
    counters: SlotCounters,
    prefills: Int32Array,
    decodes: Int32Array,
    *,
    rows: int,
    decoding: bool,
    most_drafts: int,
    held_back: int,
) -> tuple[Int32Array, int]:
    """Tokens of a step for each of the `prefills`, slots [P] of which the oldest is first, and what they may have
    together; beside `decodes`, which have so many `rows` in all, drafts included. `decoding`: some requests decode, if
    only in the next step. Others hold back so many rows of prompts (`SchedulerLimits.prefill_tokens`)."""
    remaining, computed = counters.prompt_rows(prefills, most_drafts=most_drafts), counters.computed[prefills]
    longest, prices, sizes = int(counters.known[prefills].max(initial=0)), limits.prompt_cost, limits.captured_rows
    beside = max(rows, int(decoding))  # whoever sits this step out waits for its end, too
    budget = limits.prefill_tokens(beside, remaining, longest, held_back=held_back)
    cost = prices.allowed(budget)
    if pace is not None and beside and len(prefills):
        context = float(counters.computed[decodes].mean()) if rows else 0.0
        cost = pace.cost(int(computed[0]), decodes=beside, context=context)
        prices, sizes = pace.prices, tuple(range(FEWEST_ROWS, budget + rows + 1, FEWEST_ROWS))
    shares = share_prefill_tokens(remaining, computed, budget, prices, cost)
    trim_to_captured(shares, remaining, rows, sizes)
    return shares, budget


def share_prefill_tokens(
    remaining: Int32Array, computed: Int32Array, budget: int, prices: PromptCost, cost: float
) -> Int32Array:
    """Tokens of this step for each prefill, from the tokens that each has `remaining` behind those `computed`, oldest
    first; [P] to [P]. `budget` is T, and `cost` what they may cost in all."""
    shares = np.zeros_like(remaining)
    if not len(remaining):
        return shares
    half = math.ceil(prices.rows(int(computed[0]), cost / 2) - _ROUNDING)
    shares[0] = min(int(remaining[0]), half, budget)
    cost -= prices.cost(int(computed[0]), int(shares[0]))
    budget -= int(shares[0])
    for index in np.argsort(remaining, kind="stable").tolist():
        if not budget or cost <= 0:
            break
        start = int(computed[index] + shares[index])
        affordable = math.floor(prices.rows(start, cost) + _ROUNDING)
        taken = min(int(remaining[index] - shares[index]), affordable, budget)
        shares[index] += taken
        cost -= prices.cost(start, taken)
        budget -= taken
    return shares


def trim_to_captured(shares: Int32Array, remaining: Int32Array, decodes: int, captured_rows: Sequence[int]) -> None:
    """Make a step of `decodes` and `shares` [P] as large as the next smaller captured one, where that only takes rows
    from one prefill which does not end in it: a captured step computes its padding too. `captured_rows` rise."""
    unfinished = np.flatnonzero((shares > 1) & (shares < remaining))
    if not len(unfinished):
        return
    longest = unfinished[np.argmax(shares[unfinished])]
    rows = decodes + int(shares.sum())
    smaller = [size for size in captured_rows if size <= rows]
    if smaller and rows - smaller[-1] < shares[longest]:
        shares[longest] -= rows - smaller[-1]
