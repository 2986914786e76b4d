"""How long steps with drafts take, and what they bring: one arithmetic for the worker's choice of k and for plans.

    verifying    a step of as many rows: weights of the rows themselves (padding chooses no experts), the rest as of the
                 captured size that takes it, the cache read once for each request, and, where requests have several
                 rows, layers x (drafted_layer_seconds + rows x drafted_row_seconds) of attention
    proposing    k times draft_time
    tokens       R (1 + p_1 + p_1 p_2 + ...) of k drafts of each of R requests, the k with most tokens a second, 0 too;
                 of as many requests as STEP_DRAFTS are enough for; of several drafters the one with most

p_j is the chance of draft j to be right where those before it are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from modelserve.planning.speed.draft_time import Proposing
from modelserve.planning.speed.step_time import RankSpeed, StepTime
from modelserve.sizing.cuda_graphs import decode_graph_rows
from modelserve.sizing.speculation import STEP_DRAFTS, Speculation


class _Captured(NamedTuple):
    """Captured steps of one kind, by their rows, which rise."""

    rows: tuple[int, ...]
    room: tuple[int, ...]  # for so many requests


class VerifyingSteps:
    """Steps of decodes without chunks, at the sizes that are captured."""

    def __init__(self, speed: RankSpeed, *, max_num_seqs: int, speculation: Speculation) -> None:
        self._speed = speed
        self._alone, self._drafted = _captured(max_num_seqs, speculation.num_tokens)
        self._padded: dict[tuple[int, bool], StepTime] = {}

    def least_rows(self, requests: float) -> int:
        """Of the smallest step with drafts that has room for so many requests."""
        return _at_least(requests, self._drafted.room, self._drafted.rows)

    def time(
        self, rows: float, *, drafted: bool, requests: float = 0, cache: float = 0.0, drafts: float = 0.0
    ) -> StepTime:
        """Of so many rows, of `requests`. `drafted`: some are drafts. `cache` and `drafts` are these terms, in s."""
        captured = self._drafted if drafted else self._alone
        size = _at_least(max(rows, self.least_rows(requests)) if drafted else rows, captured.rows, captured.rows)
        padded = self._padded.get((size, drafted))
        if padded is None:
            padded = self._speed.step(decodes=size)
            if drafted:
                padded = padded._replace(attention=self._speed.drafted_attention_seconds(size))
            self._padded[size, drafted] = padded
        _, linears, _, attention, elementwise, launches, all_reduces, prompts, _ = padded
        weights = self._speed.weights_seconds(rows)
        return StepTime(weights, linears, cache, attention, elementwise, launches, all_reduces, prompts, drafts)

    def reading(self, decodes: float, *, context: float, drafted: bool) -> float:
        """Of the cache of so many requests at a mean length of `context` tokens, in s."""
        return self._speed.cache_seconds(decodes, context=context, drafted=drafted)


@lru_cache(maxsize=256)  # every candidate asks, and there are few numbers of requests and of drafts
def _captured(max_num_seqs: int, num_tokens: int) -> tuple[_Captured, _Captured]:
    """Steps without drafts, and with them."""
    speculation = Speculation(num_tokens)
    sizes = decode_graph_rows(max_num_seqs, speculation)
    alone, drafted = (tuple(sorted(rows for rows, most in sizes if most == of)) for of in (1, speculation.rows))
    room = tuple(speculation.segments(rows, max_num_seqs) for rows in drafted)
    return _Captured(alone, alone), _Captured(drafted, room)


def _at_least(wanted: float, rising: Sequence[int], sizes: Sequence[int]) -> int:
    """The first of `sizes` whose number in `rising` is so large, or the last."""
    return sizes[min(bisect_left(rising, wanted), len(sizes) - 1)]


class DraftedStep(NamedTuple):
    """`time` with the term `drafts`; `tokens` come of each request, `drafts` of each are proposed and verified."""

    time: StepTime
    tokens: float
    drafts: int
    drafter: int = 0  # that makes them

    @property
    def rate(self) -> float:
        """Tokens a second of each request."""
        return self.tokens / self.time.seconds


class DraftWay(NamedTuple):
    """One of the drafters that may be asked."""

    proposing: Proposing | None  # None: proposals take no time worth counting
    chances: tuple[float, ...]  # by place of a proposal, to be right where those before it are


class DraftedSteps:
    """Expected steps of one rank whose requests' drafts are all as likely to be right."""

    def __init__(self, steps: VerifyingSteps, ways: Sequence[DraftWay], *, fixed: bool) -> None:
        """`fixed`: all of a proposal is made and verified."""
        self._steps, self._ways, self._fixed = steps, tuple(ways), fixed
        self._tokens = tuple(tuple(accumulate(_products(way.chances), initial=1.0)) for way in ways)

    def step(self, decodes: float, *, context: float) -> DraftedStep:
        """The one with most tokens a second, for time of step and drafts together, as workers ask for it."""
        return max(self.every(decodes, context=context), key=lambda each: each.rate)

    def every(self, decodes: float, *, context: float) -> list[DraftedStep]:
        """Of each drafter, with each number of drafts."""
        reading = tuple(self._steps.reading(decodes, context=context, drafted=drafted) for drafted in (False, True))
        found = list[DraftedStep]()
        for of, way in enumerate(self._ways):
            most = len(way.chances)
            drafting: Sequence[float] = (0.0,) * (most + 1)
            if way.proposing is not None:
                drafting = way.proposing.seconds(decodes, most, context=context)
            counts = (most,) if self._fixed else range(most + 1)
            found += [self._step(drafts, of, decodes, reading, drafting[drafts]) for drafts in counts]
        return found

    def _step(self, drafts: int, of: int, decodes: float, reading: Sequence[float], drafting: float) -> DraftedStep:
        share = min(1.0, STEP_DRAFTS / (decodes * drafts)) if drafts else 0.0  # of requests that a step has drafts of
        time = self._steps.time(
            decodes * (1.0 + drafts * share),
            drafted=drafts > 0,
            requests=decodes,
            cache=reading[drafts > 0],
            drafts=drafting,
        )
        return DraftedStep(time, 1.0 + share * (self._tokens[of][drafts] - 1.0), drafts, of)


def _products(chances: Sequence[float]) -> Iterator[float]:
    """Of each place to be right with all before it."""
    product = 1.0
    for chance in chances:
        product *= chance
        yield product
