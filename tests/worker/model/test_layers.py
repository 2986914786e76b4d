"""Closed-form facts of single layers: sharding, rotary frequencies, routing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from modelserve.errors import InvalidInput
from modelserve.model.architecture import LayerKind, ModelArchitecture
from modelserve_worker.kernels.experts.experts import NO_EXPERT, Choice, PlainExperts, Shares
from modelserve_worker.kernels.products import row_blocks
from modelserve_worker.kernels.products.row_blocks import grouped_product
from modelserve_worker.layers.moe import Experts, Router
from modelserve_worker.layers.norm import RMSNorm
from modelserve_worker.layers.parallel import Shard, TensorParallel
from modelserve_worker.layers.placement import Placement
from modelserve_worker.layers.rotary import RotaryEmbedding, inverse_frequencies, rotate

CPU = torch.device("cpu")
PLACEMENT = Placement(CPU, torch.float32)


@pytest.mark.parametrize(
    ("size", "kv_heads", "heads_by_rank"),
    [
        (1, 4, [(0, 4)]),
        (2, 4, [(0, 2), (2, 4)]),
        (4, 4, [(0, 1), (1, 2), (2, 3), (3, 4)]),
        (4, 2, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (4, 1, [(0, 1)] * 4),
        (8, 4, [(0, 1), (0, 1), (1, 2), (1, 2), (2, 3), (2, 3), (3, 4), (3, 4)]),
    ],
)
def test_each_rank_holds_the_kv_heads_its_queries_read(
    size: int, kv_heads: int, heads_by_rank: list[tuple[int, int]]
) -> None:
    for rank, expected in enumerate(heads_by_rank):
        shard = TensorParallel(rank=rank, size=size).kv_shard(32, kv_heads)
        assert (shard.start, shard.stop) == expected
        queries = TensorParallel(rank=rank, size=size).shard(32, what="heads")
        assert {query * kv_heads // 32 for query in range(queries.start, queries.stop)} == set(range(*expected))


def test_sizes_that_do_not_divide_are_refused_with_the_numbers() -> None:
    with pytest.raises(InvalidInput, match="tensor parallel size 3 does not divide vocab_size 262144"):
        TensorParallel(rank=0, size=3).shard(262144, what="vocab_size")
    with pytest.raises(InvalidInput, match="6 neither divides nor is a multiple of the 4 KV heads"):
        TensorParallel(rank=0, size=6).kv_shard(24, 4)


def test_a_shard_scales_from_heads_to_rows() -> None:
    assert Shard(1, 2, 4).scaled(256) == Shard(256, 512, 1024)


def test_global_frequencies_use_the_full_head_and_stop_after_a_quarter() -> None:
    frequencies = inverse_frequencies(512, theta=1e6, rotated_pairs=64)
    assert frequencies[:3].tolist() == pytest.approx([1.0, 0.94746, 0.89769], abs=1e-5)
    assert frequencies[63].item() == pytest.approx(0.033376, abs=1e-6)
    assert frequencies[64:].count_nonzero() == 0


def test_rotation_pairs_lie_half_a_head_apart() -> None:
    x = torch.zeros(1, 1, 512)
    x[..., 3] = 1.0
    cos, sin = torch.ones(1, 256), torch.zeros(1, 256)
    cos[0, 3], sin[0, 3] = 0.6, 0.8
    turned = rotate(x, cos, sin)[0, 0]
    assert turned.nonzero().flatten().tolist() == [3, 259]
    assert turned[[3, 259]].tolist() == pytest.approx([0.6, 0.8])


def test_scores_depend_on_the_distance_alone(architecture: ModelArchitecture) -> None:
    rope = RotaryEmbedding(architecture, device=CPU)
    generator = torch.Generator().manual_seed(0)
    for kind, dim in ((LayerKind.SLIDING, architecture.head_dim), (LayerKind.GLOBAL, architecture.global_head_dim)):
        q, k = torch.randn((2, 1, 1, dim), generator=generator)
        scores = [
            (
                rotate(q, *rope.cos_sin(kind, torch.tensor([at + 7])))
                * rotate(k, *rope.cos_sin(kind, torch.tensor([at])))
            ).sum()
            for at in (0, 5, 900)
        ]
        assert torch.stack(scores).std() < 1e-3


def test_the_norm_weight_multiplies_as_it_is() -> None:
    norm = RMSNorm(4, PLACEMENT, eps=1e-6)
    norm.weight.data = torch.tensor([0.0, 1.0, 2.0, 3.0])
    assert norm(torch.full((1, 4), 5.0))[0].tolist() == pytest.approx([0.0, 1.0, 2.0, 3.0], abs=1e-5)


def _routed(experts: Experts, x: Tensor, choice: Choice) -> Tensor:
    shares = experts(x, choice)
    assert isinstance(shares, Shares)
    return PlainExperts().weighted_sum(shares)


def test_experts_that_no_token_chose_take_no_part(architecture: ModelArchitecture) -> None:
    experts = Experts(architecture, PLACEMENT)
    generator = torch.Generator().manual_seed(0)
    for parameter in experts.parameters():
        parameter.data.normal_(generator=generator)
    x = torch.randn((3, architecture.hidden_size), generator=generator)
    chosen = torch.tensor([[4, 1], [1, 4], [4, 7]], dtype=torch.int32)
    weights = torch.tensor([[0.5, 2.0], [1.0, -1.0], [0.25, 0.75]])
    expected = torch.zeros_like(x)
    for token in range(3):
        for weight, expert in zip(weights[token], chosen[token], strict=True):
            gate, up = (experts.gate_up.dense()[expert] @ x[token]).chunk(2)
            inner = torch.nn.functional.gelu(gate, approximate="tanh") * up
            expected[token] += weight * (experts.down.dense()[expert] @ inner)
    experts.gate_up.dense().data[[0, 2, 3, 5, 6]] = float("nan")
    torch.testing.assert_close(_routed(experts, x, Choice(weights, chosen)), expected, rtol=1e-4, atol=1e-3)


def test_rows_past_the_last_choose_no_expert_and_come_out_as_zeros(architecture: ModelArchitecture) -> None:
    """What a grouped product leaves in rows of no expert is undefined: here it is NaN, and it must not spread."""
    router = Router(architecture, PLACEMENT)
    norm = RMSNorm(architecture.hidden_size, PLACEMENT, eps=1e-6)
    experts = Experts(architecture, PLACEMENT)
    generator = torch.Generator().manual_seed(0)
    for parameter in (*router.parameters(), *experts.parameters(), *norm.parameters()):
        parameter.data.normal_(generator=generator)
    x = torch.randn((5, architecture.hidden_size), generator=generator)
    routed = router(x, norm)
    normed, chosen = routed.normed, routed.choice
    assert torch.equal(normed, norm(x))
    padded = router(x, norm, torch.tensor([3], dtype=torch.int32)).choice
    assert torch.equal(padded.experts[:3], chosen.experts[:3])
    assert torch.equal(padded.weights, chosen.weights)
    assert (padded.experts[3:] == NO_EXPERT).all()

    counted = []

    def product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
        counted.append(int(ends[-1]))
        result = grouped_product(rows, matrices, ends)
        result[int(ends[-1]) :] = torch.nan
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_blocks, "grouped_product", product)
        routed = _routed(experts, x, padded)
    assert counted == [3 * architecture.top_k_experts] * 2
    torch.testing.assert_close(routed[:3], _routed(experts, x, chosen)[:3], rtol=1e-4, atol=1e-3)
    assert (routed[3:] == 0).all()


@pytest.fixture
def architecture() -> ModelArchitecture:
    return ModelArchitecture(
        num_hidden_layers=2,
        full_attention_layers=(1,),
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_global_key_value_heads=1,
        head_dim=16,
        global_head_dim=32,
        sliding_window=8,
        max_position_embeddings=1024,
        vocab_size=128,
        num_experts=8,
        top_k_experts=2,
        moe_intermediate_size=32,
    )
