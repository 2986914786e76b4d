"""How long steps with drafts take, and what they bring: one arithmetic for the worker's choice of k and for plans.

    verifying    a step of as many rows: weights of the rows themselves (padding chooses no experts), the rest as of the
                 captured size that takes it, the cache read once for each request, and, where requests have several
                 rows, layers x (drafted_layer_seconds + rows x drafted_row_seconds) of attention
    proposing    k times draft_time
    tokens       R (1 + p_1 + p_1 p_2 + ...) of k drafts of each of R requests, the k with most tokens a second, 0 too;
                 of as many requests as STEP_DRAFTS are enough for

p_j is the chance of draft j to be right where those before it are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from modelserve.planning.draft_time import DraftSpeed
from modelserve.planning.step_time import RankSpeed, StepTime
from modelserve.sizing.cuda_graphs import decode_graph_rows
from modelserve.sizing.speculation import STEP_DRAFTS, Speculation


class VerifyingSteps:
    """Steps of decodes without chunks, at the sizes that are captured."""

    def __init__(self, speed: RankSpeed, *, max_num_seqs: int, speculation: Speculation) -> None:
        self._speed, self._speculation, self._max_num_seqs = speed, speculation, max_num_seqs
        captured = decode_graph_rows(max_num_seqs, speculation)
        self._sizes = {
            drafted: sorted(rows for rows, most in captured if most == (speculation.rows if drafted else 1))
            for drafted in (False, True)
        }
        self._padded: dict[int, StepTime] = {}

    def least_rows(self, requests: float) -> int:
        """Of the smallest step with drafts that has room for so many requests."""
        sizes = self._sizes[True]
        room = (self._speculation.segments(rows, self._max_num_seqs) for rows in sizes)
        return next((rows for rows, most in zip(sizes, room, strict=True) if most >= requests), sizes[-1])

    def time(self, rows: float, *, drafted: bool, requests: float = 0) -> StepTime:
        """Of so many rows, of `requests`, without what is read of the cache. `drafted`: some are drafts."""
        least = self.least_rows(requests) if drafted else 0
        size = self._captured(max(rows, least), self._sizes[drafted])
        if size not in self._padded:
            self._padded[size] = self._speed.step(decodes=size)
        time = self._padded[size]._replace(weights=self._speed.weights_seconds(rows))
        return time._replace(attention=self._speed.drafted_attention_seconds(size)) if drafted else time

    def reading(self, decodes: float, *, context: float) -> float:
        """Of the cache of so many requests at a mean length of `context` tokens, in s."""
        return self._speed.cache_seconds(decodes, context=context)

    @staticmethod
    def _captured(rows: float, sizes: Sequence[int]) -> int:
        return sizes[min(bisect_left(sizes, rows), len(sizes) - 1)]


@dataclass(frozen=True)
class DraftedStep:
    """`time` with the term `drafts`; `tokens` come of each request, `drafts` of each are proposed and verified."""

    time: StepTime
    tokens: float
    drafts: int


class DraftedSteps:
    """Expected steps of one rank whose requests' drafts are all as likely to be right."""

    def __init__(
        self,
        steps: VerifyingSteps,
        proposing: DraftSpeed | None,
        *,
        chances: Sequence[float],
        fixed: bool,
    ) -> None:
        """`proposing` None: proposals take no time worth counting. `chances` by place of a proposal; `fixed`: all of it
        is made and verified."""
        self._steps, self._proposing = steps, proposing
        self._counts = (len(chances),) if fixed else range(len(chances) + 1)
        self._tokens = tuple(accumulate(_products(chances), initial=1.0))

    def step(self, decodes: float, *, context: float) -> DraftedStep:
        """The one with most tokens a second, for time of step and drafts together, as workers ask for it."""
        reading = self._steps.reading(decodes, context=context)
        draft = self._proposing.seconds(decodes, context=context) if self._proposing is not None else 0.0
        return max((self._step(drafts, decodes, reading, draft) for drafts in self._counts), key=_rate)

    def _step(self, drafts: int, decodes: float, reading: float, draft: float) -> DraftedStep:
        share = min(1.0, STEP_DRAFTS / (decodes * drafts)) if drafts else 0.0  # of requests that a step has drafts of
        time = self._steps.time(decodes * (1.0 + drafts * share), drafted=drafts > 0, requests=decodes)
        time = time._replace(cache=reading, drafts=drafts * draft)
        return DraftedStep(time, 1.0 + share * (self._tokens[drafts] - 1.0), drafts)


def _rate(step: DraftedStep) -> float:
    return step.tokens / step.time.seconds


def _products(chances: Sequence[float]) -> Iterator[float]:
    """Of each place to be right with all before it."""
    product = 1.0
    for chance in chances:
        product *= chance
        yield product
