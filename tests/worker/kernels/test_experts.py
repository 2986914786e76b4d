"""Kernels of a mixture of experts say what their references say, and the references what float64 says."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from modelserve.sizing.backends.resolve import ROUTED_ROWS
from modelserve_worker.kernels.elementwise.elementwise import PlainElementwise
from modelserve_worker.kernels.elementwise.elementwise_triton import TritonElementwise
from modelserve_worker.kernels.experts.dealing_triton import deal_together
from modelserve_worker.kernels.experts.experts import (
    NO_EXPERT,
    AddedNorms,
    BranchNorms,
    Choice,
    PlainExperts,
    Routed,
    RouterWeights,
    Shares,
)
from modelserve_worker.kernels.experts.experts_triton import ExpertTile, TritonExperts, products_with

pytestmark = pytest.mark.drawn

EPS = 1e-6
BF16 = torch.bfloat16


class Numbers:
    """Fresh random inputs of one test; a failure names the seed."""

    def __init__(self, device: torch.device) -> None:
        self.seed = secrets.randbits(32)
        self.device = device
        self._generator = torch.Generator().manual_seed(self.seed)

    def normal(self, *shape: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        return (mean + scale * torch.randn(shape, generator=self._generator)).to(self.device, BF16)

    def choice(self, rows: int, experts: int, top_k: int, *, padding: int = 0) -> Choice:
        chosen = torch.rand((rows, experts), generator=self._generator).argsort(dim=1)[:, :top_k].to(torch.int32)
        chosen[rows - padding :] = NO_EXPERT
        weights = torch.rand((rows, top_k), generator=self._generator)
        return Choice(weights.to(self.device), chosen.to(self.device))


@pytest.fixture
def numbers(device: torch.device) -> Numbers:
    return Numbers(device)


@dataclass(frozen=True)
class Exact:
    """A router in float64: logits, and the weights that any choice has."""

    logits: Tensor
    factors: Tensor

    def weights(self, experts: Tensor) -> Tensor:
        return self.logits.gather(1, experts.long()).softmax(dim=1) * self.factors[experts.long()]


def router(numbers: Numbers, experts: int, width: int, top_k: int) -> RouterWeights:
    return RouterWeights(
        numbers.normal(experts, width, scale=2.0), numbers.normal(width, scale=0.2, mean=1.0),
        numbers.normal(experts, scale=0.1, mean=1.0), top_k,
    )  # fmt: skip


def exact_norm(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def exact(x: Tensor, weights: RouterWeights) -> Exact:
    logits = exact_norm(x, weights.scale) * x.shape[1] ** -0.5 @ weights.weight.double().t()
    return Exact(logits, weights.per_expert_scale.double())


def near(actual: Tensor, expected: Tensor, tolerance: float, numbers: Numbers) -> None:
    """The error's norm, of that of what is expected."""
    assert actual.shape == expected.shape
    error = float((actual.double() - expected.double()).norm() / expected.double().norm())
    assert error < tolerance, f"seed {numbers.seed}: {error:.1e} of the norm apart"


@pytest.mark.parametrize(
    ("rows", "experts", "width", "top_k"),
    [(1, 128, 2816, 8), (3, 128, 704, 8), (5, 20, 96, 3), (ROUTED_ROWS + 7, 128, 192, 8), (130, 20, 112, 3)],
)
def test_the_largest_logits_are_chosen(rows: int, experts: int, width: int, top_k: int, numbers: Numbers) -> None:
    x, weights = numbers.normal(rows, width, scale=3.0), router(numbers, experts, width, top_k)
    norm_weight = numbers.normal(width, scale=0.3, mean=1.0)
    truth = exact(x, weights)
    for backend in (PlainExperts(), TritonExperts(numbers.device)):
        routed = backend.route(x, weights, norm_weight, eps=EPS, num_rows=None)
        normed, choice = routed.normed, routed.choice
        assert choice.weights.dtype == torch.float32
        assert choice.experts.dtype == torch.int32
        near(normed, exact_norm(x, norm_weight), 3e-3, numbers)
        picked = truth.logits.gather(1, choice.experts.long())
        assert all(len(set(row)) == top_k for row in choice.experts.tolist())
        left = truth.logits.scatter(1, choice.experts.long(), -torch.inf)
        assert (picked[:, :-1] >= picked[:, 1:] - 2e-5).all(), f"seed {numbers.seed}: not the largest first"
        assert (picked.amin(1) >= left.amax(1) - 2e-5).all(), f"seed {numbers.seed}: a larger logit was left"
        near(choice.weights, truth.weights(choice.experts), 1e-5, numbers)


