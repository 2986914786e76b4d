"""Sliding rows of 8 bits, decoded for kernels that read none: those of pages before each chunk, and the step's."""

from __future__ import annotations

import pytest
import torch
from attention_cases import Chunk, chunk_step, layout, pages_of
from paged_case import PagedCase

from modelserve_worker.kernels.attention.arguments import StepRows, element_dtype
from modelserve_worker.kernels.attention.triton.expand_keys_triton import expand_window

HEADS, WIDTH, WINDOW, DECODES = 2, 64, 100, 3
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("fmt", ["int8", "fp8_e4m3", "fp8_e5m2"])
def test_each_chunk_has_its_window_before_its_own_rows_and_nothing_else_is_written(fmt: str) -> None:
    old, chunks = [130, 33, 0, 99], [Chunk(0, 130, 70), Chunk(3, 99, 5), Chunk(2, 0, 40), Chunk(1, 33, 1)]
    case = PagedCase("sliding", HEADS, WIDTH, fmt, False, old, WINDOW, device=DEVICE, seed=3)
    rows, tokens = layout(case), DECODES + sum(chunk.length for chunk in chunks)
    step = chunk_step(case, chunks, group=2, block_rows=128, size=8).chunks
    assert step is not None
    step.rows[: len(chunks)] += DECODES
    step.starts[len(chunks) :] = 500  # of an earlier step
    planes = [case.random(tokens, HEADS, WIDTH) for _ in range(2)]
    encoded = [case.encode(plane) for plane in planes]
    stored = [values.view(element_dtype(rows)) for values, _ in encoded]
    unscaled = torch.zeros(1, 1, dtype=torch.float16, device=DEVICE)
    scales = [unscaled if scale is None else scale for _, scale in encoded]
    keys = tokens + len(chunks) * (WINDOW - 1)
    dense = [torch.full((keys, HEADS, WIDTH), 7.0, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
    programs = max(rows.entries, -(-tokens // rows.page_tokens))
    expand_window[(programs, HEADS, 2)](
        *dense, StepRows(*stored, *scales), step.columns, step.sliding_blocks, pages_of(case).elements, CHUNKS=8,
        COLUMNS=32,
    )  # fmt: skip
    row = DECODES
    for index, chunk in enumerate(chunks):
        own, older = row + (index + 1) * (WINDOW - 1), min(chunk.start, WINDOW - 1)
        for plane, cached, (values, scale) in zip(dense, (case.k, case.v), encoded, strict=True):
            fresh = case.decode(values, scale)[row : row + chunk.length]
            expected = torch.cat((cached[chunk.slot][chunk.start - older : chunk.start], fresh))
            assert torch.equal(plane[own - older : own + chunk.length], expected.to(torch.bfloat16))
            plane[own - older : own + chunk.length] = 7.0
        row += chunk.length
    assert all((plane == 7.0).all() for plane in dense)
