"""Products of few rows on Hopper against float64: formats, shapes, rows, gates; the same bits at every launch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hopper import ON_HOPPER
from plain_products import fine_scales, fp8_elements, int4_elements, int4_zero_points, int8_elements
from torch import Tensor
from torch.nn import functional

from modelserve.sizing.backends.products import INTEGER_ROWS
from modelserve.sizing.weights.quantised_tiles import int4_tiles
from modelserve_worker.kernels.elementwise.elementwise_triton import TritonElementwise
from modelserve_worker.kernels.products.fp8_linear import Fp8Pairs, e4m3_precision
from modelserve_worker.kernels.products.int4_linear import Int4Tiles
from modelserve_worker.kernels.products.int8_linear import repack_int8

pytestmark = list(ON_HOPPER)
CUDA = torch.device("cuda")
Product = Callable[..., Tensor]
# One part of a tile, several tiles a multiprocessor, more inputs than stages, parts of blocks; each tile size.
SHAPES = [(272, 1536), (20480, 2560), (16384, 1024), (5376, 512), (2560, 256), (2560, 10240), (528, 2176)]


def dense(outputs: int, inputs: int) -> tuple[Tensor, Product]:
    from modelserve_worker.kernels.products.hopper.linear_rows_sm90 import dense_rows

    weight = (torch.randn(outputs, inputs, device=CUDA) * inputs**-0.5).bfloat16()
    return weight.double(), lambda x, **gate: dense_rows(x, weight, **gate)


def int4(outputs: int, inputs: int, group: int, *, half: bool = False, zeros: bool = False) -> tuple[Tensor, Product]:
    from modelserve_worker.kernels.products.hopper.linear_rows_sm90 import int4_rows

    tiles = int4_tiles(inputs)
    words = torch.randint(-(2**31), 2**31, (tiles, outputs, 32), device=CUDA).to(torch.int32)
    scales = fine_scales(tiles, 256 // group, outputs, size=inputs**-0.5 / 8, device=CUDA)
    points = int4_zero_points(tiles, 256 // group, outputs, device=CUDA) if zeros else None
    matrix = Int4Tiles(words, scales if half else scales.bfloat16(), points, inputs)
    return int4_elements(matrix, torch.float64), lambda x, **gate: int4_rows(x, matrix, **gate)


def fp8(outputs: int, inputs: int, *, rounds: bool) -> tuple[Tensor, Product]:
    from modelserve_worker.kernels.products.hopper.linear_rows_sm90 import fp8_rows

    elements = (torch.randn((outputs, inputs), device=CUDA) * 64).to(torch.float8_e4m3fn)
    elements[0, :64] = torch.arange(64, device=CUDA).to(torch.uint8).view(torch.float8_e4m3fn)  # subnormals too
    scales = torch.rand(outputs, device=CUDA) * inputs**-0.5 / 64
    matrix = Fp8Pairs(elements, scales, inputs, 0, rounds)
    return fp8_elements(matrix, torch.float64), lambda x, **gate: fp8_rows(x, matrix, **gate)


def int8(outputs: int, inputs: int, group: int = 0) -> tuple[Tensor, Product]:
    from modelserve_worker.kernels.products.hopper.integer_rows_sm90 import int8_integer_rows
    from modelserve_worker.kernels.products.hopper.linear_rows_sm90 import int8_rows

    elements = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8, device=CUDA)
    scales = (torch.rand((outputs, inputs // group if group else 1), device=CUDA) + 0.5) * inputs**-0.5 / 64
    matrix = repack_int8(elements, scales.half() if group else scales, group)

    def product(x: Tensor, **gate: bool) -> Tensor:
        return (int8_integer_rows if len(x) <= INTEGER_ROWS[-1] else int8_rows)(x, matrix, **gate)

    return int8_elements(matrix, torch.float64), product


MAKERS = {
    "bfloat16": dense,
    "int8": int8,
    **{f"int8_g{group}": partial(int8, group=group) for group in (32, 128)},
    "fp8": partial(fp8, rounds=False),
    "fp8 rounded": partial(fp8, rounds=True),
    **{f"int4_g{group}": lambda n, k, group=group: int4(n, k, group) for group in (32, 64, 128, 256)},
    **{f"int4_g{group}_f16": lambda n, k, group=group: int4(n, k, group, half=True) for group in (32, 128)},
    **{f"int4_g{group}_asym": partial(int4, group=group, zeros=True) for group in (32, 128, 256)},
    **{f"int4_g{group}_asym_f16": partial(int4, group=group, half=True, zeros=True) for group in (32, 64)},
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_near_float64_and_the_same_bits_at_every_launch(name: str, shape: tuple[int, int]) -> None:
    weight, product = MAKERS[name](*shape)
    half = shape[0] // 2
    for rows in INTEGER_ROWS if name.startswith("int8_g") else (1, 3, 8, 9, 16, 17, 32):
        x = torch.randn(rows, shape[1], device=CUDA).bfloat16()
        expected = (e4m3_precision(x) if name == "fp8 rounded" else x).double() @ weight.t()
        output = product(x)
        assert (output.double() - expected).norm() < 4e-3 * expected.norm()
        assert all(torch.equal(product(x), output) for _ in range(20)), "launched while the one before it ends"
        gate, up = expected[:, :half].bfloat16().double(), expected[:, half:].bfloat16().double()
        opened = functional.gelu(gate, approximate="tanh") * up
        if "asym" not in name or half % 16 == 0:  # where the copy engine reads zero points of the second half
            gated = product(x, gated=True)
            assert (gated.double() - opened).norm() < 8e-3 * opened.norm()
            assert torch.equal(product(x, gated=True), gated)
        split = product(x, split=True)
        whole = split.double().sum(0) if split.dim() == 3 else split.double()
        assert (whole - expected).norm() < 4e-3 * expected.norm()
        assert all(torch.equal(product(x, split=True), split) for _ in range(5))


def test_gates_have_the_bits_of_the_elementwise_kernel() -> None:
    """Of every finite bfloat16: a GELU of few rows and one of many are the same function."""
    from modelserve_worker.kernels.products.hopper.linear_rows_sm90 import dense_rows

    values = torch.arange(-(2**15), 2**15, device=CUDA).to(torch.int16).view(torch.bfloat16)
    values = values[values.isfinite()]
    weight = torch.zeros(2 * len(values), 64, dtype=torch.bfloat16, device=CUDA)
    weight[: len(values), 0], weight[len(values) :, 0] = values, 1.0
    x = torch.zeros(1, 64, dtype=torch.bfloat16, device=CUDA)
    x[0, 0] = 1.0
    gate_up = torch.cat((values, torch.ones_like(values)))[None]
    expected = TritonElementwise().gated_gelu(gate_up)
    assert torch.equal(dense_rows(x, weight, gated=True), expected)
    x64 = values.double()
    exact = x64 / (1 + (-2 * (2 / torch.pi) ** 0.5 * (x64 + 0.044715 * x64**3)).exp())  # tanh cancels in its tail
    assert (expected[0].double() - exact).abs().le(2**-8 * exact.abs() + 1e-30).all()


def test_a_product_waits_for_the_kernel_that_makes_its_input() -> None:
    """A chain in a captured graph: each product reads what the one before it wrote, and overwrites what it read."""
    first, second = dense(4096, 2048), dense(2048, 4096)
    x = torch.randn(4, 2048, device=CUDA).bfloat16()

    def chain(rows: Tensor) -> Tensor:
        for _ in range(8):
            rows = second[1](first[1](rows))
        return rows

    torch.cuda.synchronize()
    expected = x
    for _ in range(8):
        for _, product in (first, second):
            expected = product(expected)
            torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = chain(x)
    for _ in range(100):
        graph.replay()
        assert torch.equal(result, expected)
