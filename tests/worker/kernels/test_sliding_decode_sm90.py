"""Decode attention of sliding layers for few rows against float64 attention: on a Hopper GPU, and emulated on a CPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import emulated_kernel
import emulated_sliding_decode
import pytest
import torch
from attention_cases import decode_step, hopper_kernels, layout, padded_decodes, pages_of
from hopper import captured, check_captured_bits, on_hopper, point_decodes
from paged_case import PagedCase, relative_error
from torch import Tensor

from modelserve.sizing.backends.table import Operation
from modelserve_worker.kernels.attention import triton_launches as launches
from modelserve_worker.kernels.attention.arguments import HeadNorms, Rotary, StepRows
from modelserve_worker.kernels.attention.bound_kernels import AttentionKernels
from modelserve_worker.kernels.attention.hopper.sliding_decode_sm90 import DecodeKernel
from modelserve_worker.kernels.products.hopper.linear_rows_sm90 import dense_rows
from modelserve_worker.kernels.step import Step

pytestmark = pytest.mark.drawn

WIDTH, EPS, MOST_ROWS = 256, 1e-6, 4
LIMIT = 5e-3  # weights and results are rounded to bfloat16 once


def case_of(heads: int, window: int, contexts: list[int], *, device: str = "cuda", seed: int = 0) -> PagedCase:
    """Rows outside of the window, and those that nobody wrote, are NaN."""
    return PagedCase("sliding", heads, WIDTH, "none", False, contexts, window, device=device, seed=seed)


def check(case: PagedCase, slots: list[int], q: Tensor, output: Tensor) -> None:
    for row, slot in enumerate(slots):
        if slot < 0:
            assert output[row].isnan().all(), "a padded row is left alone"
            continue
        at = torch.tensor([case.contexts[slot] - 1], device=q.device)
        assert relative_error(output[row : row + 1], case.attention(q[row : row + 1], slot, at)) < LIMIT


@pytest.mark.skipif(emulated_kernel.compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("kernel", "heads", "group", "contexts"),
    [
        # Whole windows from inside of a page and an octet, short ones with blocks of a few keys and of none, one token.
        (DecodeKernel(1024), 1, 2, [1024, 1500, 161, 1]),
        (DecodeKernel(512), 2, 4, [513, 2055, 33]),
        (DecodeKernel(512), 1, 8, [700]),
        (DecodeKernel(1024), 1, 1, [3001]),
        (DecodeKernel(70), 1, 3, [69, 71, 280]),
    ],
)
def test_the_emulated_kernel_equals_float64_attention(
    tmp_path: Path, kernel: DecodeKernel, heads: int, group: int, contexts: list[int]
) -> None:
    """Queries and the rows' own keys, or all keys, are there only when the kernel ahead has ended."""
    case = case_of(heads, kernel.window, contexts, device="cpu", seed=kernel.window)
    slots, decode = padded_decodes(case)
    q = case.random(len(slots), heads * group, WIDTH)
    library = emulated_sliding_decode.library_of(kernel, tmp_path)
    for settled in (True, False):
        launched = dataclasses.replace(decode, settled=settled)
        check(case, slots, q, emulated_sliding_decode.attended(library, kernel, case, q, launched))


def attended(case: PagedCase, q: Tensor, step: Step, *, most: int = 100) -> Tensor:
    """`most`: segments that the kernel of few rows takes."""
    rows, output = layout(case), torch.full_like(q, torch.nan)
    choices = hopper_kernels(rows, Operation.DECODE_ATTENTION, query_heads=q.shape[1]).choices
    few, many = (each for each in choices if each.operation is Operation.DECODE_ATTENTION)
    kernels = AttentionKernels([dataclasses.replace(few, most_rows=most), many])
    kernels.decode(q, output, step, pages=pages_of(case), workspace=torch.empty(0, device="cuda"))
    return output


# 31B, 26B-A4B and 12B, E4B, E2B; what ranks have of them; heads and windows that no model has.
@on_hopper
@pytest.mark.parametrize(
    ("heads", "group", "window"),
    [(16, 2, 1024), (8, 2, 1024), (2, 4, 512), (1, 8, 512), (4, 2, 1024), (1, 4, 512), (3, 1, 512), (2, 5, 70)],
)
@pytest.mark.parametrize("settled", [True, False])
def test_rows_equal_float64_attention_and_repeat_bit_for_bit(heads, group, window, settled) -> None:
    contexts = [1, window, window + 1, 160, 33, 16 * 8, 16 * 8 + 1, window - 1, 4 * window + 77]
    case = case_of(heads, window, contexts, seed=heads * window)
    for slots in ([0], [1], [8], [2, 3], [4, -1, 5], [6, 7, 8, 0], [-1, 2, -1, -1], [3, 8, 1, 6], [-1], [*range(9)]):
        q = case.random(len(slots), heads * group, WIDTH)
        step = decode_step(case, slots)
        assert step.decode is not None
        step = dataclasses.replace(step, decode=dataclasses.replace(step.decode, settled=settled))
        output = attended(case, q, step)
        for _ in range(20):
            assert torch.equal(attended(case, q, step).nan_to_num(7.0), output.nan_to_num(7.0))
        check(case, slots, q, output)


