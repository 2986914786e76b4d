"""Kernels that start while the one before them ends: which launches are such, and that no bit depends on it."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
import triton
from launch_order import one_after_the_other
from torch import Tensor

from modelserve_worker.kernels.compiling import dependent_launch
from modelserve_worker.kernels.compiling.compute_stream import ComputeStreamError, in_turn
from modelserve_worker.kernels.elementwise.elementwise_triton import TritonElementwise
from modelserve_worker.kernels.products.hopper.linear_rows_sm90 import ROWS, dense_rows
from modelserve_worker.kernels.products.row_blocks import plain_product
from modelserve_worker.startup.kernel_trace import TargetDriver

HIDDEN, INNER, LAYERS, REPLAYS = 5376, 1024, 40, 200


@pytest.mark.parametrize(("capability", "options"), [(80, {}), (89, {}), (90, {"launch_pdl": True})])
def test_launches_are_dependent_from_hopper_on(capability: int, options: dict[str, bool]) -> None:
    with mock.patch.object(triton.runtime.driver, "_active", TargetDriver(capability)):
        assert dependent_launch.dependent_launch() == options


def test_a_launch_on_another_stream_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a driver on stream 7. Launches of an older GPU, which start in order, may be on any stream."""
    monkeypatch.setattr(TargetDriver, "get_current_stream", lambda self, device: 7)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with mock.patch.object(triton.runtime.driver, "_active", TargetDriver(90)):
        with pytest.raises(ComputeStreamError, match=r"stream 0x7: .* other streams only copy"):
            dependent_launch.dependent_launch()
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert dependent_launch.dependent_launch() == {"launch_pdl": True}
    with mock.patch.object(triton.runtime.driver, "_active", TargetDriver(80)):
        assert dependent_launch.dependent_launch() == {}


def product(x: Tensor, weight: Tensor) -> Tensor:
    few = len(x) <= ROWS[-1] and torch.cuda.get_device_capability() == (9, 0)
    return dense_rows(x, weight) if few else plain_product(x, weight)


def steps(rows: int) -> Callable[[], Tensor]:
    """A chain of layers over memory that each reuses: norms, products, gates, a copy; the residual at last.

    Kernels of one program beside ones that fill the GPU, and ones with the attribute beside cuBLAS's at 64 rows.
    """
    backend = TritonElementwise()
    generator = torch.Generator("cuda").manual_seed(rows)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator, device="cuda") * scale).bfloat16()

    start, norms = random(rows, HIDDEN), 1.0 + random(LAYERS, 2, HIDDEN, scale=0.1)
    opened, closed = random(2 * INNER, HIDDEN, scale=HIDDEN**-0.5), random(HIDDEN, INNER, scale=INNER**-0.5)
    scalar = torch.ones(1, dtype=torch.bfloat16, device="cuda")

    def run() -> Tensor:
        x = start.clone()
        normed = backend.rms_norm(x, norms[0, 0], eps=1e-6)
        for delta_weight, next_weight in norms:
            gated = backend.gated_gelu(product(normed, opened))
            x, following = backend.residual_norm(
                x, product(gated, closed), delta_weight, scalar=scalar, next_weight=next_weight, eps=1e-6
            )
            assert following is not None
            again = backend.rms_norm(backend.rms_norm(following, delta_weight, eps=1e-6), next_weight, eps=1e-6)
            normed = again + following
        return x

    return run


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captured_chains_have_the_bits_of_kernels_that_run_one_after_the_other() -> None:
    """Many replays, graphs of several sizes in one pool after one another, and uncaptured steps between them."""
    sizes = (64, 8, 1)
    runs = {rows: steps(rows) for rows in sizes}
    with one_after_the_other():
        expected = {rows: run() for rows, run in runs.items()}
    torch.cuda.synchronize()
    graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
    pool = None
    for rows, run in runs.items():
        run()  # compiled before it is captured
        result = torch.empty_like(expected[rows])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            result.copy_(run())
        pool = pool or graph.pool()
        graphs[rows] = graph, result
    wrong = torch.zeros(len(sizes), dtype=torch.int64, device="cuda")
    for replay in range(REPLAYS):
        for place, rows in enumerate(sizes):
            graph, result = graphs[rows]
            graph.replay()
            wrong[place] += (result != expected[rows]).sum()
            result.zero_()
        if replay % 20 == 0:
            for place, rows in enumerate(sizes):
                wrong[place] += (runs[rows]() != expected[rows]).sum()
    assert wrong.tolist() == [0] * len(sizes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_run_on_the_compute_stream_and_copies_on_others() -> None:
    x, weight = torch.randn(4, HIDDEN, device="cuda").bfloat16(), torch.ones(HIDDEN, device="cuda").bfloat16()
    matrix = torch.randn(INNER, HIDDEN, device="cuda").bfloat16()
    backend = TritonElementwise()
    expected = backend.rms_norm(x, weight, eps=1e-6)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        copied = x.to("cpu", non_blocking=True)
        for launch in (lambda: backend.rms_norm(x, weight, eps=1e-6), lambda: dense_rows(x, matrix)):
            if torch.cuda.get_device_capability() >= (9, 0):
                with pytest.raises(ComputeStreamError):
                    launch()
    with in_turn(torch.cuda.Stream()):
        in_its_turn = backend.rms_norm(x, weight, eps=1e-6)
    assert torch.equal(in_its_turn, expected)
    torch.cuda.synchronize()
    assert torch.equal(copied, x.cpu())
    assert torch.equal(backend.rms_norm(x, weight, eps=1e-6), expected)
