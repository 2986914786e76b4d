"""What a drafter with a network reads and leaves at addresses that do not change, so that captured launches find it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from modelserve_worker.drafters.drafter import Accepted, Proposal


class DraftBuffers:
    """Of at most `max_num_seqs` requests, each int32: `slots`, `tokens` and `positions` [S] of the last token of each,
    and `drafts` [S, num_tokens]."""

    def __init__(self, *, max_num_seqs: int, num_tokens: int, device: torch.device) -> None:
        self._places = torch.zeros(3, max_num_seqs, dtype=torch.int32, device=device)
        self.slots, self.tokens, self.positions = self._places
        self.drafts = torch.zeros(max_num_seqs, num_tokens, dtype=torch.int32, device=device)
        counts = torch.arange(num_tokens + 1, dtype=torch.int32, device=device)
        self._counts = counts[:, None].repeat(1, max_num_seqs)  # by what is asked for

    def begin(self, accepted: Accepted, size: int) -> None:
        """Requests that are drafted for, and padding up to `size`: nobody's, at no position."""
        count = len(accepted.slots)
        if size > count:
            self._places[:, count:size] = 0
            self.slots[count:size] = -1
        for buffer, values in zip(self._places, (accepted.slots, accepted.tokens, accepted.positions), strict=True):
            buffer[:count] = values

    def proposal(self, requests: int, tokens: int) -> Proposal:
        """The first `tokens` drafts of each of so many requests."""
        return Proposal(self.drafts[:requests], self._counts[tokens, :requests])


def captured_size(sizes: Iterable[int], requests: int) -> int:
    """The smallest captured size that takes so many requests; their number where there is none."""
    return min((size for size in sizes if size >= requests), default=requests)
