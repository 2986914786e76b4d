"""A drafter that knows what the target will say: each of its proposals is right with a given probability, by seed."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from modelserve_worker.batch import AdmittedRequest, Asked
from modelserve_worker.drafters.drafter import Accepted, Drafter, Proposal


class TrueDrafter(Drafter):
    """`answers` are the tokens of every request, by id; a proposal behind their end is wrong."""

    def __init__(
        self, answers: Mapping[str, Sequence[int]], *, num_tokens: int, right: float, slots: int, longest: int,
        vocab_size: int, seed: int = 0, device: torch.device | None = None,
    ) -> None:  # fmt: skip
        self.num_tokens = num_tokens
        self.answers, self.right, self.seed, self.vocab_size = answers, right, seed, vocab_size
        self.proposals = torch.zeros(slots, longest + num_tokens + 1, dtype=torch.int32, device=device)

    def admit(self, admitted: Sequence[AdmittedRequest]) -> None:
        for request in admitted:
            known = [*request.prompt_token_ids, *self.answers[request.request_id]]
            random = np.random.default_rng([self.seed, zlib.crc32(request.request_id.encode())])
            length = self.proposals.shape[1]
            tokens = np.zeros(length, dtype=np.int64)
            tokens[: len(known)] = known[:length]
            wrong = random.random(length) >= self.right
            tokens[wrong] = (tokens[wrong] + random.integers(1, self.vocab_size, int(wrong.sum()))) % self.vocab_size
            self.proposals[request.slot] = torch.from_numpy(tokens.astype(np.int32)).to(self.proposals.device)

    def propose(self, accepted: Accepted, asked: Asked) -> Proposal:
        following = torch.arange(1, self.num_tokens + 1, device=accepted.slots.device)
        tokens = self.proposals[accepted.slots.long()[:, None], accepted.positions.long()[:, None] + following]
        return Proposal(tokens, torch.full_like(accepted.slots, self.num_tokens))