@on_hopper
@pytest.mark.parametrize("seed", range(12))
def test_random_lengths_equal_float64_attention(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    heads, group, window = ((16, 2, 1024), (8, 2, 1024), (2, 4, 512), (1, 8, 512))[seed % 4]
    contexts = torch.randint(1, 3 * window, (24,), generator=generator).tolist()
    case = case_of(heads, window, contexts, seed=seed)
    for first in range(0, len(contexts), MOST_ROWS):
        slots = list(range(first, min(first + MOST_ROWS, len(contexts))))
        q = case.random(len(slots), heads * group, WIDTH, scale=2.0)
        check(case, slots, q, attended(case, q, decode_step(case, slots)))


@on_hopper
def test_a_row_has_the_same_bits_beside_any_other() -> None:
    case = case_of(2, 1024, [1500, 40, 900, 5000])
    q = case.random(1, 4, WIDTH).expand(MOST_ROWS, -1, -1).contiguous()
    alone = attended(case, q[:1], decode_step(case, [0]))
    for slots in ([0, 1], [2, 0], [3, 1, 0, 2]):
        beside = attended(case, q[: len(slots)], decode_step(case, slots))
        assert torch.equal(beside[slots.index(0)], alone[0])


class Layers:
    """Layers of projection, `prepare` and decode attention, all of which store the rows' own keys in the same place.

    So each finds there what the layer before it stored, unless it waits for its own `prepare`.
    """

    def __init__(
        self, heads: int, group: int, window: int, contexts: list[int], *, layers: int, most: int = 100
    ) -> None:
        self.most = most
        self.case = case = case_of(heads, window, contexts)
        self.step = decode_step(case, list(range(len(contexts))))
        width = heads * group * WIDTH
        self.x = case.random(len(contexts), width)
        columns = width + 2 * heads * WIDTH
        self.weights = [case.random(columns, width, scale=width**-0.5) for _ in range(layers)]
        self.q_weight, self.k_weight = (case.random(WIDTH).abs() + 0.5 for _ in range(2))
        angles = torch.rand(len(contexts), WIDTH // 2, device="cuda")
        self.rotation = angles.cos(), angles.sin()

    def run(self) -> list[Tensor]:
        case, outputs, x = self.case, [], self.x
        heads = x.shape[1] // WIDTH
        for weight in self.weights:
            projected = dense_rows(x, weight)
            q = torch.empty(len(x), heads, WIDTH, dtype=torch.bfloat16, device="cuda")
            launches.prepare(
                projected, q, self.step, pages=pages_of(case), norms=HeadNorms(self.q_weight, self.k_weight, EPS),
                rotary=Rotary(*self.rotation), fresh=None,
            )  # fmt: skip
            outputs.append(attended(case, q, self.step, most=self.most))
            x = outputs[-1].flatten(1)
        return outputs


@on_hopper
@pytest.mark.parametrize(
    ("heads", "group", "window", "contexts"),
    [(4, 2, 1024, [1500]), (16, 2, 1024, [8192]), (2, 4, 512, [513, 40, 8192, 600]), (1, 8, 512, [511, 1000])],
)
def test_captured_chains_have_the_bits_of_kernels_that_run_one_after_the_other(heads, group, window, contexts) -> None:
    chain = Layers(heads, group, window, contexts, layers=12)
    check_captured_bits(chain.run, replays=200)


@on_hopper
def test_rows_of_a_chunk_that_this_step_stored_are_read_after_they_are_there() -> None:
    """As a step's last rows over a shared cache: `commit` of the chunk, `prepare` of queries, attention."""
    heads, group, window, context = 2, 4, 512, 700
    case = case_of(heads, window, [context])
    written = case.arena.clone()
    k, v = (torch.zeros(context, heads, WIDTH, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    at = torch.arange(context, device="cuda")
    k[:], v[:] = case.k[0].bfloat16(), case.v[0].bfloat16()
    scales = torch.zeros(1, 1, dtype=torch.float16, device="cuda")
    zeros = torch.zeros_like(at).int()
    kept = torch.where(at >= context - window, 0, -1).int()
    stored = Step(at.int(), zeros[:1] + context, zeros, zeros, kept, None, None)
    step = decode_step(case, [0])
    assert step.decode is not None
    step = dataclasses.replace(step, decode=dataclasses.replace(step.decode, settled=False))
    projected, weight = case.random(1, heads * group * WIDTH), torch.ones(WIDTH, dtype=torch.bfloat16, device="cuda")
    turn = torch.ones(1, WIDTH // 2, device="cuda")
    q = torch.empty(1, heads * group, WIDTH, dtype=torch.bfloat16, device="cuda")
    pages, norms = pages_of(case), HeadNorms(weight, weight, EPS)

    def run() -> Tensor:
        launches.commit(StepRows(k, v, scales, scales), stored, pages=pages)
        launches.prepare(projected, q, step, pages=pages, norms=norms, rotary=Rotary(turn, 0 * turn), fresh=None)
        return attended(case, q, step)

    graph, output = captured(run)
    for _ in range(50):
        case.arena.fill_(0xFF)
        output.fill_(torch.nan)
        graph.replay()
        check(case, [0], q, output)
    case.arena.copy_(written)


@on_hopper
def test_a_captured_launch_attends_over_what_the_step_arrays_say_then() -> None:
    """Pages, tables and positions change under it, and rows become padding."""
    case = case_of(4, 1024, [1500, 20, 3000, 1024])
    q = case.random(MOST_ROWS, 8, WIDTH)
    step = decode_step(case, [0] * MOST_ROWS)
    graph, output = captured(lambda: attended(case, q, step))
    for slots in ([3, 1, 2, 0], [-1, 2, -1, 1], [1, -1, -1, -1]):
        point_decodes(step, case, slots)
        output.fill_(torch.nan)
        graph.replay()
        check(case, slots, q, output)
