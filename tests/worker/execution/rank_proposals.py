"""What ranks of a small model propose with an assistant, each with its share of both; for processes of their own."""

from __future__ import annotations

from pathlib import Path

import torch
from assisted import Between, assistant_for, engine_with
from model_checkpoints import load_checkpoint, random_tokens
from paged_logits import geometry_of
from torch import Tensor

from modelserve_worker.layers.parallel import TensorParallel
from modelserve_worker.request import Request, SamplingParams

CASES = (("31B", 0), ("E4B", 32))  # V alone and a dense head; shared caches and centroids
K, SLOTS, LONGEST, TOKENS = 3, 2, 96, 10


def proposals(directory: Path, parallel: TensorParallel) -> list[Tensor]:
    """Of each case: proposals [N, 1 + k] behind the positions that they follow, in order."""
    found = []
    for variant, _ in CASES:
        model = load_checkpoint(directory / variant, parallel=parallel)
        made: list[Tensor] = []

        def look(names: list[str], positions: list[int], proposed: Tensor, made: list[Tensor] = made) -> Tensor:
            made.append(torch.cat((torch.tensor(positions)[:, None], proposed.long()), dim=1))
            return proposed

        drafter = Between(assistant_for(model, directory / f"{variant}-assistant", num_tokens=K, slots=SLOTS), look)
        engine = engine_with(model, geometry_of(model), drafter, chunk=24, slots=SLOTS, longest=LONGEST, pool_of=SLOTS)
        for number in (40, 7):
            sampling = SamplingParams(seed=number, max_tokens=TOKENS, temperature=0.0)
            engine.add(Request(str(number), tuple(random_tokens(number, seed=number)), sampling))
        while engine.has_work:
            for output in engine.step():
                assert output.error is None, output.error
        found.append(torch.cat(made))
    return found
