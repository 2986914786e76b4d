"""What drafts of tokens are made by, and how many at a time: all that sizing needs to know of speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass, replace

from modelserve.model.assistant import AssistantArchitecture
from modelserve.model.drafters.dflash import DFlashArchitecture
from modelserve.model.drafters.reading import DrafterArchitecture
from modelserve.sizing.draft_pages import DraftCache
from modelserve.sizing.weights.dflash import draft_cache

MOST_DRAFTS = 16  # tokens of one proposal
STEP_DRAFTS = 256  # of all requests of a step: with more rows it waits for products, and no longer for weights
MOST_DRAFTERS = 2  # an assistant, and one that drafts a block at once
AUTO_DRAFTS = 8  # the most that are proposed where their number is chosen step by step


@dataclass(frozen=True, slots=True)
class Speculation:
    """A decode ends with at most `num_tokens` drafts; 0 without a drafter."""

    num_tokens: int = 0
    assistant: AssistantArchitecture | None = None  # proposals come of one that runs beside the model
    block: DFlashArchitecture | None = None  # and of one that drafts a block at once
    prompt_lookup: bool = False  # proposals come of the request's own tokens, of which the device keeps a copy

    def with_drafter(self, drafter: DrafterArchitecture, *, as_many_as_pay: bool) -> Speculation:
        """With this one, too. A block has as many tokens as it was trained for, where those are proposed that pay."""
        if isinstance(drafter, AssistantArchitecture):
            return replace(self, assistant=drafter)
        most, alone = min(drafter.num_drafts, MOST_DRAFTS), self.assistant is None and not self.prompt_lookup
        count = max(most, 0 if alone else self.num_tokens) if as_many_as_pay else self.num_tokens
        if alone:
            count = min(count, most)
        return replace(self, num_tokens=count, block=drafter)

    @property
    def without_drafters(self) -> Speculation:
        """Prompt lookup alone, of as many tokens."""
        return replace(self, assistant=None, block=None)

    @property
    def draft_cache(self) -> DraftCache | None:
        """Rows that a drafter keeps of every token, in the model's cache."""
        return None if self.block is None else draft_cache(self.block)

    @property
    def drafters(self) -> tuple[DrafterArchitecture, ...]:
        """Those that propose when they are asked to, in the worker's order."""
        return tuple(each for each in (self.assistant, self.block) if each is not None)

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
