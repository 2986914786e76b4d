"""Prompt lookup: what followed, earlier in a request's own tokens, the last of them that it has now.

`history` int32 [slots, L] holds the tokens of each slot from its row's beginning on: prompt and answer. A *prediction*
of the answer, which a client may give, lies at the row's end, `predicted` int32 [slots] tokens of it: an answer that
grows into it has passed what it writes over, as a prediction is at most as long as what the prompt leaves of the row.

A *match* is a place whose last tokens are the request's last ones: as many as LONGEST_MATCH are compared, and fewer
than SHORTEST_MATCH are none. The longest match counts; of equal ones one in the prediction, there the nearest to the
place that an answer as long so far would have come to, and else the latest. At the beginning of an answer that began
like the prediction, all that was said so far is match enough. What followed the match is the proposal. One that reaches
the request's last token goes on with what lies between, as a text that repeats itself does. Prompt lookup is Saxena's
(github.com/apoorvumang/prompt-lookup-decoding).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

LONGEST_MATCH = 8
SHORTEST_MATCH = 3
_PLACES = 1 << 18  # that plain PyTorch compares at a time: about 20 MB


class LookupBackend(Protocol):
    """These operations on one kind of device, for S requests; all arguments int32 unless said otherwise."""

    def remember(
        self, history: Tensor, slots: Tensor, sampled: Tensor, firsts: Tensor, counts: Tensor, positions: Tensor
    ) -> None:
        """Write the last `counts` [S] tokens, those of `sampled` int64 [N] from `firsts` [S] on, into the rows of
        `slots` [S], the last one at `positions` [S]; below 0 as 0."""
        ...

    def look_up(
        self, history: Tensor, slots: Tensor, positions: Tensor, prompts: Tensor, predicted: Tensor, num_tokens: int
    ) -> tuple[Tensor, Tensor]:
        """Proposals [S, num_tokens] behind the tokens at `positions` [S], and how long each is [S]; behind that they
        are 0. `prompts` [slots]: tokens of each slot's prompt."""
        ...


class PlainLookup:
    """Prompt lookup in plain PyTorch, on any device."""

    def remember(
        self, history: Tensor, slots: Tensor, sampled: Tensor, firsts: Tensor, counts: Tensor, positions: Tensor
    ) -> None:
        segments = torch.repeat_interleave(torch.arange(len(slots), device=slots.device), counts)
        offsets = torch.arange(len(segments), device=slots.device) - (counts.cumsum(0) - counts)[segments]
        at = (positions - counts + 1)[segments] + offsets
        history[slots.long()[segments], at] = sampled[firsts[segments] + offsets].clamp(min=0).int()

    def look_up(
        self, history: Tensor, slots: Tensor, positions: Tensor, prompts: Tensor, predicted: Tensor, num_tokens: int
    ) -> tuple[Tensor, Tensor]:
        most = max(1, _PLACES // history.shape[1])
        found = [
            self._looked_up(history, *some, prompts, predicted, num_tokens)
            for some in ((slots[at : at + most], positions[at : at + most]) for at in range(0, len(slots), most))
        ]
        tokens, counts = zip(*found, strict=True)
        return torch.cat(tokens), torch.cat(counts)

    def _looked_up(
        self, history: Tensor, slots: Tensor, positions: Tensor, prompts: Tensor, predicted: Tensor, num_tokens: int
    ) -> tuple[Tensor, Tensor]:
        length, rows = history.shape[1], slots.long()
        last, begins = positions.long()[:, None], length - predicted[rows].long()[:, None]
        said = last - prompts[rows].long()[:, None] + 1
        width = length if bool((predicted[rows] > 0).any()) else int(positions.max()) + 1  # on the CPU nobody waits
        texts, places = history[rows, :width].long(), torch.arange(width, device=slots.device)[None]
        in_prediction = (places >= begins) & (places > last)
        matching = (places < last) | (in_prediction & (places < length - 1))
        matched = torch.zeros_like(texts)
        for ago in range(LONGEST_MATCH):
            wanted = texts.gather(1, (last - ago).clamp(min=0))
            before = places - ago
            same = texts.gather(1, before.clamp(min=0).expand(len(rows), -1)) == wanted
            same &= (before >= 0) & (last >= ago)
            of_prediction = torch.where(before >= begins, same & (before > last), said <= ago)
            matching &= torch.where(in_prediction, of_prediction, same)
            matched += matching
        beside = places - (begins + said - 1)
        nearness = 2 * length - 1 - torch.where(beside < 0, -2 * beside - 1, 2 * beside)
        keys = (2 * matched + in_prediction) * (2 * length) + torch.where(in_prediction, nearness, places)
        found = torch.where(matched >= SHORTEST_MATCH, keys, -1).max(dim=1, keepdim=True)
        place = torch.where(found.values < 0, -1, found.indices)
        return _following(history[rows].long(), last, place, num_tokens)


def _following(texts: Tensor, last: Tensor, place: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    length = texts.shape[1]
    ahead = torch.arange(num_tokens, device=texts.device)[None]
    own = place < last
    at = place + 1 + torch.where(own, ahead % (last - place).clamp(min=1), ahead)
    there = (place >= 0) & (at < length)
    tokens = torch.where(there, texts.gather(1, at.clamp(max=length - 1)), 0)
    return tokens.int(), there.sum(dim=1).int()
