"""Products of few rows with the experts they chose, against float64, on a Hopper GPU and emulated on a CPU: who chose
what, shapes, padding; the same bits at every launch, and those of a row alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import emulated_chosen_rows
import emulated_kernel
import pytest
import torch
from hopper import check_captured_bits, on_hopper
from plain_products import nvfp4_elements
from torch import Tensor
from torch.nn import functional

from modelserve.sizing.backends.products import CHOSEN_ROWS, CHOSEN_SLOTS
from modelserve_worker.kernels.experts.experts import NO_EXPERT, Choice
from modelserve_worker.kernels.products.nvfp4_linear import Nvfp4Tiles, repack_nvfp4

CUDA = torch.device("cuda")


def chosen_products(x: Tensor, experts: Tensor, gate_up: Any, down: Any) -> Tensor:
    from modelserve_worker.kernels.experts.chosen_rows_sm90 import chosen_products

    return chosen_products(x, Choice(torch.ones(experts.shape, device=experts.device), experts), gate_up, down)


def choices(rows: int, experts: int, top_k: int, device: torch.device = CUDA) -> Tensor:
    chosen = torch.rand((rows, experts), device=device).argsort(dim=1)[:, :top_k]
    return chosen.to(torch.int32).contiguous()


def matrices(experts: int, width: int, inner: int, device: torch.device = CUDA) -> tuple[Tensor, Tensor]:
    gate_up = torch.randn((experts, 2 * inner, width), device=device) * width**-0.5
    return gate_up.bfloat16(), (torch.randn((experts, width, inner), device=device) * inner**-0.5).bfloat16()


def exact(x: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """float64 [T, k, H], of rows whose experts all exist."""
    inner = torch.einsum("th,tkih->tki", x.double(), gate_up[experts.long()].double()).bfloat16().double()
    gate, up = inner.chunk(2, dim=-1)
    gated = functional.gelu(gate, approximate="tanh") * up
    return torch.einsum("tki,tkhi->tkh", gated, down[experts.long()].double())


SHAPES = [(128, 8, 2816, 704), (16, 8, 512, 192), (5, 3, 320, 64), (256, 4, 1088, 704), (8, 8, 128, 64)]


@pytest.mark.skipif(emulated_kernel.compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("blocks", [3, 24])
def test_emulated_near_float64(blocks: int, tmp_path: Path) -> None:
    """One row to eight, a row that pads, tiles in part of a matrix, more than one of a thread block."""
    from modelserve_worker.kernels.products.hopper.linear_rows_sm90 import RowsKernel

    cpu, (experts, top_k, width, inner) = torch.device("cpu"), (9, 3, 192, 80)
    gate_up, down = matrices(experts, width, inner, cpu)
    down = torch.nn.functional.pad(down, (0, 128 - inner))  # whole blocks of inputs
    kernels = (RowsKernel(64, 8, True, experts=True, settles=True), RowsKernel(96, 8, False, experts=True))
    libraries = [emulated_chosen_rows.library_of(kernel, tmp_path) for kernel in kernels]
    for rows in (1, 2, 8):
        x, chosen = torch.randn(rows, width).bfloat16(), choices(rows, experts, top_k, cpu)
        if rows > 1:
            chosen[-1], x[-1] = NO_EXPERT, torch.nan
        known = max(1, rows - 1)
        opened = emulated_chosen_rows.products(libraries[0], kernels[0], x, chosen, gate_up, blocks=blocks)
        opened = torch.nn.functional.pad(opened, (0, 128 - inner))
        results = emulated_chosen_rows.products(libraries[1], kernels[1], opened, chosen, down, blocks=blocks)
        truth = exact(x[:known], chosen[:known], gate_up, down[..., :inner]).flatten(0, 1)
        errors = (results[: known * top_k].double() - truth).norm(dim=1) / truth.norm(dim=1)
        assert float(errors.max()) < 1e-2, (rows, errors)
        assert results[known * top_k :].isnan().all(), "nobody chose, nothing is stored"


@on_hopper
@pytest.mark.parametrize(("experts", "top_k", "width", "inner"), SHAPES)
def test_near_float64_and_the_same_bits_at_every_launch_and_alone(
    experts: int, top_k: int, width: int, inner: int
) -> None:
    gate_up, down = matrices(experts, width, inner)
    for rows in (1, 2, 3, 5, 7, CHOSEN_ROWS):
        if rows * top_k > CHOSEN_SLOTS:
            continue
        x, chosen = torch.randn(rows, width, device=CUDA).bfloat16(), choices(rows, experts, top_k)
        results = chosen_products(x, chosen, gate_up, down)
        truth = exact(x, chosen, gate_up, down).flatten(0, 1)
        errors = (results.double() - truth).norm(dim=1) / truth.norm(dim=1)
        assert float(errors.max()) < 1e-2, (rows, int(errors.argmax()))
        assert all(torch.equal(chosen_products(x, chosen, gate_up, down), results) for _ in range(20))
        for row in range(rows):
            alone = chosen_products(x[row : row + 1], chosen[row : row + 1].contiguous(), gate_up, down)
            assert torch.equal(alone, results[row * top_k : (row + 1) * top_k])


@on_hopper
@pytest.mark.parametrize(("experts", "top_k", "width", "inner"), [(128, 8, 2816, 704), (16, 8, 512, 192)])
def test_nvfp4_near_float64_and_alone(experts: int, top_k: int, width: int, inner: int) -> None:
    def made(outputs: int, inputs: int) -> Nvfp4Tiles:
        packed = torch.randint(256, (experts, outputs, inputs // 2), device=CUDA).to(torch.uint8)
        scale = torch.randint(0x30, 0x40, (experts, outputs, inputs // 16), device=CUDA).to(torch.uint8)
        row_scales = (torch.rand(experts, outputs, device=CUDA) + 0.5) * inputs**-0.5 / 2
        return repack_nvfp4(packed, scale.view(torch.float8_e4m3fn), row_scales)

    gate_up, down = made(2 * inner, width), made(width, inner)
    elements = [nvfp4_elements(each, torch.float64) for each in (gate_up, down)]
    for rows in (1, 2, 5, CHOSEN_ROWS):
        x, chosen = torch.randn(rows, width, device=CUDA).bfloat16(), choices(rows, experts, top_k)
        if rows > 2:
            chosen[-1], x[-1] = NO_EXPERT, torch.nan  # which hurts no other
        known = rows - (rows > 2)
        results = chosen_products(x, chosen, gate_up, down)
        truth = exact(x[:known], chosen[:known], *elements).flatten(0, 1)
        errors = (results[: known * top_k].double() - truth).norm(dim=1) / truth.norm(dim=1)
        assert float(errors.max()) < 1e-2, (rows, int(errors.argmax()))
        assert all(torch.equal(chosen_products(x, chosen, gate_up, down)[: len(truth)], results[: len(truth)])
                   for _ in range(20))  # fmt: skip
        for row in range(known):
            alone = chosen_products(x[row : row + 1], chosen[row : row + 1].contiguous(), gate_up, down)
            assert torch.equal(alone, results[row * top_k : (row + 1) * top_k])


@on_hopper
def test_rows_of_no_expert_and_broken_ones_keep_to_themselves_and_matrices_of_nobody_are_not_read() -> None:
    gate_up, down = matrices(12, 512, 128)
    x, chosen = torch.randn(8, 512, device=CUDA).bfloat16(), choices(8, 6, 4)
    unbroken = chosen_products(x, chosen, gate_up, down).view(8, 4, -1)
    gate_up[6:], down[6:] = torch.nan, torch.nan
    x[3], x[6:] = torch.nan, torch.nan
    chosen[6:] = NO_EXPERT
    results = chosen_products(x, chosen, gate_up, down).view(8, 4, -1)
    assert results[3].isnan().all()
    for row in (0, 1, 2, 4, 5):
        assert torch.equal(results[row], unbroken[row])
    chosen[:] = NO_EXPERT
    chosen_products(x, chosen, gate_up, down)  # nobody: it ends


@on_hopper
def test_a_captured_chain_behind_the_router_has_the_bits_of_kernels_one_after_the_other() -> None:
    """As a layer has it: the choice, dense products of which the last settles, the products, the sum of both."""
    from modelserve_worker.kernels.experts.experts import AddedNorms, BranchNorms, RouterWeights, Shares
    from modelserve_worker.kernels.experts.experts_triton import TritonExperts
    from modelserve_worker.kernels.products.hopper.linear_rows_sm90 import dense_rows

    width, inner, experts, layers = 2816, 704, 32, 4
    backend = TritonExperts(CUDA, streamed_rows=CHOSEN_ROWS)
    ones = torch.ones(width, device=CUDA).bfloat16()
    router = RouterWeights(
        torch.randn(experts, width, device=CUDA).bfloat16() * 2, ones, torch.ones(experts, device=CUDA).bfloat16(), 8
    )
    products = [matrices(experts, width, inner) for _ in range(layers)]
    opened = (torch.randn(2 * inner, width, device=CUDA) * width**-0.5).bfloat16()
    square, norms = (torch.randn(width, width, device=CUDA) * width**-0.5).bfloat16(), AddedNorms(ones, ones, ones)
    closed = (torch.randn(width, inner, device=CUDA) * inner**-0.5).bfloat16()

    def run(start: Tensor) -> list[Tensor]:
        x, kept = start.clone(), []
        for gate_up, down in products:
            delta = dense_rows(x, square, split=True)
            x, opening, routed = backend.add_and_route(x, delta, norms, router, eps=1e-6, num_rows=None)
            dense = dense_rows(dense_rows(opening, opened, gated=True), closed, settles=True)
            choice = routed.choice
            shares = Shares(backend.chosen_products(routed.normed, choice, gate_up, down), choice)
            x, after = backend.add_branches(
                x, dense, shares, BranchNorms(ones, ones, ones), scalar=None, next_weight=ones, eps=1e-6
            )
            assert after is not None
            kept.append(after)
        return kept

    for rows in (1, 3, CHOSEN_ROWS):
        start = torch.randn(rows, width, device=CUDA).bfloat16()
        check_captured_bits(lambda start=start: run(start), replays=100)