@pytest.mark.parametrize("parts", [0, 2])
@pytest.mark.parametrize(("rows", "experts", "width"), [(1, 128, 2816), (6, 32, 192), (ROUTED_ROWS + 2, 32, 192)])
def test_what_is_added_first_is_the_residual_norm_and_the_route_of_its_sum(
    rows: int, experts: int, width: int, parts: int, numbers: Numbers
) -> None:
    """Near float64, of a delta as it is or in parts; where no kernel adds in an order of its own, on a CPU, it has the
    bits of the two operations one after the other."""
    weights = router(numbers, experts, width, 8)
    residual, delta = numbers.normal(rows, width, scale=3.0), numbers.normal(rows, width)
    if parts:
        delta = torch.stack([numbers.normal(rows, width).float() for _ in range(parts)])
    norms = AddedNorms(*(numbers.normal(width, scale=0.3, mean=1.0) for _ in range(3)))
    truth = residual.double() + exact_norm(delta.double().sum(0).bfloat16() if parts else delta, norms.delta)
    for backend, elementwise in (
        (PlainExperts(), PlainElementwise()),
        (TritonExperts(numbers.device), TritonElementwise()),
    ):
        summed, normed, routed = backend.add_and_route(residual.clone(), delta, norms, weights, eps=EPS, num_rows=None)
        near(summed, truth, 4e-3, numbers)
        near(normed, exact_norm(summed, norms.dense), 3e-3, numbers)
        near(routed.normed, exact_norm(summed, norms.experts), 3e-3, numbers)
        choice, logits = routed.choice, exact(summed, weights)
        near(choice.weights, logits.weights(choice.experts), 1e-5, numbers)
        picked = logits.logits.gather(1, choice.experts.long())
        left = logits.logits.scatter(1, choice.experts.long(), -torch.inf)
        assert (picked.amin(1) >= left.amax(1) - 2e-5).all(), f"seed {numbers.seed}: a larger logit was left"
        if numbers.device.type != "cpu":
            continue
        expected = elementwise.residual_norm(
            residual.clone(), delta, norms.delta, scalar=None, next_weight=norms.dense, eps=EPS
        )
        assert torch.equal(summed, expected[0])
        assert expected[1] is not None
        assert torch.equal(normed, expected[1])
        alone = backend.route(summed.clone(), weights, norms.experts, eps=EPS, num_rows=None)
        for ours, theirs in zip(_parts(routed), _parts(alone), strict=True):
            assert torch.equal(ours, theirs)


def _parts(routed: Routed) -> tuple[Tensor, Tensor, Tensor]:
    return routed.normed, routed.choice.weights, routed.choice.experts


@pytest.mark.parametrize("rows", [4, ROUTED_ROWS + 3])
def test_of_equal_logits_the_lower_index_is_chosen(rows: int, numbers: Numbers) -> None:
    x, weights = numbers.normal(rows, 64), router(numbers, 32, 64, 8)
    weights.weight.zero_()  # logits of one product each: no order of summing tells equal ones apart
    weights.weight[torch.arange(32), torch.arange(32)] = numbers.normal(32)
    weights.weight[4:20] = weights.weight[4]
    weights.weight[22:31] = 0
    weights.weight[25] = -0.0  # equal to 0.0, too
    choices = [
        backend.route(x, weights, weights.scale, eps=EPS, num_rows=None).choice
        for backend in (PlainExperts(), TritonExperts(numbers.device))
    ]
    assert torch.equal(choices[0].experts, choices[1].experts)
    for row in choices[1].experts.tolist():
        tied = [expert for expert in row if 4 <= expert < 20]
        assert tied == list(range(4, 4 + len(tied)))
        zeros = [expert for expert in row if 22 <= expert < 31]
        assert zeros == list(range(22, 22 + len(zeros)))


