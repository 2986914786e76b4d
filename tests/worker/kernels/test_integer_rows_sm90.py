"""Products of one or two rows with INT4 matrices in integers, against float64, on a Hopper GPU and emulated on a CPU:
tiles, rows, gates, scales, parts, several tiles of a thread block; rows that are no numbers keep to themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import emulated_integer_rows
import emulated_kernel
import pytest
import torch
from hopper import on_hopper
from plain_products import fine_scales, int4_elements, int4_zero_points, int8_elements, nvfp4_elements
from torch import Tensor
from torch.nn import functional

from modelserve.sizing.weights.quantised_tiles import int4_tiles
from modelserve_worker.kernels.products.hopper.integer_rows_sm90 import IntegerKernel
from modelserve_worker.kernels.products.int4_linear import Int4Tiles
from modelserve_worker.kernels.products.int8_linear import Int8Pairs, repack_int8
from modelserve_worker.kernels.products.nvfp4_linear import Nvfp4Tiles, repack_nvfp4

pytestmark = pytest.mark.drawn

Matrix = Int4Tiles | Nvfp4Tiles | Int8Pairs
ELEMENTS: dict[type, Callable[..., Tensor]] = {
    Int4Tiles: int4_elements, Nvfp4Tiles: nvfp4_elements, Int8Pairs: int8_elements,
}  # fmt: skip


def int4(outputs: int, inputs: int, scales: int, *, half: bool = False, zeros: bool = False) -> Int4Tiles:
    tiles = int4_tiles(inputs)
    words = torch.randint(-(2**31), 2**31, (tiles, outputs, 32)).to(torch.int32)
    of_groups = fine_scales(tiles, scales, outputs, size=inputs**-0.5 / 8)
    points = int4_zero_points(tiles, scales, outputs) if zeros else None
    return Int4Tiles(words, of_groups if half else of_groups.bfloat16(), points, inputs)


def nvfp4(outputs: int, inputs: int) -> Nvfp4Tiles:
    """Of all codes but those of scales that are no numbers, small and large scales beside each other."""
    packed = torch.randint(256, (outputs, inputs // 2)).to(torch.uint8)
    scale = torch.randint(0x7F, (outputs, inputs // 16)).to(torch.uint8).view(torch.float8_e4m3fn)
    return repack_nvfp4(packed, scale, (torch.rand(outputs) + 0.5) * inputs**-0.5 / 200)


def int8(outputs: int, inputs: int, group: int = 0, dtype: torch.dtype = torch.float32) -> Int8Pairs:
    """-128 and 127 among them, in one row all the way; scales of groups with and without a sign."""
    elements = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
    elements[1] = -128
    scales = (torch.rand(outputs, inputs // group if group else 1) + 0.5) * inputs**-0.5 / 128
    if group:
        scales *= 1 - 2 * (torch.rand(scales.shape) < 0.2).float()
        scales[2] *= 2.0**-8  # float16 has these less exactly
    return repack_int8(elements, scales.to(dtype), group)


def exact(x: Tensor, matrix: Matrix, *, gated: bool) -> Tensor:
    product = x.double() @ ELEMENTS[type(matrix)](matrix, torch.float64).t()
    if not gated:
        return product
    gate, up = product.bfloat16().double().chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up


@pytest.mark.skipif(emulated_kernel.compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("stored", "tile", "scales", "gated", "parts", "outputs", "inputs", "grid"),
    [
        ("int4", 64, 8, False, 1, 200, 1728, 2),  # two tiles each, the last one in part, inputs in part of a block
        ("int4", 128, 8, False, 3, 256, 1536, 4),  # of another part than the tile before
        ("int4", 64, 4, True, 1, 256, 1024, 3),
        ("int4", 96, 2, False, 1, 96, 1024, 1),
        ("int4", 352, 1, True, 1, 352, 512, 1),
        ("int4 float16", 64, 8, False, 1, 200, 1728, 2),
        ("int4 float16", 128, 4, False, 3, 256, 1536, 4),
        ("int4 float16", 96, 2, True, 1, 192, 1024, 1),
        ("int4 zeros", 64, 8, False, 1, 208, 1728, 2),
        ("int4 zeros float16", 128, 8, False, 3, 256, 1536, 4),
        ("int4 zeros", 64, 4, True, 1, 256, 1024, 3),
        ("int4 zeros float16", 96, 2, False, 1, 96, 1024, 1),
        ("int4 zeros", 352, 1, True, 1, 352, 512, 1),
        ("int4 zeros", 128, 2, False, 3, 240, 1536, 4),
        ("nvfp4", 64, 16, False, 1, 208, 1728, 2),
        ("nvfp4", 128, 16, False, 3, 256, 1536, 4),
        ("nvfp4", 96, 16, True, 1, 192, 1024, 1),
        ("int8", 64, 0, False, 1, 200, 1088, 2),
        ("int8", 128, 0, False, 3, 256, 1536, 4),
        ("int8", 32, 0, True, 1, 128, 1024, 3),
        ("int8", 352, 0, True, 1, 352, 512, 1),
    ],
)
@pytest.mark.parametrize("rows", [1, 2])
def test_emulated_near_float64(
    stored: str, tile: int, scales: int, gated: bool, parts: int, outputs: int, inputs: int, grid: int, rows: int,
    tmp_path: Path,
) -> None:  # fmt: skip
    half, zeros = "float16" in stored, "zeros" in stored
    matrix: Matrix = int8(outputs, inputs)
    if "int4" in stored:
        matrix = int4(outputs, inputs, scales, half=half, zeros=zeros)
    matrix = nvfp4(outputs, inputs) if stored == "nvfp4" else matrix
    blocks, of_block = 1 if tile > 256 else 256 // tile, 256 if scales else 128
    tiles = -(-inputs // (of_block * blocks * parts)) * blocks
    kernel = IntegerKernel(
        tile, blocks, rows, scales, tiles, gated, parts, nvfp4=stored == "nvfp4", int8=stored == "int8",
        half_scales=half, zeros=zeros,
    )  # fmt: skip
    library = emulated_integer_rows.library_of(kernel, tmp_path)
    sizes = 2.0 ** torch.arange(-8.0, 8.0).repeat_interleave(inputs // 16 + 1)[:inputs]
    x = (torch.randn(rows, inputs) * sizes).bfloat16()
    result = emulated_integer_rows.product(library, kernel, x, matrix, grid=grid).double()
    result, expected = result.sum(0) if parts > 1 else result, exact(x, matrix, gated=gated)
    assert (result - expected).norm() < (8e-3 if gated else 4e-3) * expected.norm(), "bfloat16 rounds by 2^-8 at most"
    if parts > 1:
        assert (result - expected).norm() < 1e-4 * expected.norm(), "of integers alone, nothing is rounded"


@pytest.mark.skipif(emulated_kernel.compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("group", "dtype", "gated", "parts", "rows"),
    [
        (32, torch.float16, False, 1, 1), (32, torch.bfloat16, True, 1, 2), (64, torch.float16, False, 3, 2),
        (128, torch.bfloat16, False, 1, 2),
    ],
)  # fmt: skip
def test_emulated_int8_of_groups_near_float64(
    group: int, dtype: torch.dtype, gated: bool, parts: int, rows: int, tmp_path: Path
) -> None:
    matrix = int8(208, 1536, group, dtype)
    kernel = IntegerKernel(
        64, 4, rows, 128 // group, 12 // parts, gated, parts, int8=True, half_scales=dtype is torch.float16
    )
    library = emulated_integer_rows.library_of(kernel, tmp_path)
    x = torch.randn(rows, 1536).bfloat16()
    result = emulated_integer_rows.product(library, kernel, x, matrix, grid=2).double()
    result, expected = result.sum(0) if parts > 1 else result, exact(x, matrix, gated=gated)
    assert (result - expected).norm() < (8e-3 if gated else 1e-4 if parts > 1 else 4e-3) * expected.norm()
    if not gated:
        assert (result[:, 2] - expected[:, 2]).norm() < 8e-3 * expected[:, 2].norm(), "the small scales"


@pytest.mark.skipif(emulated_kernel.compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(("scales", "zeros"), [(8, False), (8, True), (0, False)])
def test_emulated_what_is_no_number_keeps_to_its_row(scales: int, zeros: bool, tmp_path: Path) -> None:
    matrix = int4(64, 512, 8, zeros=zeros) if scales else int8(64, 512)
    kernel = IntegerKernel(64, 4, 2, scales, 4, gated=False, int8=not scales, zeros=zeros)
    library, x = emulated_integer_rows.library_of(kernel, tmp_path), torch.randn(2, 512).bfloat16()
    expected = exact(x[:1], matrix, gated=False)[0]
    for broken in (torch.nan, torch.inf, -torch.inf):
        x[1, 77] = broken
        result = emulated_integer_rows.product(library, kernel, x, matrix, grid=1)
        assert result[1].isnan().all()
        assert (result[0].double() - expected).norm() < 4e-3 * expected.norm()
    x[1] = 0.0
    assert (emulated_integer_rows.product(library, kernel, x, matrix, grid=1)[1] == 0).all()


@on_hopper
@pytest.mark.parametrize(("outputs", "inputs"), [(5376, 21504), (16384, 5376), (2560, 2560), (43008, 512)])
@pytest.mark.parametrize(
    ("half", "scales", "zeros"),
    [(False, 8, False), (True, 8, False), (False, 8, True), (True, 8, True), (False, 2, True), (True, 1, True)],
)
def test_near_float64_and_the_same_bits_at_every_launch(
    outputs: int, inputs: int, half: bool, scales: int, zeros: bool
) -> None:
    from modelserve_worker.kernels.products.hopper.integer_rows_sm90 import integer_rows

    matrix = int4(outputs, inputs, scales, half=half, zeros=zeros)
    points = None if matrix.zero_points is None else matrix.zero_points.cuda()
    matrix = Int4Tiles(matrix.words.cuda(), matrix.scales.cuda(), points, inputs)
    for rows in (1, 2):
        x = torch.randn(rows, inputs + 64, device="cuda").bfloat16()[:, 64:]  # rows lie apart
        expected = exact(x, matrix, gated=False)
        for split in (False, True):
            result = integer_rows(x, matrix, split=split)
            whole = (result.sum(0) if result.dim() == 3 else result).double()
            assert (whole - expected).norm() < (1e-4 if result.dim() == 3 else 2e-3) * expected.norm()
            assert all(torch.equal(integer_rows(x, matrix, split=split), result) for _ in range(20))
        opened = exact(x, matrix, gated=True)
        assert (integer_rows(x, matrix, gated=True).double() - opened).norm() < 8e-3 * opened.norm()
