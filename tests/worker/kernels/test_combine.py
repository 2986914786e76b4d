"""The kernel that merges the splits of decodes, against float64."""

from __future__ import annotations

import pytest
import torch
from attention_cases import ints

from modelserve_worker.kernels.attention.arguments import Splits
from modelserve_worker.kernels.attention.triton import decode_attention_triton as kernels
from modelserve_worker.kernels.compiling.bundles import constant
from modelserve_worker.kernels.compiling.dependent_launch import launch
from modelserve_worker.kernels.step import SegmentColumns

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, GROUP, WIDTH, PAGE, MOST = 2, 2, 32, 64, 16
CONTEXTS = [1, 64, 65, 16 * 64, 700, 1500, 40]  # 1 to 16 pages, and 24, of which two are a split then


@pytest.mark.parametrize("together", [4, 16])
@pytest.mark.parametrize("whole", [True, False])
def test_splits_of_every_number_are_merged_and_whole_rows_left_alone(together: int, whole: bool) -> None:
    """All splits of a row at once, or some at a time; the third row is padding."""
    torch.manual_seed(together)
    positions = [*(context - 1 for context in CONTEXTS[:2]), -1, *(context - 1 for context in CONTEXTS[2:])]
    rows, shape = len(positions), (len(positions), MOST, HEADS, GROUP)
    partial = torch.randn(*shape, WIDTH, device=DEVICE)
    maxima, sums = torch.randn(shape, device=DEVICE) * 20, torch.rand(shape, device=DEVICE) + 1
    output = torch.full((rows, HEADS * GROUP, WIDTH), 7.0, device=DEVICE)
    splits = Splits(partial, maxima, sums, *map(constant, (MOST, HEADS, GROUP, WIDTH)))
    slots, lengths, firsts = ints([0] * rows, DEVICE), ints([1] * rows, DEVICE), ints(range(rows), DEVICE)
    segments = SegmentColumns(slots, ints(positions, DEVICE), lengths, firsts)
    launch(
        kernels.combine, (rows, HEADS * GROUP, 1), splits, segments, output, 1,
        PAIRS=0, PAGE=PAGE, WINDOW=0, TOGETHER=together, ROWS=1, COLUMNS=WIDTH, WHOLE=whole, num_warps=1,
    )  # fmt: skip
    for row, position in enumerate(positions):
        pages = position // PAGE + 1
        count = -(-pages // max(1, -(-pages // MOST)))
        if position < 0 or (whole and count == 1):
            assert (output[row] == 7.0).all()
            continue
        weights = (maxima[row, :count] - maxima[row, :count].amax(0)).double().exp2()
        expected = (partial[row, :count] * weights[..., None]).sum(0) / (sums[row, :count] * weights).sum(0)[..., None]
        assert torch.allclose(output[row].double(), expected.flatten(0, 1), rtol=1e-5, atol=1e-6)
