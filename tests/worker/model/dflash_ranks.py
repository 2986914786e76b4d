"""What ranks draft with drafters of the DFlash family, each with its share; for processes of their own."""

from __future__ import annotations

from pathlib import Path

import torch
from dflash_drafters import HIDDEN, KINDS, TARGET_LAYERS, DenseDraftAttention, target_architecture
from torch import Tensor

from modelserve_worker.layers.parallel import TensorParallel
from modelserve_worker.layers.placement import Placement
from modelserve_worker.weights.loader import load_dflash, load_model


def drafted(directory: Path, parallel: TensorParallel) -> list[Tensor]:
    """Of each kind, whose checkpoint is in a directory of its name: rows, tokens and, if any, confidence."""
    placement = Placement(torch.device("cpu"), torch.float32, parallel)
    target = load_model(target_architecture(), directory, placement, load_format="dummy", seed=1)
    generator = torch.Generator().manual_seed(3)
    states = [torch.randn(12, HIDDEN, generator=generator) for _ in range(TARGET_LAYERS + 1)]
    tokens, positions = torch.tensor([7, 91], dtype=torch.int32), torch.tensor([12, 4], dtype=torch.int32)
    found = []
    for kind in KINDS:
        drafter = load_dflash(directory / kind, target)
        tapped = torch.cat([states[tap + 1] for tap in drafter.architecture.taps], dim=-1)
        rows = drafter.context_rows(drafter.context(tapped), torch.arange(len(tapped)))
        dense = [tuple(each.expand(2, *each.shape) for each in pair) for pair in rows]
        attention = DenseDraftAttention(drafter.architecture, dense, positions)
        said = drafter(tokens, positions, attention)
        found += [drafter.rows(tokens, positions, attention), said.tokens]
        found.append(torch.zeros(0) if said.confidence is None else said.confidence)
    return found
