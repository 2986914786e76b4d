"""What drafts of tokens are made by, and how many at a time: all that sizing needs to know of speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass

from modelserve.assistant import AssistantArchitecture

MOST_DRAFTS = 16  # tokens of one proposal
AUTO_DRAFTS = 8  # the most that are proposed where their number is chosen step by step


@dataclass(frozen=True, slots=True)
class Speculation:
    """A decode ends with at most `num_tokens` drafts; 0 without a drafter."""

    num_tokens: int = 0
    assistant: AssistantArchitecture | None = None  # proposals come of one that runs beside the model
    prompt_lookup: bool = False  # proposals come of the request's own tokens, of which the device keeps a copy

    @property
    def rows(self) -> int:
        """Most rows of a decode."""
        return 1 + self.num_tokens


NO_DRAFTS = Speculation()
