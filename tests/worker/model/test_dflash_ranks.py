"""Drafters of the DFlash family over ranks: all ranks draft the same tokens, those of one rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from dflash_drafters import KINDS, write_drafter
from dflash_ranks import drafted
from rank_logits import on_every_rank

from modelserve_worker.layers.parallel import TensorParallel


def test_ranks_draft_what_one_rank_drafts(tmp_path: Path) -> None:
    """Two ranks share heads, MLPs, an own head's tokens and what is looked up; a walk goes over all of them."""
    for kind in KINDS:
        write_drafter(kind, tmp_path / kind, seed=3)
    alone = drafted(tmp_path, TensorParallel())
    first, second = on_every_rank(partial(drafted, tmp_path), size=2, scratch=tmp_path)
    assert len(alone) == 3 * len(KINDS)
    for one, other, expected in zip(first, second, alone, strict=True):
        assert torch.equal(one, other)
        assert torch.allclose(one.double(), expected.double(), atol=1e-4, rtol=0)