@pytest.mark.parametrize("rows", [6, ROUTED_ROWS + 6])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_broken_and_padded_rows_keep_to_themselves(rows: int, broken: float, numbers: Numbers) -> None:
    """A NaN row is seen as one, chooses experts that exist, and its neighbours choose what they would without it."""
    x, weights = numbers.normal(rows, 64), router(numbers, 32, 64, 8)
    sound = TritonExperts(numbers.device).route(x, weights, weights.scale, eps=EPS, num_rows=None).choice
    x[2, 5] = broken
    num_rows = torch.tensor([rows - 2], dtype=torch.int32, device=numbers.device)
    for backend in (PlainExperts(), TritonExperts(numbers.device)):
        with np.errstate(invalid="ignore"):
            choice = backend.route(x, weights, weights.scale, eps=EPS, num_rows=num_rows).choice
        assert choice.weights[2].isnan().all()
        assert all(0 <= expert < 32 for expert in choice.experts[2].tolist())
        assert len(set(choice.experts[2].tolist())) == 8
        assert (choice.experts[-2:] == NO_EXPERT).all()
        unhurt = [row for row in range(rows - 2) if row != 2]
        assert torch.equal(choice.experts[unhurt], sound.experts[unhurt])
        torch.testing.assert_close(choice.weights[unhurt], sound.weights[unhurt], rtol=1e-5, atol=1e-6)


def exact_results(x: Tensor, choice: Choice, gate_up: Tensor, down: Tensor) -> Tensor:
    """float64 [T, k, H], without roundings in between."""
    experts = choice.experts.clamp(max=len(gate_up) - 1).long()
    inner = torch.einsum("th,tkih->tki", x.double(), gate_up.double()[experts])
    gate, up = inner.chunk(2, dim=-1)
    gated = torch.nn.functional.gelu(gate, approximate="tanh") * up
    return torch.einsum("tki,tkhi->tkh", gated, down.double()[experts])


@pytest.mark.parametrize(
    ("rows", "experts", "top_k", "width", "inner"),
    [(1, 16, 8, 320, 72), (4, 64, 8, 160, 48), (9, 8, 3, 96, 80), (40, 6, 3, 64, 32), (64, 4, 4, 64, 24)],
)
def test_chosen_products(rows: int, experts: int, top_k: int, width: int, inner: int, numbers: Numbers) -> None:
    """From one row to more than a block for an expert; widths in part of a block; one padded row, if there is room."""
    padding = 1 if rows > 1 else 0
    x, choice = numbers.normal(rows, width), numbers.choice(rows, experts, top_k, padding=padding)
    gate_up = numbers.normal(experts, 2 * inner, width, scale=width**-0.5)
    down = numbers.normal(experts, width, inner, scale=inner**-0.5)
    truth = exact_results(x, choice, gate_up, down)[: rows - padding]
    for backend in (PlainExperts(), TritonExperts(numbers.device)):
        results = backend.chosen_products(x, choice, gate_up, down)
        assert results.shape == (rows * top_k, width)
        near(results.view(rows, top_k, width)[: rows - padding], truth, 8e-3, numbers)


