"""Products of tens of rows against float64, on a Hopper GPU and emulated on a CPU: divisions, shapes, rows, gates; the
same bits at every launch."""

from __future__ import annotations

from pathlib import Path

import emulated_cluster_rows
import emulated_kernel
import pytest
import torch
from hopper import check_captured_bits, on_hopper
from torch import Tensor
from torch.nn import functional

from modelserve_worker.kernels.elementwise.elementwise_triton import TritonElementwise
from modelserve_worker.kernels.products.hopper.cluster_rows_sm90 import (
    SHARED_BYTES,
    ClusterKernel,
    cluster_rows,
    kernel_for,
)

pytestmark = pytest.mark.drawn

CUDA = torch.device("cuda")
# One part of a tile, many tiles, more inputs than stages, parts of the inputs: matrices of E4B, 26B-A4B and 31B.
SHAPES = [(272, 1536), (20480, 2560), (3072, 2560), (2560, 10240), (256, 2560), (2560, 256), (4224, 2816), (2816, 2112),
          (16384, 5376), (5376, 8192), (528, 2176)]  # fmt: skip


def exact(x: Tensor, weight: Tensor, *, gated: bool) -> Tensor:
    result = x.double() @ weight.double().t()
    if gated:
        gate, up = result.bfloat16().double().chunk(2, dim=1)
        result = functional.gelu(gate, approximate="tanh") * up
    return result


@pytest.mark.skipif(emulated_kernel.compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("tile", "parts"), [(64, 1), (96, 1), (32, 3), (64, 8)])
@pytest.mark.parametrize("rows", [33, 64, 83])
def test_emulated_near_float64(tile: int, parts: int, rows: int, gated: bool, tmp_path: Path) -> None:
    """Inputs in uneven parts, a tile in part of a matrix, rows that fill no warp; more stages of inputs than fit."""
    kernel = ClusterKernel(tile, parts, 64 if rows <= 64 else 128, gated)
    weight = (torch.randn(208, 1600) * 1600**-0.5).bfloat16()
    x = torch.randn(rows, 1600).bfloat16()
    output, wanted = emulated_cluster_rows.product(kernel, x, weight, tmp_path), exact(x, weight, gated=gated)
    assert float(((output.double() - wanted).norm(dim=1) / wanted.norm(dim=1)).max()) < 8e-3


@on_hopper
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_near_float64_and_the_same_bits_at_every_launch(shape: tuple[int, int]) -> None:
    outputs, inputs = shape
    weight = (torch.randn(outputs, inputs, device=CUDA) * inputs**-0.5).bfloat16()
    for rows in (33, 64, 65, 96, 127, 128):
        x = torch.randn(rows, inputs, device=CUDA).bfloat16()
        for gated in (False, True):
            output, wanted = cluster_rows(x, weight, gated=gated), exact(x, weight, gated=gated)
            assert float(((output.double() - wanted).norm(dim=1) / wanted.norm(dim=1)).max()) < 8e-3
            assert all(torch.equal(cluster_rows(x, weight, gated=gated), output) for _ in range(20))


@on_hopper
def test_a_product_waits_for_the_kernel_that_makes_its_input() -> None:
    """A chain in a captured graph: each product reads what the one before it wrote, and overwrites what it read."""
    backend = TritonElementwise()
    square, closed = ((torch.randn(n, k, device=CUDA) * k**-0.5).bfloat16() for n, k in ((2048, 2048), (2048, 4096)))
    opened = (torch.randn(8192, 2048, device=CUDA) * 2048**-0.5).bfloat16()
    x, norm = torch.randn(83, 2048, device=CUDA).bfloat16(), torch.ones(2048, device=CUDA).bfloat16()

    def chain() -> list[Tensor]:
        rows = x
        for _ in range(8):
            rows = cluster_rows(cluster_rows(rows, square), square)
            rows = backend.rms_norm(cluster_rows(cluster_rows(rows, opened, gated=True), closed), norm, eps=1e-6)
        return [rows]

    check_captured_bits(chain, replays=100)


@pytest.mark.parametrize("rows", [33, 64, 65, 128])
def test_every_shape_has_a_division_that_a_block_has_room_for(rows: int) -> None:
    for outputs, inputs in SHAPES:
        for gated in (False, True):
            kernel = kernel_for(rows, outputs, inputs, gated=gated)
            assert kernel.rows >= rows
            assert kernel.stages >= 3, "few are under way while one is multiplied"
            assert kernel.shared_bytes <= SHARED_BYTES
            assert kernel.parts <= min(8, inputs // 64)
