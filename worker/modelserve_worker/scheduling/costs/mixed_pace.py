"""How many rows of prompts a step takes beside decodes where no plan knows the device: what a set time computes.

On a GPU `max_num_mixed_tokens` is planned from its rates. What a CPU does is not known before it runs: two cores take
seconds for what a GPU does in 40 ms, and whoever decodes would wait for all of it. So there the rows of a mixed step
add `target` seconds to what its decodes take. They add more where less would be no use: as long as the decodes take,
since whoever has a token a second hardly notices another one; and _READINGS times what reading the prompt's keys takes,
which each step does anew, so that a prompt never waits long for steps that mostly read. `max_num_mixed_tokens` remains
the most.

The start of the engine times four steps (`StepSeconds`), which say how the time follows from rows and context: rows
become fewer along a prompt. How fast the machine is at the moment, beside whatever else it runs, is in the steps
themselves: medians of the last _RECENT of what they took over what they would have taken at the start, of decodes and
of prompts apart, so that one step that was interrupted changes nothing. Neither may differ from the start by more than
_FARTHEST: with FEWEST_ROWS that is the least of a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from modelserve.planning.speed.prompt_rows import PromptCost
from modelserve_worker.scheduling.stats import TimedStep
from modelserve_worker.step_seconds import StepSeconds

FEWEST_ROWS = 16  # a block of profile exact; a step with fewer reads the weights for little
_RECENT = 5  # steps: it takes three to say something else
_FARTHEST = 16.0
_READINGS = 3.5  # with 4 the last steps of a long prompt took up to 0.6 s, with 3 slow machines pay double


class MixedPace:
    """Of one engine. One thread calls it."""

    def __init__(self, start: StepSeconds, *, target: float, most_rows: int) -> None:
        """`target` in s; steps of more than `most_rows` rows of prompts say nothing about those beside decodes."""
        self._start = start
        self._target = target
        self._most_rows = most_rows
        self._decodes: deque[float] = deque([1.0], maxlen=_RECENT)
        self._prompts: deque[float] = deque([1.0], maxlen=_RECENT)
        self.prices = PromptCost() if not start.pair else PromptCost(start.row / start.pair)  # of rows, by their place

    def observe(self, steps: Sequence[TimedStep]) -> None:
        """Steps ended."""
        for step in steps:
            beside = self._start.decodes(step.decodes + step.drafts, step.context)
            if not step.prompt_rows:
                self._decodes.append(_within(step.seconds / beside))
            elif FEWEST_ROWS // 2 <= step.prompt_rows <= self._most_rows:
                alone = self._start.chunk(step.prompt_rows, step.prompt_context)
                left = step.seconds - median(self._decodes) * beside
                self._prompts.append(_within(left / alone))

    def cost(self, start: int, *, decodes: int, context: float) -> float:
        """What the prompts' rows of a step may cost, in first rows by `prices`, where the oldest chunk lies behind
        `start` tokens, beside so many rows of decodes behind `context` tokens on average."""
        slower = median(self._prompts)
        beside, reading = median(self._decodes) * self._start.decodes(decodes, context), self._start.key * start
        seconds = max(max(self._target, beside) / slower - reading, _READINGS * reading)
        return max(seconds / self._start.row, self.prices.cost(start, FEWEST_ROWS))


def _within(ratio: float) -> float:
    return min(max(ratio, 1 / _FARTHEST), _FARTHEST)
