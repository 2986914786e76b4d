"""What drafts of tokens are made by, and how many at a time: all that sizing needs to know of speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass

from modelserve.model.assistant import AssistantArchitecture
from modelserve.sizing.draft_pages import DraftCache

MOST_DRAFTS = 16  # tokens of one proposal
STEP_DRAFTS = 256  # of all requests of a step: with more rows it waits for products, and no longer for weights
AUTO_DRAFTS = 8  # the most that are proposed where their number is chosen step by step


@dataclass(frozen=True, slots=True)
class Speculation:
    """A decode ends with at most `num_tokens` drafts; 0 without a drafter."""

    num_tokens: int = 0
    assistant: AssistantArchitecture | None = None  # proposals come of one that runs beside the model
    prompt_lookup: bool = False  # proposals come of the request's own tokens, of which the device keeps a copy
    draft_cache: DraftCache | None = None  # rows that a drafter keeps of every token, in the model's cache

    @property
    def rows(self) -> int:
        """Most rows of a decode."""
        return 1 + self.num_tokens

    def step_rows(self, max_num_seqs: int) -> int:
        """Most rows of a step without chunks."""
        return max_num_seqs + min(max_num_seqs * self.num_tokens, STEP_DRAFTS)

    def segments(self, rows: int, max_num_seqs: int) -> int:
        """Requests that a captured step of so many rows, drafts among them, has room for: twice as many as fill it,
        most of which may have one row, and all in the largest one."""
        if rows >= self.step_rows(max_num_seqs):
            return max_num_seqs
        return min(max_num_seqs, 2 * -(-rows // self.rows))


NO_DRAFTS = Speculation()