def test_matrices_that_nobody_chose_are_not_read_and_a_broken_row_breaks_no_other(numbers: Numbers) -> None:
    x, choice = numbers.normal(8, 64), numbers.choice(8, 6, 2, padding=2)
    choice.experts[:6, 0], choice.experts[:6, 1] = 4, 1
    gate_up, down = numbers.normal(6, 64, 64), numbers.normal(6, 64, 32)
    unbroken = TritonExperts(numbers.device).chosen_products(x, choice, gate_up, down).view(8, 2, 64)
    gate_up[[0, 2, 3, 5]] = torch.nan
    x[3] = torch.nan
    results = TritonExperts(numbers.device).chosen_products(x, choice, gate_up, down).view(8, 2, 64)
    assert results[3].isnan().all()
    for row in (0, 1, 2, 4, 5):
        assert torch.equal(results[row], unbroken[row])


@pytest.mark.parametrize("rows", [1, 5, 33])
def test_tiles_agree_however_their_blocks_lie(rows: int, numbers: Numbers) -> None:
    x, choice = numbers.normal(rows, 96), numbers.choice(rows, 5, 3)
    matrices = numbers.normal(5, 80, 96, scale=0.1)
    inner = torch.einsum("th,tkih->tki", x.double(), matrices.double()[choice.experts.long()])
    gate, up = inner.chunk(2, dim=-1)
    truth = (torch.nn.functional.gelu(gate, approximate="tanh") * up).flatten(0, 1)
    for tile in (ExpertTile(16, 64, 8, 1, 2), ExpertTile(32, 32, 16, 2, 3)):
        near(products_with(x, choice, matrices, tile, gated=True), truth, 8e-3, numbers)


@pytest.mark.parametrize(("rows", "experts", "top_k"), [(1, 128, 8), (37, 8, 3), (700, 20, 8)])
def test_rows_are_dealt_to_experts_in_their_order(rows: int, experts: int, top_k: int, numbers: Numbers) -> None:
    padding = rows // 4
    x, choice = numbers.normal(rows, 24), numbers.choice(rows, experts, top_k, padding=padding)
    plain, ours = (backend.deal(x, choice, experts) for backend in (PlainExperts(), TritonExperts(numbers.device)))
    assert torch.equal(ours.ends, plain.ends)
    known, used = rows - padding, int(plain.ends[-1])
    assert used == known * top_k
    assert torch.equal(ours.places[:known], plain.places[:known])
    assert torch.equal(ours.rows[:used], plain.rows[:used])
    assert torch.equal(ours.rows[ours.places[:known].long()], x[:known].unsqueeze(1).expand(-1, top_k, -1))


@pytest.mark.parametrize(("rows", "experts", "top_k"), [(1, 128, 8), (37, 8, 3), (130, 20, 8), (256, 128, 8)])
def test_few_rows_are_dealt_in_one_launch_as_others_are(rows: int, experts: int, top_k: int, numbers: Numbers) -> None:
    padding = rows // 4
    x, choice = numbers.normal(rows, 24), numbers.choice(rows, experts, top_k, padding=padding)
    together, reference = deal_together(x, choice, experts), PlainExperts().deal(x, choice, experts)
    known, used = rows - padding, (rows - padding) * top_k
    assert torch.equal(together.ends, reference.ends)
    assert torch.equal(together.places[:known], reference.places[:known])
    assert torch.equal(together.rows[:used], reference.rows[:used])


def sums(numbers: Numbers, rows: int, width: int, *, sorted_rows: bool) -> tuple[Shares, Tensor]:
    """Shares of 4 experts a row, of which the last row's are none's and NaN; their sums in float64."""
    choice = numbers.choice(rows, 9, 4, padding=1)
    results = numbers.normal(rows, 4, width)
    results[-1] = torch.nan
    summed = (results.double() * choice.weights.double().unsqueeze(-1)).sum(1)
    summed[-1] = 0.0
    if not sorted_rows:
        return Shares(results.flatten(0, 1), choice), summed
    order = torch.randperm(rows * 4, device=numbers.device)
    places = torch.empty_like(order, dtype=torch.int32)
    places[order] = torch.arange(rows * 4, dtype=torch.int32, device=numbers.device)
    return Shares(results.flatten(0, 1)[order], choice, places.view(rows, 4)), summed


