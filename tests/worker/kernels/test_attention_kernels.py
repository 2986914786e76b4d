"""Attention kernels against float64 attention over the same rows: formats, layouts, positions, unequal lengths."""

from __future__ import annotations

import pytest
import torch
from attention_cases import (
    Chunk,
    chunk_step,
    decode_step,
    derived_keys,
    few_rows_step,
    folded,
    frequencies,
    key_weight,
    layout,
    pages_of,
    rotation,
)
from paged_case import PagedCase, relative_error

from modelserve.sizing.backends.table import AttentionTile
from modelserve_worker.kernels.attention import triton_launches as launches
from modelserve_worker.kernels.attention.arguments import StepRows

pytestmark = pytest.mark.drawn

FORMATS = ["none", "int8", "fp8_e4m3", "fp8_e5m2"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COMPUTE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
LIMIT = 1e-2 if DEVICE == "cuda" else 1e-5  # float32 through the interpreter: the arithmetic itself is right
PAIRS = 32 if DEVICE == "cuda" else 16  # 8-bit pairs are multiplied by halves, which the matrix units take from 16 on


def case_of(
    kind: str, *, fmt: str, v_only: bool, contexts: list[int], heads: int = 2, seed: int = 0, older: int = 0
) -> PagedCase:
    return PagedCase(
        kind,
        heads,
        8 * PAIRS if v_only else 64,
        fmt,
        v_only,
        contexts,
        window=0 if kind == "global" else 70,
        compute=COMPUTE,
        device=DEVICE,
        pairs=PAIRS,
        seed=seed,
        older=older,
    )


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits enough that a request has several, and few empty programs for the interpreter."""
    monkeypatch.setattr(launches, "most_splits", lambda rows: 3)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(
    ("kind", "v_only", "group"),
    [("global", False, 4), ("global", True, 4), ("sliding", False, 1), ("sliding", False, 4)],
)
def test_decode_equals_float64_attention(kind, v_only, group, fmt) -> None:
    contexts = [1, 64, 65, 280, 71]
    case = case_of(kind, fmt=fmt, v_only=v_only, contexts=contexts)
    slots = [4, 0, 2, -1, 1, 3]
    step = decode_step(case, slots)
    q = case.random(len(slots), case.heads * group, case.width)
    weight, turning = (key_weight(case), rotation(case, 32, PAIRS)) if v_only else (None, None)
    output = torch.full_like(q, torch.nan)
    workspace = torch.full((1 << 20,), torch.nan, device=DEVICE)
    launches.decode_attention(
        folded(q, weight, PAIRS), output, step, pages=pages_of(case), workspace=workspace,
        tile=AttentionTile(16, 32, 4, 2), key_weight=weight, turns=turning,
    )  # fmt: skip
    for row, slot in enumerate(slots):
        if slot < 0:
            assert output[row].isnan().all(), "a padded row is left alone"
            continue
        keys = derived_keys(case, slot, weight, PAIRS) if v_only else None
        at = torch.tensor([contexts[slot] - 1], device=DEVICE)
        assert relative_error(output[row : row + 1], case.attention(q[row : row + 1], slot, at, keys)) < LIMIT


@pytest.mark.parametrize("fmt", ["none", "int8"])
@pytest.mark.parametrize(
    ("kind", "v_only", "group", "queries"),
    [("global", False, 4, 64), ("global", True, 4, 8), ("sliding", False, 2, 64)],
)
def test_segments_of_a_few_rows_equal_float64_attention(kind, v_only, group, queries, fmt) -> None:
    """Up to five rows of a request over one reading of its keys: at the start of a context, across pages and splits,
    and where the first row sees a page that the last one does not. Where
    so many queries do not fit into a program, they are in several. The workspace has room for the step's rows, and none
    for as many segments of most rows."""
    contexts, lengths, most = [5, 66, 290, 130, 71], [5, 3, 4, 1, 5, 1], 5
    case = case_of(kind, fmt=fmt, v_only=v_only, contexts=contexts, older=most - 1)
    slots = [2, 0, 1, -1, 4, 3]
    step, rows = few_rows_step(case, slots, lengths, most_rows=most), layout(case)
    q = case.random(sum(lengths), case.heads * group, case.width)
    weight, turning = (key_weight(case), rotation(case, 32, PAIRS)) if v_only else (None, None)
    output = torch.full_like(q, torch.nan)
    words = launches.decode_workspace(rows, query_heads=case.heads * group)
    workspace = torch.full((sum(lengths) * words,), torch.nan, device=DEVICE)
    launches.decode_attention(
        folded(q, weight, PAIRS), output, step, pages=pages_of(case), workspace=workspace,
        tile=AttentionTile(16, 32, 4, 2, queries=queries), key_weight=weight, turns=turning,
    )  # fmt: skip
    first = 0
    for slot, length in zip(slots, lengths, strict=True):
        span, first = slice(first, first + length), first + length
        if slot < 0:
            assert output[span].isnan().all(), "a padded row is left alone"
            continue
        keys = derived_keys(case, slot, weight, PAIRS) if v_only else None
        at = torch.arange(contexts[slot] - length, contexts[slot], device=DEVICE)
        assert relative_error(output[span], case.attention(q[span], slot, at, keys)) < LIMIT


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("v_only", [False, True])
def test_global_chunks_equal_float64_attention(v_only, fmt) -> None:
    case = case_of("global", fmt=fmt, v_only=v_only, contexts=[70, 40, 200], seed=1)
    chunks = [Chunk(2, 130, 70), Chunk(1, 0, 40), Chunk(0, 69, 1)]  # rows are in the pages already
    step = chunk_step(case, chunks, group=4, block_rows=64)
    q = case.random(111, case.heads * 4, case.width)
    weight = key_weight(case) if v_only else None
    rows = layout(case)
    scratch = torch.full((512 * launches.scratch_per_key(rows, pairs=PAIRS),), torch.nan, dtype=q.dtype, device=DEVICE)
    output = torch.full_like(q, torch.nan)
    launches.chunk_attention(
        folded(q, weight, PAIRS), output, step, pages=pages_of(case),
        tile=AttentionTile(64, 32, 4, 2),
        key_weight=weight, scratch=scratch, inverse_frequencies=frequencies(case), pairs=PAIRS,
    )  # fmt: skip
    row = 0
    for chunk in chunks:
        span = slice(row, row + chunk.length)
        at = torch.arange(chunk.start, chunk.start + chunk.length, device=DEVICE)
        keys = derived_keys(case, chunk.slot, weight, PAIRS) if v_only else None
        assert relative_error(output[span], case.attention(q[span], chunk.slot, at, keys)) < LIMIT
        row += chunk.length


@pytest.mark.parametrize("fmt", FORMATS)
def test_sliding_chunks_read_old_pages_and_their_own_rows(fmt) -> None:
    """The pages hold only what earlier steps wrote; the chunk's rows are in the step buffers, encoded alike."""
    old, chunks = [130, 33, 0, 69], [Chunk(0, 130, 150), Chunk(3, 69, 5), Chunk(2, 0, 90), Chunk(1, 33, 1)]
    case = case_of("sliding", fmt=fmt, v_only=False, contexts=old, seed=2)
    tokens = sum(c.length for c in chunks)
    k, v = case.random(tokens, case.heads, case.width, scale=0.1), case.random(tokens, case.heads, case.width)
    (step_k, k_scale), (step_v, v_scale) = case.encode(k), case.encode(v)
    empty = torch.zeros(1, dtype=torch.float16, device=DEVICE)
    raw = [t.view(torch.uint8) if t.dtype.itemsize == 1 and fmt.startswith("fp8") else t for t in (step_k, step_v)]
    fresh = StepRows(raw[0], raw[1], empty if k_scale is None else k_scale, empty if v_scale is None else v_scale)
    step = chunk_step(case, chunks, group=2, block_rows=64)
    q = case.random(tokens, case.heads * 2, case.width)
    output = torch.full_like(q, torch.nan)
    launches.chunk_attention(q, output, step, pages=pages_of(case), tile=AttentionTile(64, 64, 4, 2), fresh=fresh)
    row = 0
    for chunk in chunks:
        span = slice(row, row + chunk.length)
        case.k[chunk.slot] = torch.cat((case.k[chunk.slot], case.decode(step_k, k_scale)[span]))
        case.v[chunk.slot] = torch.cat((case.v[chunk.slot], case.decode(step_v, v_scale)[span]))
        at = torch.arange(chunk.start, chunk.start + chunk.length, device=DEVICE)
        assert relative_error(output[span], case.attention(q[span], chunk.slot, at)) < LIMIT
        row += chunk.length
