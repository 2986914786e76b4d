"""Sliding chunks whose rows see what is behind them, against float64 attention and the kernel of text."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import numpy as np
import pytest
import torch
from attention_cases import Chunk, chunk_step, pages_of
from paged_case import PagedCase, relative_error
from torch import Tensor

from modelserve.sizing.backends.table import AttentionTile
from modelserve_worker.kernels.attention import triton_launches as launches
from modelserve_worker.kernels.attention.arguments import StepRows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COMPUTE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
LIMIT = 1e-2 if DEVICE == "cuda" else 1e-5  # float32 through the interpreter: the arithmetic itself is right


@pytest.fixture(autouse=True)
def padding_sees_nothing() -> Iterator[None]:
    """Rows of a block behind the end of its chunk are 0 / 0, and stored nowhere."""
    with np.errstate(invalid="ignore"):
        yield


def spans_of(chunk: Chunk, random: Random) -> list[int]:
    """The last positions that a chunk's rows see, with spans of any length at any place, also right at its ends."""
    last, at = list(range(chunk.start, chunk.start + chunk.length)), 0
    while at < chunk.length:
        rows = min(random.choice([1, 3, 20, 90]), chunk.length - at)
        if random.random() < 0.6:
            last[at : at + rows] = [chunk.start + at + rows - 1] * rows
        at += rows
    return last


class Attended:
    """Chunks over pages of earlier rows and buffers of the step's, through the launches."""

    def __init__(self, chunks: list[Chunk], *, fmt: str, window: int, group: int, seed: int, width: int = 64) -> None:
        old = [0] * (1 + max(c.slot for c in chunks))
        for chunk in chunks:
            old[chunk.slot] = chunk.start
        self.case = case = PagedCase(
            "sliding", 2, width, fmt, v_only=False, contexts=old, window=window, compute=COMPUTE, device=DEVICE,
            seed=seed,
        )  # fmt: skip
        self.chunks, self.group, tokens = chunks, group, sum(c.length for c in chunks)
        k, v = case.random(tokens, case.heads, width, scale=width**-0.5), case.random(tokens, case.heads, width)
        (step_k, k_scale), (step_v, v_scale) = case.encode(k), case.encode(v)
        self.decoded = case.decode(step_k, k_scale), case.decode(step_v, v_scale)
        empty = torch.zeros(1, dtype=torch.float16, device=DEVICE)
        raw = [t.view(torch.uint8) if fmt.startswith("fp8") else t for t in (step_k, step_v)]
        self.fresh = StepRows(*raw, empty if k_scale is None else k_scale, empty if v_scale is None else v_scale)
        self.q = case.random(tokens, case.heads * group, width)

    def output(self, last_keys: list[int] | None) -> Tensor:
        step = chunk_step(self.case, self.chunks, group=self.group, block_rows=32, last_keys=last_keys)
        output = torch.full_like(self.q, torch.nan)
        launches.chunk_attention(
            self.q, output, step, pages=pages_of(self.case),
            tile=AttentionTile(32, 32, 4, 2), fresh=self.fresh,
        )  # fmt: skip
        return output

    def check(self, output: Tensor, last_keys: list[int]) -> None:
        row, case = 0, self.case
        for chunk in self.chunks:
            span = slice(row, row + chunk.length)
            for rows, own in zip((case.k, case.v), self.decoded, strict=True):
                rows[chunk.slot] = torch.cat((rows[chunk.slot], own[span]))
            at = torch.arange(chunk.start, chunk.start + chunk.length, device=DEVICE)
            last = torch.tensor(last_keys[span], device=DEVICE)
            assert relative_error(output[span], case.attention(self.q[span], chunk.slot, at, last=last)) < LIMIT
            row += chunk.length


@pytest.mark.parametrize("fmt", ["none", "int8", "fp8_e5m2"])
@pytest.mark.parametrize("window", [9, 70])
def test_chunks_with_spans_equal_float64_attention(fmt: str, window: int) -> None:
    random = Random(f"{fmt} {window}")
    lengths = [random.randint(40, 70), random.randint(1, 5)]
    chunks = [Chunk(slot, random.choice([0, 33, 90]), length) for slot, length in enumerate(lengths)]
    attended = Attended(chunks, fmt=fmt, window=window, group=random.choice([1, 2, 4]), seed=random.randrange(1 << 20))
    last = [position for chunk in chunks for position in spans_of(chunk, random)]
    attended.check(attended.output(last), last)


@pytest.mark.parametrize("seed", range(3))
def test_any_spans_at_any_place(seed: int) -> None:
    random = Random(seed)
    chunks = [Chunk(slot, random.randrange(200), random.randint(1, 70)) for slot in range(random.randint(1, 2))]
    attended = Attended(chunks, fmt="none", window=random.choice([1, 16, 33, 100]), group=2, seed=seed)
    last = [position for chunk in chunks for position in spans_of(chunk, random)]
    attended.check(attended.output(last), last)


def test_rows_that_see_no_further_have_the_bits_of_text() -> None:
    """In a step with a span the rows of other chunks, and those whose block has none of it."""
    chunks = [Chunk(0, 40, 20), Chunk(1, 7, 40)]
    attended = Attended(chunks, fmt="none", window=33, group=2, seed=9)
    text = attended.output(None)
    output = attended.output([*range(40, 60), *range(7, 27), *[41] * 15, *range(42, 47)])
    assert torch.equal(output[:40], text[:40]), "the other chunk, and rows before the span"
    assert not torch.equal(output[40:54], text[40:54])


def test_text_has_no_last_keys_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel for both, and None, by which text's is compiled as if there were no spans."""
    launched = []
    monkeypatch.setattr(
        launches, "launch",
        lambda kernel, grid, *arguments, **constants: launched.append((kernel.__name__, arguments[-1] is None)),
    )  # fmt: skip
    attended = Attended([Chunk(0, 40, 60)], fmt="none", window=33, group=2, seed=9)
    attended.output(None)
    attended.output(list(range(40, 100)))
    assert launched == [("sliding_chunk", True), ("sliding_chunk", False)]
