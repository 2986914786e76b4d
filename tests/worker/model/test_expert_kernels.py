"""A mixture-of-experts layer whose backend is kernels says what it says in plain PyTorch, few rows and many."""

from __future__ import annotations

import pytest
import torch
from chosen_operations import ChosenOperations
from torch import Tensor

from modelserve.model.architecture import ModelArchitecture
from modelserve.sizing.backends.resolve import EXPERT_FEW_ROWS
from modelserve_worker.kernels.experts.experts import ExpertBackend, PlainExperts
from modelserve_worker.kernels.experts.experts_triton import TILES, TritonExperts
from modelserve_worker.layers.mlp import GatedMLP
from modelserve_worker.layers.moe import MixtureOfExperts
from modelserve_worker.layers.norm import RMSNorm
from modelserve_worker.layers.parallel import TensorParallel
from modelserve_worker.layers.placement import Placement

CPU, BF16 = torch.device("cpu"), torch.bfloat16


class TwoRanksOfTheSameShare(TensorParallel):
    """A group whose other rank has what this one has."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return 2 * x


def mixture(architecture: ModelArchitecture, backend: ExpertBackend, parallel: TensorParallel) -> MixtureOfExperts:
    few_rows = EXPERT_FEW_ROWS if isinstance(backend, TritonExperts) else 0
    operations = ChosenOperations(experts=backend, few_expert_rows=few_rows)
    layer = MixtureOfExperts(architecture, Placement(CPU, BF16, parallel, operations=operations))
    generator = torch.Generator().manual_seed(5)
    for parameter in layer.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(noise * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 1 + 0.2 * noise)
    layer.router.weight.mul_(8)
    return layer


@pytest.mark.parametrize("rows", [1, 11, EXPERT_FEW_ROWS + 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_kernels_and_plain_pytorch_say_the_same_of_a_layer(
    rows: int, ranks: int, architecture: ModelArchitecture
) -> None:
    parallel = TwoRanksOfTheSameShare(rank=0, size=ranks) if ranks > 1 else TensorParallel()
    plain, kernels = (mixture(architecture, backend, parallel) for backend in (PlainExperts(), TritonExperts(CPU)))
    x, dense = torch.randn((2, rows, architecture.hidden_size)).to(BF16)
    norm = RMSNorm(architecture.hidden_size, Placement(CPU, BF16), eps=1e-6)
    norm.weight.fill_(1.5)
    num_rows = torch.tensor([max(1, rows - 2)], dtype=torch.int32)
    (reference, reference_normed), (summed, normed) = (
        layer(
            x.clone(),
            x,
            layer.route(x, num_rows),
            lambda _: (dense, None),
            added_norm=norm,
            scalar=None,
            next_weight=norm.weight,
        )
        for layer in (plain, kernels)
    )
    for ours, theirs in ((summed, reference), (normed, reference_normed)):
        assert float((ours.double() - theirs.double()).norm() / theirs.double().norm()) < 1e-2


@pytest.mark.parametrize("rows", [3, 70])
def test_the_mlp_multiplied_beside_experts_is_the_mlp(rows: int, architecture: ModelArchitecture) -> None:
    layer = mixture(architecture, PlainExperts(), TensorParallel())
    mlp = GatedMLP(architecture.hidden_size, architecture.intermediate_size, Placement(CPU, BF16), down_in_parts=False)
    for matrix in (mlp.gate_up.matrix, mlp.down.matrix):
        matrix.dense().normal_(std=matrix.columns**-0.5)
    x, opened = torch.randn((2, rows, architecture.hidden_size)).to(BF16)
    norm = RMSNorm(architecture.hidden_size, Placement(CPU, BF16), eps=1e-6)
    norm.weight.fill_(1.5)
    routed = layer.route(x, torch.tensor([rows - 1], dtype=torch.int32))
    results = []
    for layer.experts.branch_rows in (0, rows):
        assert layer.experts.takes_mlp(rows) == bool(layer.experts.branch_rows)
        results.append(layer(x.clone(), opened, routed, mlp, added_norm=norm, scalar=None, next_weight=norm.weight))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_there_is_a_tile_for_every_count_of_few_rows() -> None:
    assert max(TILES) == EXPERT_FEW_ROWS
    assert list(TILES) == sorted(TILES)


@pytest.fixture(scope="module")
def architecture() -> ModelArchitecture:
    return ModelArchitecture(
        num_hidden_layers=2,
        full_attention_layers=(1,),
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_global_key_value_heads=2,
        head_dim=16,
        global_head_dim=32,
        sliding_window=8,
        max_position_embeddings=1024,
        vocab_size=128,
        num_experts=16,
        top_k_experts=3,
        moe_intermediate_size=32,
    )
