"""INT8 products: repacked weights are the loaded ones, kernels and references say what float64 says."""

from __future__ import annotations

import re
import secrets

import numpy as np
import ptx
import pytest
import torch
from plain_products import PlainInt8, int8_elements
from torch import Tensor

from modelserve.sizing.weights.quantised_tiles import INT8_GROUPS, int8_inputs
from modelserve_worker.kernels.compiling.cuda_kernel import source_file
from modelserve_worker.kernels.products import linear_tiles
from modelserve_worker.kernels.products.int8_linear import Int8Pairs, repack_int8
from modelserve_worker.kernels.products.int8_linear_triton import (
    PLANES,
    int8_dequantised_product,
    int8_grouped_with,
    int8_product_with,
)
from modelserve_worker.kernels.products.linear_tiles import LinearTile, SharedBuffers

pytestmark = pytest.mark.drawn

WHOLE = LinearTile(32, 8, 2, 3, programs=1)
SPLIT = LinearTile(64, 16, 4, 3, programs=64)
SCALES = (torch.float32, torch.bfloat16, torch.float16)


def loaded(rows: int, inputs: int, group: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Elements of every kind, -128 too, scales, and what they mean in float64."""
    elements = torch.randint(-128, 128, (rows, inputs), dtype=torch.int8).to(device)
    groups = inputs // group if group else 1
    scale = (0.001 + 0.01 * torch.rand((rows, groups))).to(device, dtype if group else torch.float32)
    return elements, scale, elements.double() * scale.double().repeat_interleave(inputs // groups, 1)


def error(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual.double() - expected).norm() / expected.norm())


# Whole tiles; parts of one, of which a plane, or a part of it, is past the end; odd inputs.
CASES = [
    (80, 512, 0), (33, 100, 0), (40, 704, 0), (40, 208, 16), (72, 160, 32), (40, 704, 64), (48, 384, 128),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "inputs", "group"), CASES)
def test_repacked_weights_are_the_loaded_ones(rows, inputs, group, device) -> None:
    for dtype in SCALES:
        elements, scale, exact = loaded(rows, inputs, group, dtype, device)
        address = elements.data_ptr()
        matrix = repack_int8(elements, scale, group, at_a_time=20 * 1024)
        assert matrix.elements.shape == (rows, int8_inputs(inputs))
        assert matrix.scales.dtype is (dtype if group else torch.float32)
        assert (matrix.elements.data_ptr() == address) == (inputs % 128 == 0), "in place where it can be"
        assert torch.equal(int8_elements(matrix, torch.float64), exact)


@pytest.mark.parametrize("tile", [WHOLE, SPLIT], ids=["whole", "split"])
@pytest.mark.parametrize(("rows", "inputs", "group"), CASES)
def test_products_equal_float64(rows, inputs, group, tile, device) -> None:
    dtype = SCALES[secrets.randbelow(3)]
    elements, scale, exact = loaded(rows, inputs, group, dtype, device)
    matrix, shared = repack_int8(elements, scale, group), SharedBuffers(device)
    for count in (1, 17):
        x = torch.randn(count, inputs, device=device).bfloat16()
        expected = x.double() @ exact.t()
        assert error(int8_product_with(x, matrix, tile, shared=shared), expected) < 3e-3, dtype
        assert error(PlainInt8().linear(x, matrix), expected) < 8e-3, dtype
    assert not shared.split_sums.arrivals.any()


@pytest.mark.parametrize(("rows", "inputs", "group"), [(278, 200, 0), (154, 208, 16), (136, 160, 32), (134, 384, 128)])
def test_dequantised_products_equal_float64(rows, inputs, group, device) -> None:
    """In blocks of rows, the last one in part; what was in the buffer before does not matter."""
    shared = SharedBuffers(device, block_bytes=2 * 128 * inputs)
    shared.dequantised_block.fill_(torch.nan)
    for dtype in SCALES:
        elements, scale, exact = loaded(rows, inputs, group, dtype, device)
        x = torch.randn(20, inputs, device=device).bfloat16()
        matrix = repack_int8(elements, scale, group)
        output = int8_dequantised_product(x, matrix, shared=shared)
        assert error(output, x.double() @ exact.t()) < 8e-3
        last = shared.dequantised_block.view(128, inputs)[: rows % 128]
        assert torch.equal(last, int8_elements(matrix, torch.bfloat16)[-(rows % 128) :]), "each rounded once"


@pytest.mark.parametrize("inputs", [5376, 21504])
@pytest.mark.parametrize("group", [0, 32])
def test_products_over_the_inputs_of_the_31b(inputs, group, device) -> None:
    elements, scale, exact = loaded(16, inputs, group, torch.float16, device)
    x = torch.randn(2, inputs, device=device).bfloat16()
    matrix, shared = repack_int8(elements, scale, group), SharedBuffers(device)
    assert error(int8_product_with(x, matrix, SPLIT, shared=shared), x.double() @ exact.t()) < 3e-3


@pytest.mark.parametrize("group", [0, 16])
def test_a_broken_row_breaks_no_other(group, device) -> None:
    elements, scale, _ = loaded(40, 320, group, torch.bfloat16, device)
    matrix, shared = repack_int8(elements, scale, group), SharedBuffers(device)
    x = torch.randn(4, 320, device=device).bfloat16()
    sound = int8_product_with(x, matrix, SPLIT, shared=shared)
    x[1, 300] = torch.nan
    output = int8_product_with(x, matrix, SPLIT, shared=shared)
    assert output[1].isnan().all()
    assert torch.equal(output[[0, 2, 3]], sound[[0, 2, 3]])


def test_an_exact_row_has_the_same_bits_at_every_number_of_rows(device) -> None:
    elements, scale, _ = loaded(40, 320, 32, torch.bfloat16, device)
    matrix, shared = repack_int8(elements, scale, 32), SharedBuffers(device)
    tile = linear_tiles.exact_tile("int8", capability=80)
    x = torch.randn(70, 320, device=device).bfloat16()
    alone = int8_product_with(x[66:67], matrix, tile, shared=shared)
    assert torch.equal(int8_product_with(x, matrix, tile, shared=shared)[66:67], alone)
    assert error(alone, x[66:67].double() @ int8_elements(matrix, torch.float64).t()) < 3e-3


@pytest.mark.parametrize("group", [0, *INT8_GROUPS])
def test_experts_multiply_their_own_rows(group, device) -> None:
    inputs = 384 if group == 128 else 320
    made = [loaded(96, inputs, group, torch.float16, device) for _ in range(4)]
    stacked = repack_int8(torch.stack([each for each, _, _ in made]), torch.stack([each for _, each, _ in made]), group)
    assert torch.equal(int8_elements(stacked, torch.float64), torch.stack([exact for _, _, exact in made]))
    bounds = [0, 3, 3, 23, 24]  # one expert without rows, one with more than a block
    x = torch.randn(30, inputs, device=device).bfloat16()
    ends = torch.tensor(bounds[1:], dtype=torch.int32, device=device)
    actual, plain = int8_grouped_with(x, stacked, ends, WHOLE), PlainInt8().grouped(x, stacked, ends)
    for expert, (_, _, exact) in enumerate(made):
        span = slice(bounds[expert], bounds[expert + 1])
        if span.start < span.stop:
            assert error(actual[span], x[span].double() @ exact.t()) < 3e-3
            assert error(plain[span], x[span].double() @ exact.t()) < 8e-3


def test_the_assembly_converts_every_element() -> None:
    octets = np.random.default_rng(seed := secrets.randbits(32)).permutation(np.arange(256, dtype=np.uint32))
    words = np.arange(256, dtype=np.uint32) | octets << 8 | octets[::-1] << 16 | np.arange(256, dtype=np.uint32) << 24
    first, second = ptx.run(PLANES.value, [words], outputs=2)
    expected = torch.from_numpy(words.view(np.int8).reshape(256, 4).copy()).double()
    assert torch.equal(ptx.halves(first), expected[:, 0::2]), seed
    assert torch.equal(ptx.halves(second), expected[:, 1::2]), seed
    for shift in (0, 8):
        (found,) = ptx.run(few_rows_assembly(), [words >> np.uint32(shift)], outputs=1)
        assert torch.equal(ptx.halves(found), expected[:, shift // 8 :: 2]), seed


def few_rows_assembly() -> str:
    """That of `linear_rows_sm90.cu`, with operands as Triton has them."""
    source = source_file("linear_rows_sm90.cu").read_text()
    (body,) = re.findall(r"u32 integer_pair\(u32 halves\) \{.*?asm\((.*?):", source, re.DOTALL)
    return "".join(re.findall(r'"(.*?)"', body)).replace("\\n", "\n").replace("%", "$")


@pytest.mark.parametrize(("scale", "group"), [((80, 2), 0), ((79, 1), 0), ((4,), 0), ((80, 4), 64), ((80, 8), 128)])
def test_scales_that_do_not_fit_are_refused(scale, group, device) -> None:
    elements = torch.zeros((80, 512), dtype=torch.int8, device=device)
    with pytest.raises(ValueError, match="do not fit INT8 weights of 80 rows and 512 inputs"):
        repack_int8(elements, torch.ones(scale, device=device), group)


def test_groups_that_kernels_do_not_take_are_refused(device) -> None:
    with pytest.raises(ValueError, match="INT8 groups of 8 inputs: the kernels take 16, 32, 64, 128"):
        repack_int8(torch.zeros((8, 64), dtype=torch.int8, device=device), torch.ones((8, 8), device=device), 8)


def test_a_matrix_says_its_rows(device) -> None:
    assert Int8Pairs(torch.zeros((3, 24, 128), dtype=torch.int8), torch.zeros(3, 24), 100, 0).rows == 24
