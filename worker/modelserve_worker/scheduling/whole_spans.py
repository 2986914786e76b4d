"""Chunks of prompts with embedded spans: one that is mutual is computed in one step, or what a prefix cache left of it.

A chunk that would end inside such a span ends before it. At its first row it gets all of the rows that are left of it,
if the step has room for them. The oldest prefill takes that room from younger ones, the youngest first, and its step
may be longer than one beside decodes is meant to be; where decodes leave too little of a whole step, the youngest of
them sit one out, at most every other one. So a span waits for its elders and one more step, and a decode never for two
steps in a row. Who gets what else of a step is prefill.py's.
"""

from __future__ import annotations

from modelserve.planning.speed.encoding_cost import EncodingCost
from modelserve_worker.batch import Int32Array
from modelserve_worker.scheduling.prompt_spans import mutual_around
from modelserve_worker.scheduling.running import RunningRequests
from modelserve_worker.scheduling.span_encoding import SpanEncoding


class WholeSpans:
    """Over the requests of one scheduler, whose steps have `most` rows. Of images and sounds
    `cost`, see span_encoding."""

    def __init__(self, running: RunningRequests, most: int, cost: EncodingCost) -> None:
        self._running = running
        self._most = most
        self._encoding = SpanEncoding(running, cost)
        self._sat_out = False  # some decodes, in the step before

    def seat(self, decodes: Int32Array, prefills: Int32Array) -> tuple[Int32Array, int]:
        """The decodes of a step beside these prefills, the oldest first, and how many rows are left for drafts."""
        due, counters = int(len(prefills) > 0), self._running.counters
        if due and counters.spanned[prefills[0]]:
            (running,) = self._running.holders(prefills[:1])
            start = int(counters.computed[running.slot])
            span = mutual_around(running.request, start + 1)
            due = 1 if span is None else span.end - start
        self._sat_out = not self._sat_out and len(decodes) + due > self._most
        if self._sat_out:
            decodes = decodes[: self._most - due]
        return decodes, max(0, self._most - len(decodes) - due)

    def keep(self, prefills: Int32Array, shares: Int32Array, *, rows: int, budget: int, decoding: bool) -> None:
        """Change the shares [P] of prefills in place so that none ends inside a mutual span. Beside so many `rows` all
        of them together have at most `budget`, or what the oldest one's span needs; what making images and sounds
        costs included, of which there are few where requests are `decoding`, if only in the next step."""
        counters, room = self._running.counters, self._most - rows
        if not len(prefills) or not counters.spanned[prefills].any():
            return
        for index, running in enumerate(self._running.holders(prefills)):
            start = int(counters.computed[running.slot])
            span = mutual_around(running.request, start + int(shares[index]))
            if span is None or not shares[index]:
                continue
            if span.start > start:
                shares[index] = span.start - start
                continue
            need = span.end - start
            limit = budget if index else max(budget, need)
            excess = int(shares.sum() - shares[index]) + need - limit
            if not index and need <= room:
                for younger in range(len(shares) - 1, 0, -1):
                    given_up = min(max(excess, 0), int(shares[younger]))
                    shares[younger] -= given_up
                    excess -= given_up
            shares[index] = need if excess <= 0 and need <= room else 0
        self._encoding.bound(prefills, shares, budget=budget, decoding=decoding)
