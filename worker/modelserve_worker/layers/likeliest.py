"""The token with the largest score, where ranks have the scores of a share of them each."""

from __future__ import annotations

import torch
from torch import Tensor

from modelserve_worker.layers.parallel import Shard, TensorParallel


def likeliest(scores: Tensor, shard: Shard, parallel: TensorParallel) -> Tensor:
    """scores [N, shard size] of this rank's tokens -> int64 [N]: of equals the lowest, the same on every rank."""
    tokens = scores.argmax(-1)
    if parallel.size == 1:
        return tokens
    best = scores.gather(1, tokens[:, None]).float()
    found = parallel.all_gather(torch.cat((best.double(), (tokens[:, None] + shard.start)), dim=-1))
    values, named = found.view(len(scores), parallel.size, 2).unbind(-1)
    return named.gather(1, values.argmax(-1, keepdim=True))[:, 0].long()
