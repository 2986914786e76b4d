"""FP8 products: repacked weights are the published ones, kernels and references say what float64 says."""

from __future__ import annotations

import re
import secrets
from typing import Literal

import numpy as np
import ptx
import pytest
import torch
from plain_products import PlainFp8, fp8_elements, unpaired
from plain_products import rounded_inputs as plain_rounded_inputs
from torch import Tensor

from modelserve.sizing.weights.quantised_tiles import fp8_inputs
from modelserve_worker.kernels.compiling.cuda_kernel import source_file
from modelserve_worker.kernels.products import fp8_linear_triton
from modelserve_worker.kernels.products.fp8_linear import e4m3_precision, repack_fp8
from modelserve_worker.kernels.products.fp8_linear_triton import PLANES, PRECISION, fp8_grouped_with, fp8_product_with
from modelserve_worker.kernels.products.linear_tiles import LinearTile, SharedBuffers

pytestmark = pytest.mark.drawn

Kind = Literal["channel", "block"]
WHOLE = LinearTile(32, 8, 2, 3, programs=1)
SPLIT = LinearTile(64, 16, 4, 3, programs=64)


def published(rows: int, inputs: int, kind: Kind, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Elements of every kind of e4m3 number, scales, and what they mean in float64."""
    bits = torch.randint(256, (rows, inputs), dtype=torch.uint8)
    bits[bits & 0x7F == 0x7F] = 0  # no NaN
    elements = bits.view(torch.float8_e4m3fn).to(device)
    shape = (rows, 1) if kind == "channel" else (-(-rows // 128), -(-inputs // 128))
    scale = (0.001 + 0.01 * torch.rand(shape)).to(device)
    each = scale.double()
    if kind == "block":
        each = each.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :inputs]
    return elements, scale, elements.double() * each


def error(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual.double() - expected).norm() / expected.norm())


CASES: list[tuple[int, int, Kind]] = [
    (80, 512, "channel"), (40, 704, "channel"), (150, 320, "block"), (200, 256, "block"), (33, 100, "channel"),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "inputs", "kind"), CASES)
def test_repacked_weights_are_the_published_ones(rows, inputs, kind, device) -> None:
    elements, scale, exact = published(rows, inputs, kind, device)
    address = elements.data_ptr()
    matrix = repack_fp8(elements, scale, rounds_inputs=False, at_a_time=20 * 1024)
    assert matrix.elements.shape == (rows, fp8_inputs(inputs))
    assert matrix.scale_rows == (128 if kind == "block" else 0)
    assert (matrix.elements.data_ptr() == address) == (inputs % 64 == 0), "in place where it can be"
    assert torch.equal(fp8_elements(matrix, torch.float64), exact)


@pytest.mark.parametrize("tile", [WHOLE, SPLIT], ids=["whole", "split"])
@pytest.mark.parametrize(("rows", "inputs", "kind"), CASES)
def test_products_equal_float64(rows, inputs, kind, tile, device) -> None:
    elements, scale, exact = published(rows, inputs, kind, device)
    matrix = repack_fp8(elements, scale, rounds_inputs=False)
    shared = SharedBuffers(device)
    for count in (1, 17):
        x = torch.randn(count, inputs, device=device).bfloat16()
        expected = x.double() @ exact.t()
        assert error(fp8_product_with(x, matrix, tile, shared=shared), expected) < 4e-3
        assert error(PlainFp8().linear(x, matrix), expected) < 8e-3
    assert not shared.split_sums.arrivals.any()


def test_blocks_that_begin_anew_with_each_stacked_matrix(device) -> None:
    """As the experts of 26B-A4B: 704 rows are five and a half blocks."""
    made = [published(rows, 320, "block", device) for rows in (192, 192, 48)]
    elements = torch.cat([each.view(torch.uint8) for each, _, _ in made]).view(torch.float8_e4m3fn)
    exact, x = torch.cat([each for _, _, each in made]), torch.randn(3, 320, device=device).bfloat16()
    scale = torch.cat([each for _, each, _ in made])
    matrix = repack_fp8(elements, scale, rounds_inputs=False, parts=(192, 192, 48))
    assert matrix.scale_rows == 64
    assert torch.equal(fp8_elements(matrix, torch.float64), exact)
    assert error(fp8_product_with(x, matrix, SPLIT, shared=SharedBuffers(x.device)), x.double() @ exact.t()) < 4e-3


@pytest.mark.parametrize("inputs", [5376, 21504])
def test_products_over_the_inputs_of_the_31b(inputs, device) -> None:
    elements, scale, exact = published(16, inputs, "channel", device)
    x = torch.randn(2, inputs, device=device).bfloat16()
    output = fp8_product_with(
        x, repack_fp8(elements, scale, rounds_inputs=False), SPLIT, shared=SharedBuffers(x.device)
    )
    assert error(output, x.double() @ exact.t()) < 4e-3


def test_a_broken_row_breaks_no_other(device) -> None:
    elements, scale, _ = published(40, 320, "channel", device)
    matrix = repack_fp8(elements, scale, rounds_inputs=False)
    x = torch.randn(4, 320, device=device).bfloat16()
    sound = x.clone()
    x[1, 300] = torch.nan
    output = fp8_product_with(x, matrix, SPLIT, shared=SharedBuffers(x.device))
    assert output[1].isnan().all()
    assert torch.equal(
        output[[0, 2, 3]], fp8_product_with(sound, matrix, SPLIT, shared=SharedBuffers(x.device))[[0, 2, 3]]
    )


@pytest.mark.parametrize("kind", ["channel", "block"])
def test_experts_multiply_their_own_rows(kind, device) -> None:
    made = [published(160, 352, kind, device) for _ in range(4)]
    octets = torch.stack([elements.view(torch.uint8) for elements, _, _ in made]).view(torch.float8_e4m3fn)
    stacked = repack_fp8(octets, torch.stack([scale for _, scale, _ in made]), rounds_inputs=False)
    assert torch.equal(fp8_elements(stacked, torch.float64), torch.stack([exact for _, _, exact in made]))
    bounds = [0, 3, 3, 23, 24]  # one expert without rows, one with more than a block
    x = torch.randn(30, 352, device=device).bfloat16()
    ends = torch.tensor(bounds[1:], dtype=torch.int32, device=device)
    actual, plain = fp8_grouped_with(x, stacked, ends, WHOLE), PlainFp8().grouped(x, stacked, ends)
    for expert, (_, _, exact) in enumerate(made):
        span = slice(bounds[expert], bounds[expert + 1])
        if span.start < span.stop:
            assert error(actual[span], x[span].double() @ exact.t()) < 4e-3
            assert error(plain[span], x[span].double() @ exact.t()) < 8e-3


@pytest.mark.parametrize("inputs", [64, 100, 704])
def test_inputs_are_rounded_by_row_as_the_reference_rounds_them(inputs, device) -> None:
    x = (torch.randn(5, inputs, device=device) * 10 ** (4 * torch.rand(5, 1, device=device) - 2)).bfloat16()
    x[3] = 0.0
    rounded, scales = fp8_linear_triton.rounded_inputs(x)
    expected, expected_scales = plain_rounded_inputs(x)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(rounded.view(torch.uint8), expected.view(torch.uint8))
    back = unpaired(rounded.double())[:, :inputs] * scales.double()
    # Half a step of three mantissa bits, or of the subnormals below 2^-6.
    bound = torch.maximum(x.double().abs() * 2.0**-4, scales.double() * 2.0**-10)
    assert ((back - x.double()).abs() <= bound * 1.0001).all()
    assert (back.abs().amax(1)[[0, 1, 2, 4]] > 0).all()


def test_a_rows_scale_is_the_least_power_of_two_that_fits(device) -> None:
    """From a largest element of 2^-118 on; scales of smaller ones would be below 2^-126."""
    largest = torch.cat([2.0**exponent * (1 + torch.arange(128) / 128) for exponent in (-118, 0, 100)])
    largest = largest.bfloat16().to(device)
    x = torch.stack((largest, -largest / 3), 1)
    rounded, scales = fp8_linear_triton.rounded_inputs(x)
    assert torch.equal(scales, plain_rounded_inputs(x)[1])
    assert (torch.frexp(scales)[0] == 0.5).all()
    kept = e4m3_precision(largest).double()
    assert torch.equal(unpaired(rounded.double())[:, 0] * scales[:, 0].double(), kept)
    assert ((kept / scales[:, 0].double() <= 448) & (kept / scales[:, 0].double() > 224)).all()


def rounded_as_few_rows_are(x: Tensor) -> Tensor:
    """bfloat16 x through the assembly of the products of few rows."""
    words = x.contiguous().view(torch.int16).numpy().reshape(-1).copy().view(np.uint32)
    rounded = [ptx.run(assembly, [words], outputs=1)[0] for assembly in (PRECISION.value, few_rows_assembly())]
    assert (rounded[0] == rounded[1]).all()
    return ptx.halves(rounded[0]).view(x.shape)


def few_rows_assembly() -> str:
    """That of `linear_rows_sm90.cu`, with operands as Triton has them."""
    source = source_file("linear_rows_sm90.cu").read_text()
    (body,) = re.findall(r"u32 e4m3_precision\(u32 pair\) \{.*?asm\((.*?):", source, re.DOTALL)
    return "".join(re.findall(r'"(.*?)"', body)).replace("\\n", "\n").replace("%", "$")


def test_few_rows_round_every_bfloat16_to_the_nearest_of_four_bits() -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    rounded = rounded_as_few_rows_are(every)
    finite = (every == 0) | (every.abs() >= 2.0**-126) & (every.abs() < 2.0**123)
    assert torch.equal(rounded[finite], e4m3_precision(every[finite]).double())
    assert rounded[~every.isfinite()].isnan().all(), "what is no number stays none"
    normal = every[finite & (every != 0)]
    as_e4m3 = torch.ldexp(
        torch.frexp(normal.float())[0].to(torch.float8_e4m3fn).float(), torch.frexp(normal.float())[1]
    )
    assert torch.equal(e4m3_precision(normal).float(), as_e4m3)


def test_a_row_is_rounded_one_way_at_every_number_of_rows(device) -> None:
    """Up to 32 as they are read, more to e4m3: the same numbers, but for those below 2^-13 of a row's largest."""
    elements, scale, exact = published(48, 320, "channel", device)
    matrix = repack_fp8(elements, scale, rounds_inputs=True)
    wide = torch.randn(512, 320, device=device) * torch.exp2(8 * torch.randn(512, 320, device=device))
    x = wide.bfloat16()
    kept = e4m3_precision(x)
    if device.type == "cpu":
        assert torch.equal(rounded_as_few_rows_are(x[:16]), kept[:16].double())
    assert torch.equal(fp8_linear_triton.rounded_precision(x[:32]), kept[:32])
    assert torch.equal(fp8_linear_triton.rounded_precision(x[:2, 60:]), kept[:2, 60:]), "a part of wider rows"
    largest, shared = x.double().abs().amax(1, keepdim=True), SharedBuffers(device)
    for rows in (1, 16, 17, 32, 33, 512):
        rounded, scales = fp8_linear_triton.rounded_inputs(x[:rows])
        back = unpaired(rounded.double())[:, :320] * scales.double()
        far = (back - kept[:rows].double()).abs()
        assert (far <= 2.0**-17 * largest[:rows]).all()
        assert not far[x[:rows].double().abs() >= 2.0**-13 * largest[:rows]].any()
        expected = kept[:rows].double() @ exact.t()
        in_e4m3 = (rounded.double() @ matrix.elements.double().t()) * scales.double() * matrix.scales.double()
        assert error(in_e4m3, expected) < 1e-4
        if rows <= 33:  # the interpreter takes seconds for more
            assert error(fp8_product_with(x[:rows], matrix, SPLIT, shared=shared), expected) < 4e-3
        assert error(PlainFp8().linear(x[:rows], matrix), expected) < 8e-3


def test_rounded_inputs_and_weights_multiply_in_one_order(device) -> None:
    """The scaled product knows nothing of pairs: both sides must have the same."""
    elements, scale, exact = published(48, 704, "channel", device)
    matrix = repack_fp8(elements, scale, rounds_inputs=True)
    x = torch.randn(20, 704, device=device).bfloat16()
    rounded, scales = fp8_linear_triton.rounded_inputs(x)
    product = (rounded.double() @ matrix.elements.double().t()) * scales.double() * matrix.scales.double()
    assert error(product, x.double() @ exact.t()) < 5e-2
    assert error(product, (unpaired(rounded.double())[:, :704] * scales.double()) @ exact.t()) < 1e-6


def test_the_assembly_converts_every_e4m3_number() -> None:
    bits = np.arange(256, dtype=np.uint32)
    bits[[0x7F, 0xFF]] = 0
    shuffled = np.random.default_rng(seed := secrets.randbits(32)).permutation(bits)
    words = bits | shuffled << 8 | shuffled[::-1] << 16 | bits[::-1] << 24
    first, second = ptx.run(PLANES.value, [words], outputs=2)

    def value(octets: np.ndarray) -> Tensor:
        return torch.from_numpy(octets.astype(np.uint8)).view(torch.float8_e4m3fn).double()

    assert torch.equal(ptx.halves(first), torch.stack([value(bits), value(shuffled[::-1])], -1)), seed
    assert torch.equal(ptx.halves(second), torch.stack([value(shuffled), value(bits[::-1])], -1)), seed


@pytest.mark.parametrize("scale", [(80, 4), (79, 1), (2, 4), (4,)])
def test_scales_that_do_not_fit_are_refused(scale, device) -> None:
    elements = torch.zeros((80, 512), dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="do not fit FP8 weights of 80 rows and 512 inputs"):
        repack_fp8(elements, torch.ones(scale, device=device), rounds_inputs=False)
