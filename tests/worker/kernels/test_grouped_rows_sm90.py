"""Rows sorted by expert times their experts' matrices on Hopper, against float64: who chose what, gates, shapes; and
that a row's bits depend on nothing beside it."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hopper import ON_HOPPER, check_captured_bits
from torch import Tensor
from torch.nn import functional

pytestmark = list(ON_HOPPER)
CUDA = torch.device("cuda")


def grouped(x: Tensor, matrices: Tensor, counts: list[int], *, gated: bool) -> Tensor:
    from modelserve_worker.kernels.experts.grouped_rows_sm90 import grouped_rows

    ends = torch.tensor(counts, device=CUDA).cumsum(0).to(torch.int32)
    return grouped_rows(x, matrices, ends, gated=gated)


def exact(x: Tensor, matrix: Tensor, *, gated: bool) -> Tensor:
    result = x.double() @ matrix.double().t()
    if gated:
        gate, up = result.bfloat16().double().chunk(2, dim=1)
        result = functional.gelu(gate, approximate="tanh") * up
    return result


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("counts", [
    [1, 0, 0, 0, 0, 0, 0, 0], [0, 0, 3, 0, 33, 1, 0, 0], [7, 64, 0, 65, 31, 32, 200, 9],
    [256, 257, 0, 513, 255, 0, 0, 1], [0, 0, 0, 0, 0, 0, 0, 2050], [1024, 300, 290, 280, 0, 260, 250, 1],
], ids=str)  # fmt: skip
@pytest.mark.parametrize(("width", "inputs"), [(704, 2816), (2816, 704), (352, 512), (96, 1088)])
def test_near_float64_and_the_same_bits_at_every_launch(
    width: int, inputs: int, counts: list[int], gated: bool
) -> None:
    """The rows from the last end on belong to nobody: NaN there changes nothing."""
    matrices = (torch.randn(len(counts), width * (2 if gated else 1), inputs, device=CUDA) * inputs**-0.5).bfloat16()
    x = torch.randn(sum(counts) + 37, inputs, device=CUDA).bfloat16()
    x[sum(counts) :] = torch.nan
    output = grouped(x, matrices, counts, gated=gated)
    for _ in range(20):
        assert torch.equal(grouped(x, matrices, counts, gated=gated)[: sum(counts)], output[: sum(counts)])
    ends = torch.tensor([0, *counts]).cumsum(0).tolist()
    for expert, (begin, end) in enumerate(pairwise(ends)):
        wanted = exact(x[begin:end], matrices[expert], gated=gated)
        errors = (output[begin:end].double() - wanted).norm(dim=1) / wanted.norm(dim=1)
        assert end == begin or float(errors.max()) < 8e-3, expert


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    "counts",
    [[0, 0, 3, 0, 33, 1, 0, 0], [2] * 127 + [99], [8] * 128, [0] * 9, [300, 0, 2, 511]],
    ids=lambda rows: str(rows[-3:]),
)
@pytest.mark.parametrize("dense_rows", [1, 64, 65, 200, 256])
@pytest.mark.parametrize(
    ("width", "inputs", "dense_width", "dense_inputs"),
    [(704, 2816, 2112, 2816), (2816, 704, 2816, 2112), (96, 512, 64, 576)],
)
def test_a_dense_product_beside_experts_is_near_float64_and_changes_none_of_their_bits(
    width: int, inputs: int, dense_width: int, dense_inputs: int, dense_rows: int, counts: list[int], gated: bool
) -> None:
    from modelserve_worker.kernels.experts.grouped_rows_sm90 import grouped_rows_beside

    halves, used = 2 if gated else 1, sum(counts)
    matrices = (torch.randn(len(counts), width * halves, inputs, device=CUDA) * inputs**-0.5).bfloat16()
    dense = (torch.randn(dense_width * halves, dense_inputs, device=CUDA) * dense_inputs**-0.5).bfloat16()
    x, dense_x = (
        torch.randn(*shape, device=CUDA).bfloat16() for shape in ((used + 37, inputs), (dense_rows, dense_inputs))
    )
    ends = torch.tensor(counts, device=CUDA).cumsum(0).to(torch.int32)
    alone = grouped(x, matrices, counts, gated=gated)
    wanted = exact(dense_x, dense, gated=gated)
    first = None
    for _ in range(10):
        output, beside = grouped_rows_beside(x, matrices, ends, dense_x, dense, gated=gated)
        assert torch.equal(output[:used], alone[:used])
        errors = (beside.double() - wanted).norm(dim=1) / wanted.norm(dim=1)
        assert float(errors.max()) < 8e-3
        first = beside if first is None else first
        assert torch.equal(beside, first)


@pytest.mark.parametrize("gated", [False, True])
def test_a_row_has_the_same_bits_alone_and_beside_others(gated: bool) -> None:
    matrices = torch.randn(4, 704, 1024, device=CUDA).bfloat16()
    counts = [300, 17, 0, 613]
    x = torch.randn(sum(counts), 1024, device=CUDA).bfloat16()
    together = grouped(x, matrices, counts, gated=gated)
    for row, expert in ((0, 0), (255, 0), (299, 0), (300, 1), (316, 1), (317, 3), (700, 3), (929, 3)):
        alone = grouped(x[row : row + 1], matrices, [int(each == expert) for each in range(4)], gated=gated)
        assert torch.equal(alone[0], together[row])


def test_a_captured_chain_of_both_branches_has_the_bits_of_kernels_one_after_the_other() -> None:
    """As layers of many rows have it: the residual's sum, the choice, rows dealt, both products, the sum of both."""
    from modelserve_worker.kernels.experts.experts import AddedNorms, BranchMatrices, BranchNorms, RouterWeights
    from modelserve_worker.kernels.experts.experts_triton import TritonExperts

    width, inner, experts, layers = 2816, 704, 64, 3
    backend = TritonExperts(CUDA)
    ones = torch.ones(width, device=CUDA).bfloat16()
    router = RouterWeights(
        torch.randn(experts, width, device=CUDA).bfloat16() * 2, ones, torch.ones(experts, device=CUDA).bfloat16(), 8
    )

    def matrix(*shape: int) -> Tensor:
        return (torch.randn(shape, device=CUDA) * shape[-1] ** -0.5).bfloat16()

    matrices = [
        BranchMatrices(
            matrix(experts, 2 * inner, width), matrix(experts, width, inner), matrix(6 * inner, width),
            matrix(width, 3 * inner),
        )
        for _ in range(layers)
    ]  # fmt: skip

    def run(start: Tensor) -> list[Tensor]:
        x, after, kept = start.clone(), start, []
        for each in matrices:
            norms = AddedNorms(ones, ones, ones)
            x, opened, routed = backend.add_and_route(x, after, norms, router, eps=1e-6, num_rows=None)
            dense, shares = backend.branch_products(opened, routed, each)
            x, following = backend.add_branches(
                x, dense, shares, BranchNorms(ones, ones, ones), scalar=None, next_weight=ones, eps=1e-6
            )
            assert following is not None
            after = following
            kept.append(after)
        return kept

    for rows in (65, 128, 256):
        start = torch.randn(rows, width, device=CUDA).bfloat16()
        check_captured_bits(lambda start=start: run(start), replays=100)
