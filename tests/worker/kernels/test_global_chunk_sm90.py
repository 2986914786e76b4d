"""Chunk attention of global layers on Hopper against float64 attention, at the head dim that it serves."""

from __future__ import annotations

import pytest
import torch
from attention_cases import (
    Chunk,
    chunk_step,
    derived_keys,
    folded,
    frequencies,
    hopper_kernels,
    key_weight,
    layout,
    pages_of,
)
from hopper import ON_HOPPER
from paged_case import PagedCase, relative_error
from torch import Tensor

from modelserve.sizing.backends.table import Operation
from modelserve_worker.kernels.attention import triton_launches as launches
from modelserve_worker.kernels.step import Step

WIDTH, PAIRS = 512, 64

pytestmark = list(ON_HOPPER)


def attended(case: PagedCase, q: Tensor, weight: Tensor | None, step: Step) -> Tensor:
    """The kernel's output; scratch and output begin as NaN."""
    rows = layout(case)
    kernels = hopper_kernels(rows, Operation.CHUNK_ATTENTION, query_heads=q.shape[1])
    assert step.chunks is not None
    keys = step.passes[0].most_pages * case.page_tokens
    words = keys * launches.scratch_per_key(rows, pairs=PAIRS)
    scratch = torch.full((words,), torch.nan, dtype=q.dtype, device="cuda")
    output = torch.full_like(q, torch.nan)
    kernels.chunk(
        folded(q, weight, PAIRS), output, step, pages=pages_of(case),
        key_weight=weight, scratch=scratch, inverse_frequencies=frequencies(case), pairs=PAIRS,
    )  # fmt: skip
    return output


@pytest.mark.parametrize("v_only", [True, False])
@pytest.mark.parametrize("fmt", ["none", "int8", "fp8_e4m3"])
@pytest.mark.parametrize(
    ("heads", "group", "contexts", "chunks"),
    [
        (1, 8, [8], [Chunk(0, 0, 8)]),
        (2, 8, [200], [Chunk(0, 0, 200)]),
        # Unequal chunks, one of a single row, starts inside a page and at its beginning; rows past the end are NaN.
        (4, 8, [1000, 70, 64, 3000], [Chunk(3, 2800, 200), Chunk(1, 0, 70), Chunk(0, 999, 1), Chunk(2, 10, 54)]),
        (1, 16, [1300, 257], [Chunk(0, 1001, 299), Chunk(1, 0, 257)]),
        (2, 4, [1300, 290], [Chunk(0, 1024, 276), Chunk(1, 127, 163)]),
        (1, 8, [5000], [Chunk(0, 4000, 1000)]),
    ],
)
def test_chunks_equal_float64_attention_and_repeat_bit_for_bit(heads, group, contexts, chunks, fmt, v_only) -> None:
    case = PagedCase("global", heads, WIDTH, fmt, v_only, contexts, device="cuda", pairs=PAIRS)
    step = chunk_step(case, chunks, group=group, block_rows=128)
    q = case.random(sum(c.length for c in chunks), heads * group, WIDTH, scale=2.0)
    weight = key_weight(case) if v_only else None
    output = attended(case, q, weight, step)
    assert torch.equal(output, attended(case, q, weight, step))
    row = 0
    for chunk in chunks:
        span = slice(row, row + chunk.length)
        at = torch.arange(chunk.start, chunk.start + chunk.length, device="cuda")
        keys = derived_keys(case, chunk.slot, weight, PAIRS) if weight is not None else None
        expected = case.attention(q[span], chunk.slot, at, keys)
        assert relative_error(output[span], expected) < 1e-2
        row += chunk.length


def test_a_captured_launch_attends_over_the_pages_that_the_table_names_then() -> None:
    """As a step's graph: the tables and the pages change under it, and blocks beyond the work write nothing."""
    case = PagedCase("global", 2, WIDTH, "none", True, [700, 700], device="cuda", pairs=PAIRS)
    step = chunk_step(case, [Chunk(0, 500, 200)], group=8, block_rows=128)
    q, weight = case.random(300, 16, WIDTH, scale=2.0), key_weight(case)  # 100 rows of padding
    first = attended(case, q, weight, step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attended(case, q, weight, step)
    case.table.copy_(case.table.flip(0))
    graph.replay()
    torch.cuda.synchronize()
    at = torch.arange(500, 700, device="cuda")
    expected = case.attention(q[:200], 1, at, derived_keys(case, 1, weight, PAIRS))
    assert relative_error(captured[:200], expected) < 1e-2
    assert not torch.equal(captured[:200], first[:200])
    assert captured[200:].isnan().all()
