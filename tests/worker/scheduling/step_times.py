"""Step times that tests decide by: of rows and drafts, or of nothing."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np

from modelserve_worker.scheduling.stats import TimedStep


class PerRow:
    """A step of n rows takes 1 + share (n - 1), and a draft of each request that is asked for `draft`."""

    def __init__(self, share: float, draft: float = 0.0) -> None:
        self.share, self.draft = share, draft

    def seconds(self, decodes: int, most_drafts: int, *, context: float) -> np.ndarray:
        return 1 + self.share * (decodes - 1 + np.arange(most_drafts + 1.0))

    def draft_seconds(self, drafter: int, requests: int, most: int, *, context: float) -> np.ndarray:
        return self.draft * np.arange(most + 1.0)

    def observe(self, steps: Sequence[TimedStep]) -> None: ...


class AnyDraftTime(PerRow):
    """Drafts that take nothing or very long, so that they are asked for or not."""

    def __init__(self, random: Random) -> None:
        super().__init__(0.0)
        self.random = random

    def draft_seconds(self, drafter: int, requests: int, most: int, *, context: float) -> np.ndarray:
        return self.random.choice([0.0, 0.1, 90.0]) * np.arange(most + 1.0)
