"""Products of many rows with INT4 on Hopper: how they are dealt out and, on a GPU, their results against float64."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hopper import on_hopper
from plain_products import fine_scales, int4_elements, int4_zero_points
from torch.nn import functional

from modelserve.sizing.weights.quantised_tiles import SPLIT_SUM_BYTES, int4_tiles
from modelserve_worker.kernels.products.hopper import linear_int4_sm90
from modelserve_worker.kernels.products.hopper.linear_int4_sm90 import (
    CLUSTER,
    COLUMNS,
    MANY_COLUMNS,
    Division,
    Int4Kernel,
    division,
)
from modelserve_worker.kernels.products.int4_linear import Int4Tiles
from modelserve_worker.kernels.products.linear_tiles import MOST_COUNTERS, SharedBuffers

SHAPES = [(272, 1536), (528, 2112), (3072, 2560), (2560, 10240), (20480, 1024), (43008, 512), (5376, 21504)]
ROWS = (33, 64, 65, 128, 150, 192, 250, 300, 512, 700, 1000, 2500, 8192)
CLUSTERS = 66


def runs(work: Division, cluster: int) -> list[tuple[int, int]]:
    """As `Work.run` has them: blocks [begin, end) of each wave, and of what is left."""
    dealt, blocks = work.waves * work.clusters, work.blocks
    whole = [(wave * work.clusters + cluster) * blocks for wave in range(work.waves)]
    units = (work.items - dealt) * blocks

    def begin(number: int) -> int:
        return dealt * blocks + units * number // work.clusters // work.grain * work.grain

    return [*((first, first + blocks) for first in whole), (begin(cluster), begin(cluster + 1))]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("clusters", [66, 39])
def test_every_block_of_every_tile_is_multiplied_once_and_added_by_one_cluster(shape, split, clusters) -> None:
    outputs, inputs = shape
    for rows in ROWS:
        work = division(rows, outputs, int4_tiles(inputs), split=split, clusters=clusters)
        assert work.columns * (1 if work.parts > 1 else work.slices) >= rows
        assert work.parts * work.blocks >= int4_tiles(inputs)
        multiplied, stored = Counter[int](), Counter[int]()
        for cluster in range(work.clusters):
            for number, (begin, end) in enumerate(runs(work, cluster)):
                multiplied.update(range(begin, end))
                assert end > begin, "whoever adds waits for a run that has something"
                heads = [block for block in range(begin, end) if block % work.blocks == 0]
                stored.update(block // work.blocks for block in heads)
                if begin % work.blocks:
                    assert number == work.waves, "waves are of whole items"
                    assert work.grain == 1
                    assert work.parts == 1
        assert set(multiplied.values()) == {1}
        assert len(multiplied) == work.items * work.blocks
        assert stored == Counter(range(work.items))


def test_partial_sums_of_all_blocks_have_their_place() -> None:
    sums = CLUSTERS * CLUSTER * linear_int4_sm90.OUTPUTS * max(MANY_COLUMNS) * 4
    assert sums <= SPLIT_SUM_BYTES - MOST_COUNTERS * 4
    assert CLUSTERS * CLUSTER <= MOST_COUNTERS


@pytest.mark.parametrize("columns", sorted({*COLUMNS, *MANY_COLUMNS}))
def test_a_cluster_shares_whole_boxes_of_inputs(columns: int) -> None:
    kernel = Int4Kernel(columns, 8, gated=False, split=False)
    inputs, rows, boxes = kernel.x_box
    assert CLUSTER * rows * boxes == columns * kernel.x_boxes
    assert inputs * rows * 2 % 1024 == 0, "the swizzle of a share begins anew"
    assert rows <= 256, "the largest box of the copy engine"


def matrix(outputs: int, inputs: int, group: int, *, half: bool, zeros: bool) -> Int4Tiles:
    tiles = int4_tiles(inputs)
    words = torch.randint(-(2**31), 2**31, (tiles, outputs, 32), device="cuda").to(torch.int32)
    scales = fine_scales(tiles, 256 // group, outputs, size=inputs**-0.5 / 8, device="cuda")
    points = int4_zero_points(tiles, 256 // group, outputs, device="cuda") if zeros else None
    return Int4Tiles(words, scales if half else scales.bfloat16(), points, inputs)


@on_hopper
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("group", "half", "zeros"),
    [
        (32, False, False), (256, False, False), (32, True, False), (128, True, False),
        (32, False, True), (256, True, True), (128, True, True),
    ],
)  # fmt: skip
def test_products_are_near_float64_and_the_same_bits_at_every_launch(
    shape: tuple[int, int], group: int, half: bool, zeros: bool
) -> None:
    outputs, inputs = shape
    int4, shared = matrix(outputs, inputs, group, half=half, zeros=zeros), SharedBuffers(torch.device("cuda"))
    weight = int4_elements(int4, torch.float64)
    for rows in ROWS[:-1]:
        x = torch.randn(rows, inputs, device="cuda").bfloat16()
        expected = x.double() @ weight.t()
        gate, up = (half.bfloat16().double() for half in expected.chunk(2, dim=1))
        opened = functional.gelu(gate, approximate="tanh") * up
        for options, wanted, limit in (
            ({}, expected, 4e-3),
            ({"split": True}, expected, 4e-3),
            *([({"gated": True}, opened, 8e-3)] if not zeros or outputs % 32 == 0 else []),
        ):
            output = linear_int4_sm90.int4_product(x, int4, shared=shared, **options)
            whole = output.double().sum(0) if output.dim() == 3 else output.double()
            # Of each row and each output: what is wrong in one tile is lost in the norm of all.
            for axis in (0, 1):
                assert bool(((whole - wanted).norm(dim=axis) < 5e-2 * wanted.norm(dim=axis)).all())
            assert (whole - wanted).norm() < limit * wanted.norm()
            for _ in range(12):
                assert torch.equal(linear_int4_sm90.int4_product(x, int4, shared=shared, **options), output)
