"""How many drafts each decode takes along: those that bring most tokens a second over the whole step.

Drafts that are proposed are compared with the tokens that come, whether or not a step verified them; so a request that
takes none is still known to be worth some as soon as it is, and to ask costs nothing. The chance that draft j of a
request is right where those before it are is a mean over its latest proposals, and over everybody's while it has few.
A step with m drafts yields its decodes and the m largest products of chances; of all m the one with most tokens for
its time (`StepCosts`) is taken, 0 among them. Products fall along a proposal, so the m largest are beginnings of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelserve_worker.batch import Int32Array, SampledTokens
from modelserve_worker.scheduling.stats import TimedStep
from modelserve_worker.scheduling.step_costs import StepCosts

LOW_ACCEPTANCE = 0.05
LOW_FOR_S = 120.0
LEAST_PROPOSALS = 200  # in that time; fewer say nothing
_DECAY = 0.9  # of what a proposal of a request still counts when its next one is judged
_COMMON_DECAY = 0.998  # the same of everybody's
_COMMON_PRIOR = 0.5, 4.0  # the chance while nothing is known, and the proposals that this counts for
_OWN_PRIOR = 3.0  # proposals of its own with which a request counts as much as everybody

Floats = NDArray[np.float64]

logger = logging.getLogger(__name__)


class Drafting:
    """Of one engine whose drafter proposes up to `most` tokens at a time, for requests in `slots` slots.

    `costs` None: as many as are proposed.
    """

    def __init__(
        self, most: int, slots: int, costs: StepCosts | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.most = most
        self.proposed = np.zeros(slots, dtype=np.int32)  # tokens that were proposed to follow, when last seen
        self.low_acceptance = False
        self.drafts_total = self.draft_tokens_total = 0
        self.accepted_per_position = np.zeros(most, dtype=np.int64)
        self._drafts = np.zeros((slots, most), dtype=np.int32)  # these tokens
        self._costs, self._now = costs, now
        self._tried, self._right = np.zeros((slots, most)), np.zeros((slots, most))  # by slot and place
        self._all_tried, self._all_right = np.zeros(most), np.zeros(most)
        self._places = np.arange(most)
        self._judged_since, self._judged, self._judged_right = now(), 0, 0

    def enter(self, slot: int) -> None:
        """Another request has the slot."""
        self.proposed[slot] = 0
        self._tried[slot] = self._right[slot] = 0.0

    def drafts_of(self, slot: int, count: int) -> tuple[int, ...]:
        """The first ones of what is proposed to follow the last answered token of a request."""
        return tuple(self._drafts[slot, :count].tolist())

    def choose(self, slots: Int32Array, room: Int32Array, *, context: float) -> Int32Array:
        """Drafts of each decode [S], at most `room` [S], which may be below 0."""
        possible = np.clip(room, 0, self.proposed[slots]).astype(np.int32)
        total = int(possible.sum())
        if self._costs is None or not total:
            return possible
        chances = self.chances(slots).cumprod(axis=1)
        chances[self._places >= possible[:, None]] = -1.0
        best = np.argsort(-chances, axis=None, kind="stable")[:total]
        tokens = len(slots) + np.concatenate(([0.0], chances.ravel()[best].cumsum()))
        count = int(np.argmax(tokens / self._costs.seconds(len(slots), total, context=context)))
        chosen = np.bincount(best[:count] // self.most, minlength=len(slots))
        return chosen.astype(np.int32)

    def chances(self, slots: Int32Array) -> Floats:
        """Of each place in a proposal to be right where those before it are: float64 [S, most]."""
        chance, weight = _COMMON_PRIOR
        common = (self._all_right + chance * weight) / (self._all_tried + weight)
        own: Floats = (self._right[slots] + common * _OWN_PRIOR) / (self._tried[slots] + _OWN_PRIOR)
        return own

    def answer(self, slots: Int32Array, drawn: Int32Array, counts: Int32Array, sampled: SampledTokens) -> None:
        """A step drew `drawn` tokens of each request [S], of which `counts` count; it proposes what may follow."""
        accepted, verified = counts - 1, drawn - 1
        last = sampled.token_ids[np.cumsum(counts) - 1]
        known = self.proposed[slots, None] > self._places
        at_last = self._places == accepted[:, None]
        right = (self._places < accepted[:, None]) | (at_last & (self._drafts[slots] == last[:, None]))
        self._judge(slots, known & (self._places <= accepted[:, None]), known & right)
        if verified.any():
            self.drafts_total += int(np.count_nonzero(verified))
            self.draft_tokens_total += int(verified.sum())
            self.accepted_per_position += (self._places < accepted[:, None]).sum(axis=0)
        self._drafts[slots], self.proposed[slots] = sampled.drafts, sampled.proposed

    def counts(self) -> dict[str, Any]:
        """Its part of EngineStats."""
        return {
            "drafts_total": self.drafts_total,
            "draft_tokens_total": self.draft_tokens_total,
            "accepted_per_position": tuple(self.accepted_per_position.tolist()),
            "low_acceptance": self.low_acceptance,
        }

    def observe(self, steps: Sequence[TimedStep]) -> None:
        """Steps ended."""
        if self._costs is not None:
            self._costs.observe(steps)

    def _judge(self, slots: Int32Array, tried: NDArray[np.bool_], right: NDArray[np.bool_]) -> None:
        decay = np.where(tried[:, :1], _DECAY, 1.0)
        self._tried[slots] = self._tried[slots] * decay + tried
        self._right[slots] = self._right[slots] * decay + right
        common = _COMMON_DECAY ** np.count_nonzero(tried[:, 0])
        self._all_tried = self._all_tried * common + tried.sum(axis=0)
        self._all_right = self._all_right * common + right.sum(axis=0)
        self._judged += int(np.count_nonzero(tried[:, 0]))
        self._judged_right += int(np.count_nonzero(right[:, 0]))
        if self._judged >= LEAST_PROPOSALS and self._now() - self._judged_since >= LOW_FOR_S:
            self._watch()

    def _watch(self) -> None:
        share, low = self._judged_right / self._judged, self.low_acceptance
        self.low_acceptance = share < LOW_ACCEPTANCE
        if self.low_acceptance and not low:
            logger.warning(
                "of %d proposals in the last %.0f s %.1f %% began with the token that came, less than %.0f %%: the "
                "drafter is not one of this model, or what it looks up does not repeat; drafts are rarely verified now",
                self._judged, self._now() - self._judged_since, 100 * share, 100 * LOW_ACCEPTANCE,
            )  # fmt: skip
        elif low and not self.low_acceptance:
            logger.info("drafts are right again: %.0f %% of the proposals began with the token that came", 100 * share)
        self._judged_since, self._judged, self._judged_right = self._now(), 0, 0
