"""How many drafts each decode takes along: those that bring most tokens a second over the whole step.

Drafts that are proposed are compared with the tokens that come, whether or not a step verified them; so a request that
takes none is still known to be worth some as soon as it is, and to ask costs nothing. The chance that draft j of a
request is right where those before it are is a mean over its latest proposals, and over everybody's while it has few.
A step with m drafts yields its decodes and the m largest products of chances; of all m the one with most tokens for
its time (`StepCosts`) is taken, 0 among them. Products fall along a proposal, so the m largest are beginnings of them.

Drafters whose proposals take time are asked for them, one step before they are verified: the one, for as many tokens,
that gives most for the time of step and drafts together, or none. Chances are kept by drafter. One that is not asked is
asked all the same now and then, for PROBE_SHARE of the time each, to hear whether it has come to be right: for one
draft of each request, or for all that cost the same.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from modelserve.sizing.speculation import STEP_DRAFTS
from modelserve_worker.batch import NOTHING_ASKED, Asked, AskedDrafter, Int32Array, SampledTokens
from modelserve_worker.scheduling.costs.step_costs import StepCosts
from modelserve_worker.scheduling.stats import TimedStep

LOW_ACCEPTANCE = 0.05
LOW_FOR_S = 120.0
_DECAY = 0.9  # of what a proposal of a request still counts when its next one is judged
_COMMON_DECAY = 0.998  # the same of everybody's
_COMMON_PRIOR = 0.5, 4.0  # the chance while nothing is known, and the proposals that this counts for
_OWN_PRIOR = 3.0  # proposals of its own with which a request counts as much as everybody
PROBE_SHARE = 0.005  # of the time of steps without drafts, of which nobody is to lose more than 2 % where none is right
PROBE_SHARE_OF_FEW, FEW_PROPOSALS = 0.1, 20  # of one of several drafters, while it was judged so few times

Floats = NDArray[np.float64]
Int64Array = NDArray[np.int64]

AskedDrafters = Sequence[AskedDrafter]

logger = logging.getLogger(__name__)


class _Way(NamedTuple):
    """To ask a drafter: for how many drafts, tokens a second with them and with none of it, and what a probe is, in
    tokens and s."""

    asked: int
    rate: float
    without: float
    probe: int
    probe_s: float


class Drafting:
    """Of one engine whose drafters propose up to `most` tokens at a time, for requests in `slots` slots.

    `costs` None: as many as are proposed. `asked`: the drafters that propose when they are asked to.
    """

    least_proposals = 200  # in LOW_FOR_S; fewer say nothing

    def __init__(
        self, most: int, slots: int, costs: StepCosts | None = None, now: Callable[[], float] = time.monotonic,
        *, asked: AskedDrafters = (),
    ) -> None:  # fmt: skip
        self.most, self._most_asked = most, tuple(drafter.most for drafter in asked)
        drafters = max(1, len(asked))
        self.proposed = np.zeros(slots, dtype=np.int32)  # tokens that were proposed to follow, when last seen
        self.low_acceptance = False
        self.drafts_total = self.draft_tokens_total = self.proposals_judged_total = 0
        self.accepted_per_position = np.zeros(most, dtype=np.int64)
        self._drafts = np.zeros((slots, most), dtype=np.int32)  # these tokens
        self._coming = np.zeros(slots, dtype=np.int32)  # what was asked for behind its latest step
        self._unasked = np.zeros(slots, dtype=np.int32)  # what was proposed beside that, when last seen
        self._of = np.zeros(slots, dtype=np.int32)  # which drafter that was asked of, and what is proposed came from
        self._coming_of = np.zeros(slots, dtype=np.int32)
        self._since_probe_s = np.zeros(drafters)
        self._costs, self._now = costs, now
        # By drafter, slot and place; and by drafter and place.
        self._tried, self._right = np.zeros((drafters, slots, most)), np.zeros((drafters, slots, most))
        self._all_tried, self._all_right = np.zeros((drafters, most)), np.zeros((drafters, most))
        self._places = np.arange(most)
        self._judged_of = np.zeros(drafters, dtype=np.int64)
        self._judged_since, self._judged, self._judged_right = now(), 0, 0

    def enter(self, slot: int) -> None:
        """Another request has the slot."""
        self.proposed[slot] = self._coming[slot] = self._unasked[slot] = 0
        self._tried[:, slot] = self._right[:, slot] = 0.0

    def drafts_of(self, slot: int, count: int) -> tuple[int, ...]:
        """The first ones of what is proposed to follow the last answered token of a request."""
        return tuple(self._drafts[slot, :count].tolist())

    def choose(self, slots: Int32Array, room: Int32Array, *, context: float) -> Int32Array:
        """Drafts of each decode [S], at most `room` [S], which may be below 0."""
        coming = self._coming[slots]
        possible = np.clip(room, 0, np.maximum(coming, self._unasked[slots])).astype(np.int32)
        if self._costs is None or not possible.any():
            return possible
        of = self._coming_of[slots]
        best, chances = self._likeliest(slots, possible, of)
        tokens = len(slots) + np.concatenate(([0.0], chances.cumsum()))
        seconds = self._costs.seconds(len(slots), len(best), context=context)
        asked = int(coming.max())
        last = self._costs.draft_seconds(int(of[coming.argmax()]), len(slots), asked, context=context)[asked]
        # What takes more time than it brings tokens at the rate of the best way to go on. The drafts are there already.
        rate = max(float((tokens / (seconds + last)).max()), tokens[0] / seconds[0])
        count = int(np.argmax(tokens - rate * seconds))
        chosen = np.bincount(best[:count] // self.most, minlength=len(slots))
        return chosen.astype(np.int32)

    def ask(self, slots: Int32Array, room: Int32Array, *, context: float) -> Asked:
        """How many drafts a step is to make behind itself, of each request that it draws a token for [S], and by which
        drafter; at most `room` [S] of them can be used by the next one."""
        if not self._most_asked or not len(slots):
            return NOTHING_ASKED
        asked = self._worth_asking(slots, np.clip(room, 0, self.most).astype(np.int32), context)
        self._coming[slots], self._coming_of[slots] = asked.drafts, asked.drafter
        return asked

    def _worth_asking(self, slots: Int32Array, room: Int32Array, context: float) -> Asked:
        most = [min(each, int(room.max())) for each in self._most_asked]
        if self._costs is None or not max(most):
            return Asked(most[0], 0)
        seconds = self._costs.seconds(len(slots), min(int(room.sum()), STEP_DRAFTS), context=context)
        drafting = [
            self._costs.draft_seconds(drafter, len(slots), each, context=context) for drafter, each in enumerate(most)
        ]
        ways = [self._way(drafter, slots, room, seconds, each) for drafter, each in enumerate(drafting)]
        plain_s = float(seconds[0])
        without = max(len(slots) / plain_s, *(way.without for way in ways))
        best = max(range(len(ways)), key=lambda drafter: ways[drafter].rate)
        asked = Asked(ways[best].asked, best) if ways[best].asked and ways[best].rate > without else NOTHING_ASKED
        self._since_probe_s += plain_s
        if asked.drafts:
            self._since_probe_s[best] = 0.0
        for drafter, way in enumerate(ways):
            share, probe_s = PROBE_SHARE, way.probe_s
            if len(ways) > 1 and self._all_tried[drafter, 0] < FEW_PROPOSALS:
                share = PROBE_SHARE_OF_FEW
            if asked.drafts and asked.drafter != drafter:  # whose drafts would come in its place
                probe_s += plain_s
            if most[drafter] and self._since_probe_s[drafter] * share >= probe_s:
                self._since_probe_s[drafter] = 0.0
                return Asked(way.probe, drafter)
        return asked

    def _way(self, drafter: int, slots: Int32Array, room: Int32Array, seconds: Floats, drafting: Floats) -> _Way:
        """What it would be to ask this drafter: `seconds` of steps by the drafts that they verify, `drafting` of its
        own by how many of each request it is asked for."""
        most = len(drafting) - 1
        best, chances = self._likeliest(slots, room, np.full(len(slots), drafter))
        depths = np.arange(most + 1)[:, None]
        # [depths, drafts]: those that would be proposed. What is proposed unasked is there at any depth.
        there = (best % self.most < depths) | (best % self.most < self._unasked[slots[best // self.most]])
        tokens = len(slots) + np.where(there, chances, 0.0).cumsum(axis=1)
        rates = (tokens / (seconds[there.cumsum(axis=1)] + drafting[:, None])).max(axis=1)
        asked, probe = int(np.argmax(rates)), int(np.flatnonzero(drafting <= drafting[min(1, most)])[-1])
        return _Way(asked, float(rates[asked]), float(rates[0]), probe, float(drafting[probe]))

    def _likeliest(self, slots: Int32Array, possible: Int32Array, of: Int32Array) -> tuple[Int64Array, Floats]:
        """Drafts [N] that are `possible` [S] of each request, by the drafters `of` [S], as index into [S, most], by
        their chance to be accepted; and these chances [N], falling. As many as a step may have."""
        chances = self.chances(slots, of).cumprod(axis=1)
        chances[self._places >= possible[:, None]] = -1.0
        best = np.argsort(-chances, axis=None, kind="stable")[: min(int(possible.sum()), STEP_DRAFTS)]
        return best, chances.ravel()[best]

    def chances(self, slots: Int32Array, of: Int32Array | int = 0) -> Floats:
        """Of each place in a proposal of the drafters `of` [S] to be right where those before it are: float64
        [S, most].

        Places differ little in that. So one that was not tried is taken to be as good as the first one; of a request,
        compared with everybody's.
        """
        chance, weight = _COMMON_PRIOR
        first = (self._all_right[:, :1] + chance * weight) / (self._all_tried[:, :1] + weight)
        common = (self._all_right + first * weight) / (self._all_tried + weight)
        common[:, :1] = first
        first, common = (np.broadcast_to(each[of], (len(slots), each.shape[1])) for each in (first, common))
        right, tried = self._right[of, slots], self._tried[of, slots] + _OWN_PRIOR
        of_first = (right[:, :1] + first * _OWN_PRIOR) / tried[:, :1]
        expected = np.minimum(common * (of_first / first), 1.0)
        expected[:, :1] = first
        own: Floats = (right + expected * _OWN_PRIOR) / tried
        return own

    def answer(
        self, slots: Int32Array, drawn: Int32Array, counts: Int32Array, sampled: SampledTokens, *, asked: Asked
    ) -> None:
        """A step drew `drawn` tokens of each request [S], of which `counts` count; it proposes what may follow, as many
        tokens of that as were `asked` for."""
        if not len(sampled.drafts) and not self.proposed[slots].any():
            return
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
        self.proposed[slots] = self._unasked[slots] = 0
        if len(sampled.drafts):
            self._drafts[slots], self.proposed[slots] = sampled.drafts, sampled.proposed
            self._unasked[slots] = np.where(sampled.proposed > asked.drafts, sampled.proposed, 0)
            self._of[slots] = asked.drafter

    def counts(self) -> dict[str, Any]:
        """Its part of EngineStats."""
        return {
            "drafts_total": self.drafts_total,
            "draft_tokens_total": self.draft_tokens_total,
            "accepted_per_position": tuple(self.accepted_per_position.tolist()),
            "low_acceptance": self.low_acceptance,
            "proposals_judged_total": self.proposals_judged_total,
            "draft_acceptance": float(self._all_right.sum() / max(self._all_tried.sum(), 1.0)),
            "judged_by_drafter": tuple(self._judged_of.tolist()),
            "acceptance_by_drafter": tuple(
                (self._all_right.sum(axis=1) / np.maximum(self._all_tried.sum(axis=1), 1.0)).tolist()
            ),
        }

    def observe(self, steps: Sequence[TimedStep]) -> None:
        """Steps ended."""
        if self._costs is not None:
            self._costs.observe(steps)

    def _judge(self, slots: Int32Array, tried: NDArray[np.bool_], right: NDArray[np.bool_]) -> None:
        of, decay = self._of[slots], np.where(tried[:, :1], _DECAY, 1.0)
        self._tried[of, slots] = self._tried[of, slots] * decay + tried
        self._right[of, slots] = self._right[of, slots] * decay + right
        for drafter in np.unique(of):
            mine = of == drafter
            judged_of = int(np.count_nonzero(tried[mine, 0]))
            self._judged_of[drafter] += judged_of
            common = _COMMON_DECAY**judged_of
            self._all_tried[drafter] = self._all_tried[drafter] * common + tried[mine].sum(axis=0)
            self._all_right[drafter] = self._all_right[drafter] * common + right[mine].sum(axis=0)
        judged = int(np.count_nonzero(tried[:, 0]))
        self.proposals_judged_total += judged
        self._judged += judged
        self._judged_right += int(np.count_nonzero(right[:, 0]))
        if self._judged >= self.least_proposals and self._now() - self._judged_since >= LOW_FOR_S:
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
