"""NVFP4 products: repacked weights are the published ones, kernels and references say what float64 says."""

from __future__ import annotations

import re

import numpy as np
import ptx
import pytest
import torch
from plain_products import PlainNvfp4, nvfp4_elements
from torch import Tensor

from modelserve.sizing.weights.quantised_tiles import nvfp4_matrix_bytes, nvfp4_tiles
from modelserve_worker.kernels.compiling.cuda_kernel import source_file
from modelserve_worker.kernels.products.linear_tiles import LinearTile, SharedBuffers
from modelserve_worker.kernels.products.nvfp4_linear import SCALE_ZERO, Nvfp4Tiles, repack_nvfp4
from modelserve_worker.kernels.products.nvfp4_linear_triton import (
    ELEMENTS,
    nvfp4_dequantised_product,
    nvfp4_grouped_with,
    nvfp4_product_with,
)

pytestmark = pytest.mark.drawn

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
WHOLE = LinearTile(32, 16, 4, 3, programs=1)
SPLIT = LinearTile(64, 16, 4, 3, programs=64)
CASES = [(80, 512), (48, 704), (32, 2112)]


def published(rows: int, inputs: int, device: torch.device, *experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Bytes of all pairs of elements, scales of all sizes with 0 among them, row scales, and what they mean."""
    packed = torch.randint(256, (*experts, rows, inputs // 2)).to(torch.uint8)
    octets = torch.randint(0x7F, (*experts, rows, inputs // 16)).to(torch.uint8)
    octets[..., 0, 0], octets[..., 1, 0] = 0, 0x80  # with either sign
    row_scales = torch.rand(*experts, rows) * 0.01 + 0.001
    nibbles = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).long()
    elements = E2M1[nibbles & 7] * torch.where(nibbles & 8 != 0, -1.0, 1.0)
    scale = octets.view(torch.float8_e4m3fn)
    exact = elements * scale.double().repeat_interleave(16, -1) * row_scales.double().unsqueeze(-1)
    return packed.to(device), scale.to(device), row_scales.to(device), exact.to(device)


def error(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(("rows", "inputs"), CASES)
def test_repacked_weights_are_the_published_ones(rows, inputs, device) -> None:
    packed, scale, row_scales, exact = published(rows, inputs, device)
    matrix = repack_nvfp4(packed, scale, row_scales)
    assert torch.equal(nvfp4_elements(matrix, torch.float64), exact)
    held = sum(each.nbytes for each in (matrix.words, matrix.scales, matrix.row_scales))
    assert held == nvfp4_matrix_bytes(rows=rows, inputs=inputs)
    more = published(rows, inputs, device, 3)
    assert torch.equal(nvfp4_elements(repack_nvfp4(*more[:3]), torch.float64), more[3])


def test_scales_of_another_shape_are_refused(device) -> None:
    packed, scale, row_scales, _ = published(32, 512, device)
    with pytest.raises(ValueError, match="do not fit"):
        repack_nvfp4(packed, scale[:, :-1], row_scales)


@pytest.mark.parametrize("tile", [WHOLE, SPLIT], ids=["whole", "split"])
@pytest.mark.parametrize(("rows", "inputs"), CASES)
def test_products_equal_float64(rows, inputs, tile, device) -> None:
    packed, scale, row_scales, exact = published(rows, inputs, device)
    matrix, shared = repack_nvfp4(packed, scale, row_scales), SharedBuffers(device)
    for count in (1, 17):
        x = torch.randn(count, inputs, device=device).bfloat16()
        expected = x.double() @ exact.t()
        assert error(nvfp4_product_with(x, matrix, tile, shared=shared), expected) < 4e-3
        assert error(nvfp4_dequantised_product(x, matrix, shared=shared), expected) < 8e-3
        assert error(PlainNvfp4().linear(x, matrix), expected) < 8e-3
    assert not shared.split_sums.arrivals.any()


def test_a_broken_row_breaks_no_other(device) -> None:
    packed, scale, row_scales, _ = published(48, 704, device)
    matrix, shared = repack_nvfp4(packed, scale, row_scales), SharedBuffers(device)
    x = torch.randn(4, 704, device=device).bfloat16()
    sound = nvfp4_product_with(x, matrix, SPLIT, shared=shared)
    x[1, 300] = torch.nan
    output = nvfp4_product_with(x, matrix, SPLIT, shared=shared)
    assert output[1].isnan().all()
    assert torch.equal(output[[0, 2, 3]], sound[[0, 2, 3]])


def test_experts_multiply_their_own_rows(device) -> None:
    packed, scale, row_scales, exact = published(64, 352, device, 4)
    matrix = repack_nvfp4(packed, scale, row_scales)
    bounds = [0, 3, 3, 23, 24]  # one expert without rows, one with more than a block
    x = torch.randn(30, 352, device=device).bfloat16()
    ends = torch.tensor(bounds[1:], dtype=torch.int32, device=device)
    actual, plain = nvfp4_grouped_with(x, matrix, ends, WHOLE), PlainNvfp4().grouped(x, matrix, ends)
    for expert in range(4):
        span = slice(bounds[expert], bounds[expert + 1])
        if span.start < span.stop:
            assert error(actual[span], x[span].double() @ exact[expert].t()) < 4e-3
            assert error(plain[span], x[span].double() @ exact[expert].t()) < 8e-3


def words_and_scales() -> tuple[Nvfp4Tiles, Tensor]:
    """A matrix of 256 inputs, and its elements without row scales, float64 [rows, 256]."""
    packed, scale, _, _ = published(64, 256, torch.device("cpu"))
    matrix = repack_nvfp4(packed, scale, torch.ones(64))
    return matrix, nvfp4_elements(matrix, torch.float64)


def test_assembly_unpacks_every_element_exactly() -> None:
    matrix, exact = words_and_scales()
    codes = matrix.scales[0].numpy().astype(np.uint32)  # [16, rows]
    scaled = (codes << 4) + 0x7580
    for first in range(0, 32, 2):  # two words of a row and tile beside each other
        words = [matrix.words[0, :, first + i].numpy().view(np.uint32) for i in range(2)]
        planes = [(first + i) % 8 for i in range(2)]
        pairs = [scaled[2 * planes[0] + group] | scaled[2 * planes[1] + group] << 16 for group in range(2)]
        found = ptx.run(ELEMENTS.value, [*words, *pairs], outputs=8)
        for at in range(8):
            both = ptx.halves(found[at]).view(-1, 2)
            for i in range(2):
                k = 32 * planes[i] + (first + i) // 8 * 2 + at // 2 * 8 + at % 2
                assert torch.equal(both[:, i] * 256, exact[:, k])


def test_the_kernel_of_many_rows_unpacks_every_element_exactly() -> None:
    """The assembly of `nvfp4_elements_sm90.cuh`, with its constants."""
    source = source_file("nvfp4_elements_sm90.cuh").read_text()
    (body,) = re.findall(r"u32 nvfp4_pair\(.*?asm\((.*?):", source, re.DOTALL)
    assembly = "".join(re.findall(r'"(.*?)"', body)).replace("\\n", "\n").replace("%", "$")
    (times, plus) = (int(value, 16) for value in re.findall(r"code \* (0x\w+)u \+ (0x\w+)u", source)[0])
    matrix, exact = words_and_scales()
    codes = matrix.scales[0].numpy().astype(np.uint32)
    for at in range(32):
        word, plane, lane = matrix.words[0, :, at].numpy().view(np.uint32), at % 8, at // 8
        for i in range(4):
            scale = codes[2 * plane + i // 2] * np.uint32(times) + np.uint32(plus)
            sizes = word << np.uint32(6 - 4 * i) if i < 2 else word >> np.uint32(4 * i - 6)
            (pair,) = ptx.run(assembly, [sizes, word << np.uint32(12 - 4 * i), scale], outputs=1)
            both = ptx.halves(pair).view(-1, 2)
            for second in range(2):
                assert torch.equal(both[:, second] * 256, exact[:, 32 * plane + 8 * i + 2 * lane + second])


def test_scales_of_both_kernels_are_the_codes_own() -> None:
    source = source_file("nvfp4_integers_sm90.cuh").read_text()
    (zero,) = (int(value, 16) for value in re.findall(r"tables\.place \+ (0x\w+)u", source))
    assert zero == SCALE_ZERO
    assert nvfp4_tiles(704) == 3
