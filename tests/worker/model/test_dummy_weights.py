"""Random weights behave like a real model's where it matters: sizes, scales, and the same tensors at every TP size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from dense_attention import DenseAttention, dense_logits
from model_checkpoints import VARIANTS, random_tokens, read_architecture
from torch import Tensor

from modelserve_worker.layers.parallel import TensorParallel
from modelserve_worker.layers.placement import Placement
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM
from modelserve_worker.models.gemma4_checkpoint import weight_sources
from modelserve_worker.models.weight_source import WeightSource
from modelserve_worker.weights.dummy import DummyWeights
from modelserve_worker.weights.loader import load_model


def dummy(directory: Path, *, rank: int = 0, size: int = 1, seed: int = 0) -> Gemma4ForCausalLM:
    """No file of `directory` but config.json is read."""
    return load_model(
        read_architecture(directory),
        Path("does-not-exist"),
        Placement(torch.device("cpu"), torch.float32, TensorParallel(rank=rank, size=size)),
        load_format="dummy",
        seed=seed,
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_scores_are_unsaturated_and_logits_ordinary(variant: str, checkpoint: Callable[[str], Path]) -> None:
    spreads: list[float] = []

    class Scores(DenseAttention):
        def attend_heads(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
            result = super().attend_heads(layer, q, k, v)
            keys = self.rows[self.producer(layer)][0]
            keys = keys.repeat_interleave(q.shape[1] // keys.shape[1], dim=1)
            spreads.append(float(torch.einsum("qhd,khd->hqk", q, keys).std()))
            return result

    model = dummy(checkpoint(variant))
    logits = dense_logits(model, random_tokens(40, seed=1), Scores(model.architecture))
    assert logits.isfinite().all()
    assert 0.3 < float(logits.std()) < 10
    assert len(spreads) == model.architecture.num_hidden_layers
    assert all(0.3 < spread < 3 for spread in spreads), spreads


@pytest.mark.parametrize("variant", ["E2B", "26B-A4B", "31B"])
def test_ranks_share_the_tensors_of_one_model(variant: str, checkpoint: Callable[[str], Path]) -> None:
    directory = checkpoint(variant)

    def filled(**place: int) -> list[WeightSource]:
        """In blocks so small that shares begin and end inside them."""
        sources = list(weight_sources(dummy(directory, **place)))
        for source in sources:
            DummyWeights(seed=0, device=torch.device("cpu"), dtype=torch.float32, block_elements=640).fill(source)
        return sources

    whole = {source.name: source for source in filled()}
    for rank in range(2):
        for source in filled(rank=rank, size=2):
            for ours, full in zip(source.regions, whole[source.name].regions, strict=True):
                start = ours.source - full.source + full.target
                expected = whole[source.name].parameter.narrow(ours.dim, start, ours.length)
                assert torch.equal(source.parameter.narrow(ours.dim, ours.target, ours.length), expected), source.name


def test_the_seed_decides(checkpoint: Callable[[str], Path]) -> None:
    directory = checkpoint("12B")
    first, again, other = (dummy(directory, seed=seed).embedding.weight for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
