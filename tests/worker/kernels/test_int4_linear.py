"""INT4 products: repacked weights are the published ones, kernels and references say what float64 says."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

import numpy as np
import ptx
import pytest
import torch
from plain_products import PlainInt4, fine_scales, gain, int4_elements
from torch import Tensor

from modelserve.sizing.weights.quantised_tiles import SPLIT_SUM_BYTES, dequantised_rows, int4_matrix_bytes
from modelserve_worker.kernels.compiling.cuda_kernel import source_file
from modelserve_worker.kernels.products.int4_linear import Int4Tiles, repack_int4
from modelserve_worker.kernels.products.int4_linear_triton import (
    FINELY_SCALED,
    PAIRS,
    SCALED,
    int4_dequantised_product,
    int4_grouped_with,
    int4_product_with,
)
from modelserve_worker.kernels.products.linear_tiles import (
    MOST_COUNTERS,
    LinearTile,
    SharedBuffers,
    grouped_tile,
    linear_tile,
    tiles_of,
)

pytestmark = pytest.mark.drawn

FEW = LinearTile(32, 8, 2, 3, programs=1, few=True)
FEW_SPLIT = LinearTile(32, 16, 2, 3, programs=64, few=True)
MANY = LinearTile(64, 16, 4, 2, programs=1)
MANY_SPLIT = LinearTile(64, 32, 4, 2, programs=32)


def multiplied(x: Tensor, tiles: Int4Tiles, tile: LinearTile) -> Tensor:
    return int4_product_with(x, tiles, tile, shared=SharedBuffers(x.device))


@dataclass(frozen=True)
class Matrix:
    """Published tensors of random numbers, and what they mean in float64."""

    packed: Tensor
    scale: Tensor
    zero_point: Tensor | None
    exact: Tensor
    seed: int

    @property
    def tiles(self) -> Int4Tiles:
        return repack_int4(self.packed, self.scale, self.zero_point)


def matrix(rows: int, inputs: int, *, group: int, asymmetric: bool, device: torch.device, half: bool = False) -> Matrix:
    seed = secrets.randbits(32)
    generator = torch.Generator().manual_seed(seed)

    def words(*shape: int) -> Tensor:
        return torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)

    groups = inputs // group
    packed, zero_point = words(rows, inputs // 8), words(-(-rows // 8), groups) if asymmetric else None
    scale = (0.001 + 0.01 * torch.rand(rows, groups, generator=generator)).bfloat16()
    if half:
        scale = fine_scales(rows, groups, size=0.005)
    values = torch.stack([packed >> 4 * j & 15 for j in range(8)], dim=-1).flatten(1).double()
    zeros = torch.full((rows, groups), 8.0)
    if zero_point is not None:
        zeros = torch.stack([zero_point >> 4 * j & 15 for j in range(8)], dim=1).flatten(0, 1)[:rows]
    exact = (values - zeros.double().repeat_interleave(group, 1)) * scale.double().repeat_interleave(group, 1)
    moved = [each if each is None else each.to(device) for each in (packed, scale, zero_point, exact)]
    return Matrix(*moved, seed)


def rows_of(count: int, inputs: int, device: torch.device) -> Tensor:
    """Activations with outliers, as they have them."""
    x = torch.randn(count, inputs)
    x[:, torch.randint(inputs, (4,))] *= 100
    return x.to(device, torch.bfloat16)


def error(actual: Tensor, x: Tensor, exact: Tensor) -> float:
    expected = x.double() @ exact.t()
    assert actual.shape == expected.shape
    return float((actual.double() - expected).norm() / expected.norm())


CASES = [(80, 512, 32, False), (40, 704, 32, True), (72, 512, 128, False), (70, 384, 128, True), (33, 320, 64, True)]


@pytest.mark.parametrize(("rows", "inputs", "group", "asymmetric"), CASES)
def test_repacked_weights_are_the_published_ones(rows, inputs, group, asymmetric, device) -> None:
    case = matrix(rows, inputs, group=group, asymmetric=asymmetric, device=device, half=group == 128)
    # In several pieces, the last one smaller.
    tiles = repack_int4(case.packed, case.scale, case.zero_point, at_a_time=20 * 1024)
    assert (tiles.group, tiles.scales.dtype) == (group, case.scale.dtype)
    assert torch.equal(int4_elements(tiles, torch.float64), case.exact), case.seed
    held = sum(t.nbytes for t in (tiles.words, tiles.scales, tiles.zero_points) if t is not None)
    assert held == int4_matrix_bytes(rows=rows, inputs=inputs, group=group, zero_points=asymmetric)


@pytest.mark.parametrize("tile", [FEW, FEW_SPLIT, MANY, MANY_SPLIT], ids=["few", "few split", "many", "many split"])
@pytest.mark.parametrize(("rows", "inputs", "group", "asymmetric"), CASES)
def test_products_equal_float64(rows, inputs, group, asymmetric, tile, device) -> None:
    case = matrix(rows, inputs, group=group, asymmetric=asymmetric, device=device)
    for count in (1, 17):
        x = rows_of(count, inputs, device)
        # Few rows: only the result is rounded. Many: every element is, as the reference's.
        assert error(multiplied(x, case.tiles, tile), x, case.exact) < (4e-3 if tile.few else 8e-3), case.seed
        assert error(PlainInt4().linear(x, case.tiles), x, case.exact) < 8e-3, case.seed


@pytest.mark.parametrize("tile", [FEW, FEW_SPLIT, MANY, MANY_SPLIT], ids=["few", "few split", "many", "many split"])
@pytest.mark.parametrize(("group", "asymmetric"), [(32, False), (128, True)])
def test_scales_of_float16_are_not_rounded(group, asymmetric, tile, device) -> None:
    case = matrix(80, 640, group=group, asymmetric=asymmetric, device=device, half=True)
    x = torch.randn(9, 640).to(device, torch.bfloat16)
    exact = case.exact if tile.few else case.exact.bfloat16().double()  # each element is rounded, and once
    output, expected = multiplied(x, case.tiles, tile), x.double() @ exact.t()
    assert error(output, x, exact) < 4e-3, case.seed
    assert abs(gain(output, expected)) < 7e-4, case.seed  # 1.5e-3 and more where scales are rounded


@pytest.mark.parametrize("asymmetric", [False, True])
def test_elements_are_rounded_once(asymmetric, device) -> None:
    case = matrix(40, 352, group=32, asymmetric=asymmetric, device=device, half=True)
    ones = torch.eye(352, dtype=torch.bfloat16, device=device)
    elements = int4_dequantised_product(ones, case.tiles, shared=SharedBuffers(device)).t()
    assert torch.equal(elements, case.exact.bfloat16()), case.seed


@pytest.mark.parametrize(("inputs", "tile"), [(5376, MANY), (21504, FEW_SPLIT)])
def test_products_over_the_inputs_of_the_31b(inputs, tile, device) -> None:
    case = matrix(16, inputs, group=32, asymmetric=False, device=device)
    x = rows_of(3, inputs, device)
    assert error(multiplied(x, case.tiles, tile), x, case.exact) < (4e-3 if tile.few else 8e-3), case.seed


def test_many_rows_are_dequantised_block_by_block_as_the_reference_rounds(device) -> None:
    case = matrix(300, 704, group=32, asymmetric=True, device=device)
    x = rows_of(5, 704, device)
    expected = x.double() @ int4_elements(case.tiles, torch.bfloat16).double().t()
    actual = int4_dequantised_product(x, case.tiles, shared=SharedBuffers(x.device, block_bytes=2 * 128 * 704))
    assert (actual.double() - expected).norm() / expected.norm() < 4e-3, case.seed
    assert dequantised_rows(rows=300, inputs=704) == 300
    assert dequantised_rows(rows=43008, inputs=5376) * 5376 * 2 <= 128 << 20


def test_the_same_call_gives_the_same_bits_and_leaves_the_counters_as_they_were(device) -> None:
    case = matrix(72, 1024, group=32, asymmetric=False, device=device)
    x = rows_of(9, 1024, device)
    assert FEW_SPLIT.splits(rows=9, outputs=72, tiles=4) == 2
    shared = SharedBuffers(device)
    first = int4_product_with(x, case.tiles, FEW_SPLIT, shared=shared)
    shared.split_sums.parts.fill_(torch.nan)  # what an earlier launch left is not read
    assert torch.equal(first, int4_product_with(x, case.tiles, FEW_SPLIT, shared=shared))
    assert not shared.split_sums.arrivals.any()


def test_a_broken_row_breaks_no_other(device) -> None:
    case = matrix(40, 512, group=32, asymmetric=False, device=device)
    x = rows_of(5, 512, device)
    sound = x.clone()
    x[2, 7] = torch.nan
    for tile in (FEW_SPLIT, MANY):
        output = multiplied(x, case.tiles, tile)
        assert output[2].isnan().all()
        others = [0, 1, 3, 4]
        assert torch.equal(output[others], multiplied(sound, case.tiles, tile)[others])


@pytest.mark.parametrize("tile", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize(("asymmetric", "half"), [(False, False), (True, False), (False, True)])
def test_experts_multiply_their_own_rows(asymmetric, half, tile, device) -> None:
    cases = [matrix(40, 352, group=32, asymmetric=asymmetric, half=half, device=device) for _ in range(4)]
    zeros = torch.stack([case.zero_point for case in cases]) if asymmetric else None
    stacked = repack_int4(torch.stack([c.packed for c in cases]), torch.stack([c.scale for c in cases]), zeros)
    assert torch.equal(int4_elements(stacked, torch.float64), torch.stack([case.exact for case in cases]))
    bounds = [0, 3, 3, 23, 24]  # one expert without rows, one with more than a block
    x = rows_of(30, 352, device)
    ends = torch.tensor(bounds[1:], dtype=torch.int32, device=device)
    actual, plain = int4_grouped_with(x, stacked, ends, tile), PlainInt4().grouped(x, stacked, ends)
    for expert, case in enumerate(cases):
        span = slice(bounds[expert], bounds[expert + 1])
        if span.start < span.stop:
            assert error(actual[span], x[span], case.exact) < 8e-3
            assert error(plain[span], x[span], case.exact) < 8e-3


def doubled(values: Tensor) -> np.ndarray:
    return values.bfloat16().repeat_interleave(2).view(torch.int16).numpy().copy().view(np.uint32)


def every_half(generator: np.random.Generator) -> Tensor:
    """1,000 finite numbers of float16, of all sizes and both signs."""
    bits = generator.integers(0, 0x7C00, 1000) | generator.integers(0, 2, 1000) << 15
    return torch.from_numpy(bits.astype(np.uint16).view(np.float16))


def in_two(scale: Tensor) -> tuple[Tensor, Tensor]:
    """float16 -> bfloat16, and what that leaves."""
    near = scale.bfloat16()
    rest = (scale.float() - near.float()).bfloat16()
    assert torch.equal(near.double() + rest.double(), scale.double())
    return near, rest


def test_the_assembly_unpacks_as_the_interpreted_kernel_does() -> None:
    generator = np.random.default_rng(seed := secrets.randbits(32))
    pair = [generator.integers(0, 2**32, 1000, dtype=np.uint32) for _ in range(2)]
    nibbles = [torch.from_numpy(np.stack([word >> np.uint32(4 * j) & 15 for word in pair], -1)) for j in range(8)]
    for plane, expected in zip(ptx.run(PAIRS.value, pair, outputs=8), nibbles, strict=True):
        assert torch.equal(ptx.halves(plane), 128.0 + expected.double()), seed
    scales = [torch.from_numpy(generator.random(1000) * 0.01).bfloat16() for _ in range(8)]
    fine = [every_half(generator) for _ in range(8)]
    zeros = [torch.from_numpy(generator.integers(0, 16, 1000)) for _ in range(8)]

    inputs = [*pair, *map(doubled, scales), *(doubled(-128.0 - zero) for zero in zeros)]
    for plane, values, scale, zero in zip(
        ptx.run(SCALED.value, inputs, outputs=8), nibbles, scales, zeros, strict=True
    ):
        expected = ((values.double() - zero[:, None]) * scale.double()[:, None]).to(torch.bfloat16)
        assert torch.equal(ptx.halves(plane), expected.double()), seed
    near, rests = zip(*map(in_two, fine), strict=True)
    inputs = [*pair, *map(doubled, near), *(doubled(-128.0 - zero) for zero in zeros), *map(doubled, rests)]
    for plane, values, scale, zero in zip(
        ptx.run(FINELY_SCALED.value, inputs, outputs=8), nibbles, fine, zeros, strict=True
    ):
        expected = ((values.double() - zero[:, None]) * scale.double()[:, None]).to(torch.bfloat16)
        assert torch.equal(ptx.halves(plane), expected.double()), seed


def test_the_assembly_for_hopper_rounds_elements_once() -> None:
    """That of `int4_elements_sm90.cuh`, over scales of float16."""
    source = source_file("int4_elements_sm90.cuh").read_text()
    (body,) = re.findall(r"u32 element_pair\(.*?#if HALF_SCALES\s+asm\((.*?):", source, re.DOTALL)
    assembly = "".join(re.findall(r'"(.*?)"', body)).replace("\\n", "\n").replace("%", "$")
    (excess,) = (int(value, 16) for value in re.findall(r"EXCESS = (0x\w+);", source))
    scale = every_half(np.random.default_rng(seed := secrets.randbits(32)))
    near, rest = map(doubled, in_two(scale))
    for nibble in range(16):
        elements = doubled(torch.full((1000,), 128.0 + nibble))
        (found,) = ptx.run(assembly, [elements, near, rest, np.full(1000, excess, np.uint32)], outputs=1)
        expected = ((nibble - 8) * scale.double()).to(torch.bfloat16).double()
        assert torch.equal(ptx.halves(found), expected[:, None].expand(-1, 2)), seed


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("fmt", ["int4", "fp8"])
def test_parts_of_split_sums_fit_the_buffer_that_sizing_counts(fmt, capability) -> None:
    for tile in tiles_of(fmt, capability=capability).values():
        assert tile.programs <= MOST_COUNTERS
        assert tile.programs * tile.outputs * tile.rows * 4 + MOST_COUNTERS * 4 <= SPLIT_SUM_BYTES
        for rows, outputs, tiles in ((1, 64, 1), (1, 5376, 84), (64, 43008, 21), (1000, 5376, 21), (16, 256, 10)):
            splits = tile.splits(rows=rows, outputs=outputs, tiles=tiles)
            blocks = -(-rows // tile.rows) * -(-outputs // tile.outputs)
            assert 1 <= splits <= max(1, tiles // 2)
            assert splits == 1 or splits * blocks <= tile.programs
    assert linear_tile(fmt, 1, capability=capability).few
    assert not linear_tile(fmt, 5000, capability=capability).few
    assert grouped_tile(fmt, 64, 128, capability).few
    with pytest.raises(ValueError, match=r"no kernels for compute capability 7\.5"):
        tiles_of(fmt, capability=75)


@pytest.mark.parametrize(
    ("scale", "zero_point", "message"),
    [
        ((80, 5), None, r"scales \[80, 5\] do not fit INT4 weights of 80 rows and 512 inputs"),
        ((79, 16), None, r"scales \[79, 16\]"),
        ((80, 32), None, "groups of 16 inputs: the kernels take 32, 64, 128, 256"),
        ((80, 1), None, "groups of 512 inputs"),
        ((80, 16), (80, 16), r"zero points \[80, 16\] do not fit"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(scale, zero_point, message, device) -> None:
    packed = torch.zeros((80, 64), dtype=torch.int32, device=device)
    zeros = None if zero_point is None else torch.zeros(zero_point, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=message):
        repack_int4(packed, torch.ones(scale, dtype=torch.bfloat16, device=device), zeros)