@pytest.mark.parametrize("sorted_rows", [False, True], ids=["slots", "places"])
@pytest.mark.parametrize(("rows", "width"), [(2, 2816), (9, 112)])
def test_weighted_sum(rows: int, width: int, sorted_rows: bool, numbers: Numbers) -> None:
    shares, summed = sums(numbers, rows, width, sorted_rows=sorted_rows)
    for backend in (PlainExperts(), TritonExperts(numbers.device)):
        result = backend.weighted_sum(shares)
        assert (result[-1] == 0).all()
        near(result, summed, 3e-3, numbers)


@pytest.mark.parametrize("ends", ["scalar and norm", "norm", "neither"])
@pytest.mark.parametrize("routed", ["slots", "places", "rows"])
def test_add_branches(routed: str, ends: str, numbers: Numbers) -> None:
    shares, summed = sums(numbers, 5, 112, sorted_rows=routed == "places")
    given = summed.to(BF16) if routed == "rows" else shares
    residual, dense = numbers.normal(5, 112), numbers.normal(5, 112, scale=20.0)
    norms = BranchNorms(*(numbers.normal(112, scale=0.3, mean=1.0) for _ in range(3)))
    scalar = numbers.normal(1, mean=1.0) if "scalar" in ends else None
    next_weight = numbers.normal(112, scale=0.3, mean=1.0) if "norm" in ends else None
    delta = exact_norm(dense, norms.dense) + exact_norm(summed, norms.routed)
    total = residual.double() + exact_norm(delta, norms.added)
    total = total if scalar is None else total * scalar.double()
    for backend in (PlainExperts(), TritonExperts(numbers.device)):
        added, normed = backend.add_branches(
            residual.clone(), dense, given, norms, scalar=scalar, next_weight=next_weight, eps=EPS
        )
        near(added, total, 5e-3, numbers)
        assert (normed is None) == (next_weight is None)
        if normed is not None and next_weight is not None:
            near(normed, exact_norm(total, next_weight), 6e-3, numbers)


def test_a_broken_row_of_a_branch_stays_in_its_row(numbers: Numbers) -> None:
    shares, _ = sums(numbers, 4, 112, sorted_rows=False)
    shares.results[5] = torch.nan  # of row 1
    residual, dense, weight = numbers.normal(4, 112), numbers.normal(4, 112), numbers.normal(112)
    added, normed = TritonExperts(numbers.device).add_branches(
        residual, dense, shares, BranchNorms(weight, weight, weight), scalar=None, next_weight=weight, eps=EPS
    )
    assert normed is not None
    for rows in (added, normed):
        assert rows[1].isnan().all()
        assert rows[[0, 2, 3]].isfinite().all()


def test_a_layer_of_few_rows_says_what_the_sorted_way_says(numbers: Numbers) -> None:
    """Route, products and sum by kernels, against the plain way through grouped products."""
    x, weights = numbers.normal(6, 128, scale=2.0), router(numbers, 16, 128, 4)
    gate_up, down = numbers.normal(16, 96, 128, scale=0.1), numbers.normal(16, 128, 48, scale=0.15)
    plain, ours = PlainExperts(), TritonExperts(numbers.device)
    routed = ours.route(x, weights, weights.scale, eps=EPS, num_rows=None)
    normed, choice = routed.normed, routed.choice
    few = ours.weighted_sum(Shares(ours.chosen_products(normed, choice, gate_up, down), choice))
    dealt = plain.deal(normed, choice, 16)
    grouped = torch.nn.functional.grouped_mm
    inner = PlainElementwise().gated_gelu(grouped(dealt.rows, gate_up.transpose(1, 2), offs=dealt.ends))
    results = grouped(inner, down.transpose(1, 2), offs=dealt.ends)
    near(few, plain.weighted_sum(Shares(results, choice, dealt.places)), 8e-3, numbers)
