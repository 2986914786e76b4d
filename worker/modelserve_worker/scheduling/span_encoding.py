"""How many images and sounds a step makes rows of: what that costs is charged to its rows, so that it takes no longer.

A tower's work for the images and sounds whose first row is in a step comes before its own. It counts as rows of prompts
(`modelserve.planning.speed.encoding_cost`), and where a step has no room left for one, the chunk ends before it. In
steps in which requests decode there is one, or several that together are no larger than one may be: who decodes never
waits for more than one. The oldest prompt has half of a step for its rows and images, or what the others
leave. The first of a step is always made: one alone may be dearer than any step.
"""

from __future__ import annotations

import math

from modelserve.planning.speed.encoding_cost import FREE, EncodingCost, SpanCost
from modelserve_worker.batch import Int32Array
from modelserve_worker.embedded_spans import AudioFrames, EmbeddedSpan, ImagePatches
from modelserve_worker.scheduling.prompt_spans import mutual_around
from modelserve_worker.scheduling.running import RunningRequest, RunningRequests


class SpanEncoding:
    """Over the requests of one scheduler."""

    def __init__(self, running: RunningRequests, cost: EncodingCost) -> None:
        self._running = running
        self._cost = cost

    def bound(self, prefills: Int32Array, shares: Int32Array, *, budget: int, decoding: bool) -> None:
        """Change the shares [P] of prefills, of which none ends inside a mutual span, in place: rows and images of all
        of them together cost `budget` rows, or one image or sound is beside what is before it."""
        if not self._cost.images.each and not self._cost.audio.each:
            return
        made, left = 0, float(budget)
        others = min(int(shares[1:].sum()), budget // 2)  # what is the oldest one's to leave
        for index, running in enumerate(self._running.holders(prefills)):
            start = at = int(self._running.counters.computed[running.slot])  # rows before `at` are charged
            end = start + int(shares[index])
            kept = 0 if index else others
            for span in self._new(running, start, end):
                first, size = max(span.start, start), len(span)
                cost = self._of(span)
                price = cost.rows(size)
                left -= first - at
                rows = min(span.end, end) - first
                crowded = decoding and made + size > cost.most_soft_tokens
                if made and (crowded or rows + price > left - kept):
                    at = end = first
                    break
                left -= rows + price
                made += size
                at = first + rows
            if made:
                end = min(end, at + max(0, math.floor(left - kept)))
                cut = mutual_around(running.request, end)
                end = end if cut is None else max(start, cut.start)
            left -= end - at
            shares[index] = end - start

    def _of(self, span: EmbeddedSpan) -> SpanCost:
        if isinstance(span.embeddings, ImagePatches):
            return self._cost.images
        return self._cost.audio if isinstance(span.embeddings, AudioFrames) else FREE

    def _new(self, running: RunningRequest, start: int, end: int) -> list[EmbeddedSpan]:
        """What rows are made of where the chunk [start, end) is computed: all images and sounds in it, but one that an
        earlier chunk began with."""
        begun = self._running.counters.last_step[running.slot] >= 0
        return [
            span
            for span in running.request.spans
            if self._of(span).each
            and max(span.start, start) < min(span.end, end)
            and not (begun and span.start < start)
        ]
