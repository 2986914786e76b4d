"""The decoder says what transformers says, for every variant, and the comparison notices what it must notice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from chosen_operations import ChosenOperations, product
from dense_attention import DenseAttention, DerivedKeyAttention, dense_logits
from full_logits import compute_logits
from model_checkpoints import VARIANTS, WINDOW, load_checkpoint, random_tokens, read_architecture, reference_logits
from rank_logits import last_logits_of_kept_rows, logits_of_kept_rows, tensor_parallel_logits
from torch import Tensor

from modelserve.model.weight_format import StoredType
from modelserve_worker.kernels.elementwise.elementwise import PlainElementwise
from modelserve_worker.layers import attention as attention_layer

TOLERANCE = 1e-4
VISIBLE = 100 * TOLERANCE  # what a mutation must exceed
LENGTHS = (1, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW + 5)
K_EQ_V = [name for name, settings in VARIANTS.items() if settings.get("attention_k_eq_v")]
DENSE = ("12B", "31B")  # whose ranks may keep their own rows of the residual alone
SHARED = [name for name, settings in VARIANTS.items() if settings.get("num_kv_shared_layers")]

Checkpoint = Callable[[str], Path]


def difference(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).abs().max())


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_the_reference(variant: str, length: int, checkpoint: Checkpoint) -> None:
    directory, ids = checkpoint(variant), random_tokens(length, seed=length)
    assert difference(dense_logits(load_checkpoint(directory), ids), reference_logits(directory, ids)) <= TOLERANCE


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on CPU tensors in Triton's interpreter only")
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_through_the_kernels_equal_the_reference(variant: str, checkpoint: Checkpoint) -> None:
    from modelserve_worker.kernels.elementwise.elementwise_triton import TritonElementwise

    directory, ids = checkpoint(variant), random_tokens(WINDOW + 1, seed=7)
    model = load_checkpoint(directory, operations=ChosenOperations(elementwise=TritonElementwise()))
    assert isinstance(model.elementwise, TritonElementwise)
    with np.errstate(over="ignore"):  # exp overflows to infinity, as on a GPU
        logits = dense_logits(model, ids)
    assert difference(logits, reference_logits(directory, ids)) <= TOLERANCE


class InThirds:
    """A kernel that multiplies thirds of the inputs apart, and says of how many products it did so."""

    def __init__(self) -> None:
        self.products: list[bool] = []

    def __call__(self, x: Tensor, weight: Tensor, *, gated: bool = False, split: bool = False) -> Tensor:
        self.products.append(split)
        if split:
            thirds = zip(x.tensor_split(3, 1), weight.tensor_split(3, 1), strict=True)
            return torch.stack([some @ part.t() for some, part in thirds])
        product = x @ weight.t()
        return PlainElementwise().gated_gelu(product) if gated else product


@pytest.mark.parametrize("variant", VARIANTS)
def test_products_in_parts_say_what_whole_ones_say(variant: str, checkpoint: Checkpoint) -> None:
    """o of every layer is in parts, and down where no experts are added to it; the norm behind them adds the parts."""
    directory, ids, kernel = checkpoint(variant), random_tokens(WINDOW + 1, seed=7), InThirds()
    chosen = (product(kernel, fuses=True),)
    operations = ChosenOperations(products={StoredType.FLOAT32: chosen, StoredType.BFLOAT16: chosen})
    model = load_checkpoint(directory, operations=operations)
    assert difference(dense_logits(model, ids), reference_logits(directory, ids)) <= TOLERANCE
    layers, experts = model.architecture.num_hidden_layers, model.architecture.num_experts
    assert sum(kernel.products) == (layers if experts else 2 * layers)


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_that_pad_a_step_change_no_other_row(variant: str, checkpoint: Checkpoint) -> None:
    """Padding holds ids of no token, as a captured step's does; 32-bit ids and positions say what 64-bit ones say."""
    model, ids = load_checkpoint(checkpoint(variant)), random_tokens(WINDOW + 1, seed=7)
    rows = torch.tensor([*ids, -1, -1, 2**31 - 1], dtype=torch.int32)
    positions = torch.arange(len(rows), dtype=torch.int32)
    num_rows = torch.tensor([len(ids)], dtype=torch.int32)
    hidden = model(rows, positions, DenseAttention(model.architecture), num_rows=num_rows)
    logits = compute_logits(model, hidden)
    assert difference(logits[: len(ids)], dense_logits(model, ids)) <= TOLERANCE
    assert logits.isfinite().all()


