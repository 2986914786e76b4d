"""An assistant whose heads, MLP and vocabulary ranks share: all ranks propose the same, and what one rank proposes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from assisted import write_assistant
from model_checkpoints import make_checkpoint
from rank_logits import on_every_rank
from rank_proposals import CASES, TOKENS, proposals

from modelserve_worker.layers.parallel import TensorParallel


def test_ranks_propose_what_one_rank_proposes(tmp_path: Path) -> None:
    for variant, centroids in CASES:
        make_checkpoint(variant, tmp_path / variant, seed=2)
        write_assistant(tmp_path / f"{variant}-assistant", tmp_path / variant, seed=3, centroids=centroids)
    alone = proposals(tmp_path, TensorParallel())
    first, second = on_every_rank(partial(proposals, tmp_path), size=2, scratch=tmp_path)
    for one, other, expected in zip(first, second, alone, strict=True):
        assert len(expected) >= TOKENS
        assert torch.equal(one, other), "ranks that propose other tokens verify other tokens"
        assert torch.equal(one, expected)
