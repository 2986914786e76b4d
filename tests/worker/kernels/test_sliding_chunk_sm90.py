"""Chunk attention of sliding layers on Hopper against float64 attention, at the head dim that it serves."""

from __future__ import annotations

import time

import pytest
import torch
from attention_cases import Chunk, chunk_step, hopper_kernels, layout, pages_of
from hopper import ON_HOPPER
from paged_case import PagedCase, relative_error
from torch import Tensor

from modelserve.sizing.backends.table import Operation
from modelserve_worker.kernels.attention.arguments import StepRows, element_dtype

WIDTH = 256

pytestmark = list(ON_HOPPER)


class Step:
    """Chunks after contexts of which pages hold the window alone; rows that no chunk wrote are NaN everywhere."""

    def __init__(
        self, heads: int, group: int, window: int, chunks: list[Chunk], *, fmt: str = "none", decodes: int = 0,
        seed: int = 0,
    ):  # fmt: skip
        contexts = [1] * (1 + max(chunk.slot for chunk in chunks))
        for chunk in chunks:
            contexts[chunk.slot] = chunk.start
        self.case = case = PagedCase("sliding", heads, WIDTH, fmt, False, contexts, window, device="cuda", seed=seed)
        self.chunks, self.group, self.decodes = chunks, group, decodes
        self.rows, tokens = layout(case), sum(chunk.length for chunk in chunks)
        self.kernels = hopper_kernels(self.rows, Operation.CHUNK_ATTENTION, query_heads=heads * group)
        self.k, k, k_scale = self.encoded(tokens, WIDTH**-0.5)
        self.v, v, v_scale = self.encoded(tokens, 1.0)
        self.fresh = StepRows(k, v, k_scale, v_scale)
        words = 0 if fmt == "none" else 2 * (len(k) + len(chunks) * (window - 1)) * heads * WIDTH
        self.scratch = torch.empty(words, dtype=torch.bfloat16, device="cuda")
        self.q = case.random(len(self.fresh[0]), heads * group, WIDTH, scale=2.0)
        inputs = chunk_step(case, chunks, group=group, block_rows=self.kernels.chunk_rows)
        assert inputs.chunks is not None
        inputs.chunks.rows.add_(decodes)
        self.inputs = inputs

    def encoded(self, tokens: int, size: float) -> tuple[Tensor, Tensor, Tensor]:
        """Rows as decoded (float64), and in a step buffer with NaN around them, with their scales."""
        case, dtype = self.case, element_dtype(self.rows)
        shape = case.heads, WIDTH
        values, scale = case.encode(case.random(tokens, *shape, scale=size))
        buffer = torch.full((self.decodes + tokens + 3, *shape), -1, dtype=torch.int8, device="cuda")
        buffer = buffer.repeat_interleave(dtype.itemsize, -1).view(dtype)
        span = slice(self.decodes, self.decodes + tokens)
        buffer[span] = values.view(dtype)
        scales = torch.full((len(buffer), case.heads), torch.nan, dtype=torch.float16, device="cuda")
        if scale is not None:
            scales[span] = scale
        return case.decode(values, scale), buffer, scales

    def attended(self) -> Tensor:
        output = torch.full_like(self.q, torch.nan)
        self.scratch.fill_(torch.nan)
        self.kernels.chunk(
            self.q, output, self.inputs, pages=pages_of(self.case), fresh=self.fresh, scratch=self.scratch
        )
        return output

    def check(self, output: Tensor) -> None:
        """Rows of chunks equal float64 attention, and others are as they were."""
        row = self.decodes
        assert output[:row].isnan().all()
        for chunk in self.chunks:
            span, own = slice(row, row + chunk.length), slice(row - self.decodes, row - self.decodes + chunk.length)
            old_k, old_v = self.case.k[chunk.slot], self.case.v[chunk.slot]
            self.case.k[chunk.slot] = torch.cat((old_k, self.k[own]))
            self.case.v[chunk.slot] = torch.cat((old_v, self.v[own]))
            at = torch.arange(chunk.start, chunk.start + chunk.length, device="cuda")
            expected = self.case.attention(self.q[span], chunk.slot, at)
            self.case.k[chunk.slot], self.case.v[chunk.slot] = old_k, old_v
            assert relative_error(output[span], expected) < 1e-2
            row += chunk.length
        assert output[row:].isnan().all()