def test_two_ranks_say_what_one_says(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """TP 2: 12B's single global KV head is replicated, E2B's only head too; every other width is split."""
    cases = [
        (checkpoint(variant), random_tokens(length, seed=length)) for variant in VARIANTS for length in (1, 3 * WINDOW)
    ]
    by_rank = tensor_parallel_logits(cases, size=2, scratch=tmp_path)
    for (directory, ids), first, second in zip(cases, *by_rank, strict=True):
        assert torch.equal(first, second), "ranks disagree"
        assert difference(first, reference_logits(directory, ids)) <= TOLERANCE


def test_ranks_that_keep_their_own_rows_of_the_residual_say_the_same(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """In dense models alone: experts are chosen by the residual and per-layer inputs made from it, so those see NaN."""
    cases = [(checkpoint(variant), random_tokens(length, seed=length)) for variant in VARIANTS for length in (1, 41)]
    by_rank = logits_of_kept_rows(cases, size=2, scratch=tmp_path)
    served = set()
    for (directory, ids), first, second in zip(cases, *by_rank, strict=True):
        architecture = read_architecture(directory)
        if architecture.num_experts or architecture.hidden_size_per_layer_input:
            assert bool(first.isnan().any() | second.isnan().any())
            continue
        served.add(directory)
        assert torch.equal(first, second), "ranks disagree"
        assert difference(first, reference_logits(directory, ids)) <= TOLERANCE
    assert served


def test_a_row_that_goes_on_alone_is_whole_on_ranks_that_keep_their_own_rows(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    cases = [(checkpoint(variant), random_tokens(length, seed=length)) for variant in DENSE for length in (1, 40)]
    by_rank = last_logits_of_kept_rows(cases, size=2, scratch=tmp_path)
    for (directory, ids), first, second in zip(cases, *by_rank, strict=True):
        assert torch.equal(first, second), "ranks disagree"
        assert difference(first, reference_logits(directory, ids)[-1:]) <= TOLERANCE


@pytest.mark.parametrize("variant", VARIANTS)
def test_bfloat16_is_as_near_to_float32_as_the_reference_in_bfloat16(variant: str, checkpoint: Checkpoint) -> None:
    directory, ids = checkpoint(variant), random_tokens(3 * WINDOW + 5, seed=5)
    exact = reference_logits(directory, ids)
    ours = (dense_logits(load_checkpoint(directory, dtype=torch.bfloat16), ids) - exact).abs().mean()
    theirs = (reference_logits(directory, ids, dtype=torch.bfloat16) - exact).abs().mean()
    assert ours <= 1.25 * theirs


@pytest.mark.parametrize("variant", K_EQ_V)
def test_keys_derived_from_values_are_the_keys(variant: str, checkpoint: Checkpoint) -> None:
    directory, ids = checkpoint(variant), random_tokens(3 * WINDOW + 5, seed=3)
    model = load_checkpoint(directory)
    derived = dense_logits(model, ids, DerivedKeyAttention(model))
    assert difference(derived, reference_logits(directory, ids)) <= TOLERANCE


class TestMutations:
    """Each fault below must move the logits far past the tolerance, or the comparison above proves nothing."""

    @pytest.mark.parametrize("variant", K_EQ_V)
    def test_derived_key_without_k_norm(self, variant: str, checkpoint: Checkpoint) -> None:
        class WithoutNorm(DerivedKeyAttention):
            def k_norm_weight(self, layer: int) -> Tensor:
                return torch.ones_like(super().k_norm_weight(layer))

        directory, ids = checkpoint(variant), random_tokens(3 * WINDOW + 5, seed=3)
        model = load_checkpoint(directory)
        assert difference(dense_logits(model, ids, WithoutNorm(model)), reference_logits(directory, ids)) > VISIBLE

    @pytest.mark.parametrize("variant", VARIANTS)
    @pytest.mark.parametrize("window", [WINDOW - 1, WINDOW + 1])
    def test_window_off_by_one(self, variant: str, window: int, checkpoint: Checkpoint) -> None:
        """The shortest sequence that can tell: one token more than the narrower of the two windows."""
        directory, ids = checkpoint(variant), random_tokens(min(window, WINDOW) + 1, seed=3)
        attention = DenseAttention(read_architecture(directory), window=window)
        logits = dense_logits(load_checkpoint(directory), ids, attention)
        assert difference(logits, reference_logits(directory, ids)) > VISIBLE

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_rotary_pairs_inside_the_rotated_dimensions(
        self, variant: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Pairs (i, i + rotated/2) of the first dimensions, as other partial-rotary models have them."""
        directory, ids = checkpoint(variant), random_tokens(3 * WINDOW + 5, seed=3)
        architecture = read_architecture(directory)
        pairs = architecture.global_rotary_pairs
        right = attention_layer.rotate

        def wrong(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            if x.shape[-1] != architecture.global_head_dim:
                return right(x, cos, sin)
            turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
            return torch.cat((right(turned, cos[:, :pairs], sin[:, :pairs]), rest), dim=-1)

        monkeypatch.setattr(attention_layer, "rotate", wrong)
        assert difference(dense_logits(load_checkpoint(directory), ids), reference_logits(directory, ids)) > VISIBLE

    @pytest.mark.parametrize("variant", SHARED)
    def test_wrong_kv_producer(self, variant: str, checkpoint: Checkpoint) -> None:
        class FirstOfKind(DenseAttention):
            def producer(self, layer: int) -> int:
                right = super().producer(layer)
                return right if right == layer else self.architecture.owning_layers(self.architecture.kind(layer))[0]

        directory, ids = checkpoint(variant), random_tokens(3 * WINDOW + 5, seed=3)
        logits = dense_logits(load_checkpoint(directory), ids, FirstOfKind(read_architecture(directory)))
        assert difference(logits, reference_logits(directory, ids)) > VISIBLE