@pytest.mark.parametrize("fmt", ["none", "int8", "fp8_e4m3"])
@pytest.mark.parametrize(
    ("heads", "group", "window", "chunks"),
    [
        (1, 8, 512, [Chunk(0, 0, 8)]),
        (1, 2, 1024, [Chunk(0, 5, 3)]),
        (2, 2, 1024, [Chunk(0, 0, 200)]),
        # 31B, E4B, E2B: pages alone, pages and own rows, own rows alone; starts inside a page and an octet.
        (16, 2, 1024, [Chunk(0, 6144, 2048)]),
        (2, 4, 512, [Chunk(0, 1111, 1300)]),
        (1, 8, 512, [Chunk(0, 700, 900)]),
        # Unequal chunks of several requests, one of a single row, short and long contexts, after rows of decodes.
        (4, 2, 1024, [Chunk(3, 2801, 200), Chunk(1, 0, 70), Chunk(0, 999, 1), Chunk(2, 10, 1500), Chunk(4, 1023, 2)]),
        (2, 4, 512, [Chunk(0, 511, 33), Chunk(1, 512, 31), Chunk(2, 513, 1), Chunk(3, 4095, 65)]),
        (1, 1, 512, [Chunk(0, 600, 300)]),
        (1, 16, 512, [Chunk(0, 600, 300), Chunk(1, 31, 45)]),
        # A window shorter than a tile, of which some tiles hold nothing for most queries.
        (2, 2, 33, [Chunk(0, 100, 150), Chunk(1, 7, 20)]),
    ],
)
def test_chunks_equal_float64_attention_and_repeat_bit_for_bit(heads, group, window, chunks, fmt) -> None:
    step = Step(heads, group, window, chunks, fmt=fmt, decodes=5 if len(chunks) > 1 else 0)
    output = step.attended()
    assert torch.equal(output.nan_to_num(7.0), step.attended().nan_to_num(7.0))
    step.check(output)


@pytest.mark.parametrize("seed", range(12))
def test_chunks_at_random_places_equal_float64_attention(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def drawn(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    heads, group, window = ((2, 2, 1024), (2, 4, 512), (1, 8, 512))[seed % 3]
    chunks = [Chunk(slot, drawn(0, 2500), drawn(1, 900)) for slot in range(drawn(1, 5))]
    fmt = ("none", "none", "int8", "fp8_e5m2")[seed % 4]
    step = Step(heads, group, window, chunks, fmt=fmt, decodes=drawn(0, 9), seed=seed)
    step.check(step.attended())


def test_short_chunks_end_launch_after_launch() -> None:
    """Blocks of a single tile, four to a thread block: a warpgroup may be a block ahead of the other's queries."""
    step = Step(8, 2, 1024, [Chunk(slot, 0, 64) for slot in range(64)])
    step.attended()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [step.attended() for _ in range(20)]
    ended = torch.cuda.Event()
    for _ in range(500):
        graph.replay()
    ended.record()
    limit = time.monotonic() + 60
    while not ended.query():
        assert time.monotonic() < limit, "a thread block waits for what never comes"
        time.sleep(0.01)
    first = outputs[0].nan_to_num(7.0)
    assert all(torch.equal(output.nan_to_num(7.0), first) for output in outputs)
    step.check(outputs[0])


def test_a_captured_launch_attends_over_what_the_step_arrays_say_then() -> None:
    """As a step's graph: pages, tables and chunks change under it, and blocks beyond the work write nothing."""
    step = Step(2, 2, 1024, [Chunk(0, 1500, 300), Chunk(1, 1500, 300)])
    step.attended()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step.attended()
    assert step.inputs.chunks is not None
    step.inputs.chunks.slots.copy_(step.inputs.chunks.slots[:2].flip(0).repeat(32))
    graph.replay()
    torch.cuda.synchronize()
    step.chunks = [Chunk(1, 1500, 300), Chunk(0, 1500, 300)]
    step.check(captured)
