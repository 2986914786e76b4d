"""Decode attention of sliding layers for many rows against float64 attention: on a Hopper GPU, emulated on a CPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import emulated_decode_stream
import emulated_kernel
import pytest
import torch
from attention_cases import decode_step, hopper_kernels, layout, padded_decodes, pages_of
from hopper import captured, check_captured_bits, on_hopper, point_decodes
from paged_case import PagedCase
from test_sliding_decode_sm90 import Layers, attended, case_of, check
from torch import Tensor

from modelserve.sizing.backends.table import Operation
from modelserve_worker.kernels.attention import triton_launches as launches
from modelserve_worker.kernels.attention.hopper.decode_stream_sm90 import StreamKernel
from modelserve_worker.kernels.step import Step

pytestmark = pytest.mark.drawn

WIDTH = 256


@pytest.mark.skipif(emulated_kernel.compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("kernel", "heads", "group", "contexts", "blocks"),
    [
        # Whole windows from inside of a page and an octet, rows of less than a warp's keys, one token; rows of a block.
        (StreamKernel(256, 1024, 4, 5), 1, 2, [1024, 1500, 161, 1], 2),
        (StreamKernel(256, 512, 4, 5), 2, 4, [513, 2055, 33], 1),
        (StreamKernel(256, 512, 4, 5), 1, 8, [700, 8, 9], 4),
        (StreamKernel(256, 70, 4, 3), 3, 1, [69, 71, 280], 5),
        (StreamKernel(256, 70, 2, 4), 1, 5, [69, 71, 280], 1),
        (StreamKernel(256, 70, 2, 4), 2, 2, [1 + 3 * i for i in range(34)], 3),  # more than are looked at together
    ],
)
def test_the_emulated_kernel_equals_float64_attention(
    tmp_path: Path, kernel: StreamKernel, heads: int, group: int, contexts: list[int], blocks: int
) -> None:
    """Queries and the rows' own keys, or all keys, are there only when the kernel ahead has ended."""
    case = case_of(heads, kernel.window, contexts, device="cpu", seed=kernel.window)
    slots, decode = padded_decodes(case)
    q = case.random(len(slots), heads * group, WIDTH)
    library = emulated_decode_stream.library_of(kernel, tmp_path)
    for settled in (True, False):
        launched = dataclasses.replace(decode, settled=settled)
        check(case, slots, q, emulated_decode_stream.attended(library, kernel, case, q, launched, blocks=blocks))


@pytest.mark.skipif(emulated_kernel.compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(("heads", "group", "contexts", "blocks"), [(2, 4, [130, 1, 64, 700], 3), (1, 8, [385], 2)])
def test_the_emulated_kernel_splits_rows_of_global_layers(
    tmp_path: Path, heads: int, group: int, contexts: list[int], blocks: int
) -> None:
    """Splits of one page where four are enough, and of more."""
    kernel = StreamKernel(512, 0, 2, 3)
    case = PagedCase("global", heads, 512, "none", False, contexts, 0, device="cpu", seed=heads)
    slots, decode = padded_decodes(case)
    q = case.random(len(slots), heads * group, 512)
    library = emulated_decode_stream.library_of(kernel, tmp_path)
    for most, settled in ((4, True), (16, False)):
        launched = dataclasses.replace(decode, settled=settled)
        output = emulated_decode_stream.attended(
            library, kernel, case, q, launched, blocks=blocks, most_splits=most, split_pages=1
        )
        check(case, slots, q, output)


# 31B, 26B-A4B and 12B, E4B, E2B; what ranks have of them; heads and windows that no model has.
@on_hopper
@pytest.mark.parametrize(
    ("heads", "group", "window"),
    [(16, 2, 1024), (8, 2, 1024), (2, 4, 512), (1, 8, 512), (4, 2, 1024), (3, 1, 512), (2, 5, 70)],
)
@pytest.mark.parametrize("settled", [True, False])
def test_rows_equal_float64_attention_and_repeat_bit_for_bit(heads, group, window, settled) -> None:
    """More rows and heads than multiprocessors and fewer; blocks of padding alone."""
    contexts = [1, 7, window, window + 1, 160, 33, 16 * 8 + 1, window - 1, 4 * window + 77]
    case = case_of(heads, window, contexts, seed=heads * window)
    for slots in ([8], [-1], [4, -1, 5], [*range(9), *[-1] * 7], [*range(9)] * 23 + [-1, 2, -1]):
        q = case.random(len(slots), heads * group, WIDTH)
        step = decode_step(case, slots)
        assert step.decode is not None
        step = dataclasses.replace(step, decode=dataclasses.replace(step.decode, settled=settled))
        output = attended(case, q, step, most=0)
        for _ in range(20):
            assert torch.equal(attended(case, q, step, most=0).nan_to_num(7.0), output.nan_to_num(7.0))
        check(case, slots[:20], q, output)
        check(case, slots[-20:], q[-20:], output[-20:])


@on_hopper
@pytest.mark.parametrize("seed", range(8))
def test_random_lengths_equal_float64_attention(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    heads, group, window = ((16, 2, 1024), (8, 2, 1024), (2, 4, 512), (1, 8, 512))[seed % 4]
    contexts = torch.randint(1, 3 * window, (24,), generator=generator).tolist()
    case = case_of(heads, window, contexts, seed=seed)
    slots = list(range(24))
    q = case.random(len(slots), heads * group, WIDTH, scale=2.0)
    check(case, slots, q, attended(case, q, decode_step(case, slots), most=0))


@on_hopper
def test_a_row_has_the_same_bits_beside_any_other() -> None:
    case = case_of(2, 1024, [1500, 40, 900, 5000])
    q = case.random(1, 4, WIDTH).expand(204, -1, -1).contiguous()
    alone = attended(case, q[:1], decode_step(case, [0]), most=0)
    for slots in ([0, 1], [2, 0], [3, 1, 0, 2], [3, 1, 2] * 67 + [0]):
        beside = attended(case, q[: len(slots)], decode_step(case, slots), most=0)
        assert torch.equal(beside[slots.index(0)], alone[0])


@on_hopper
@pytest.mark.parametrize(
    ("heads", "group", "window", "contexts"),
    [(16, 2, 1024, [1500] * 20), (2, 4, 512, [513, 40, 8192, 600] * 7), (1, 8, 512, [511, 1000])],
)
def test_captured_chains_have_the_bits_of_kernels_that_run_one_after_the_other(heads, group, window, contexts) -> None:
    chain = Layers(heads, group, window, contexts, layers=12, most=0)
    check_captured_bits(chain.run, replays=100)


@on_hopper
def test_a_captured_launch_attends_over_what_the_step_arrays_say_then() -> None:
    """Pages, tables and positions change under it, and rows become padding."""
    case = case_of(4, 1024, [1500, 20, 3000, 1024])
    q = case.random(4, 8, WIDTH)
    step = decode_step(case, [0] * 4)
    graph, output = captured(lambda: attended(case, q, step, most=0))
    for slots in ([3, 1, 2, 0], [-1, 2, -1, 1], [1, -1, -1, -1]):
        point_decodes(step, case, slots)
        output.fill_(torch.nan)
        graph.replay()
        check(case, slots, q, output)


def attended_globally(case: PagedCase, q: Tensor, step: Step) -> Tensor:
    rows, output = layout(case), torch.full_like(q, torch.nan)
    kernels = hopper_kernels(rows, Operation.DECODE_ATTENTION, query_heads=q.shape[1])
    workspace = torch.full(
        (len(q) * launches.decode_workspace(rows, query_heads=q.shape[1]),), torch.nan, device="cuda"
    )
    kernels.decode(q, output, step, pages=pages_of(case), workspace=workspace)
    return output


@on_hopper
@pytest.mark.parametrize(("heads", "group"), [(2, 4), (1, 8), (1, 4)])
@pytest.mark.parametrize("settled", [True, False])
def test_rows_of_global_layers_equal_float64_attention_and_repeat_bit_for_bit(heads, group, settled) -> None:
    """One split and many, of one page and more; more splits than multiprocessors and fewer; padding."""
    case = PagedCase(
        "global",
        heads,
        512,
        "none",
        False,
        [1, 64, 65, 128, 129, 700, 2055, 9000, 20_000],
        0,
        device="cuda",
        seed=heads,
    )
    for slots in ([8], [-1], [4, -1, 5], [*range(8), *[-1] * 8], [*range(9)] * 14 + [-1, 2, -1]):
        q = case.random(len(slots), heads * group, 512)
        step = decode_step(case, slots)
        assert step.decode is not None
        step = dataclasses.replace(step, decode=dataclasses.replace(step.decode, settled=settled))
        output = attended_globally(case, q, step)
        for _ in range(20):
            assert torch.equal(attended_globally(case, q, step).nan_to_num(7.0), output.nan_to_num(7.0))
        check(case, slots[:20], q, output)
        check(case, slots[-20:], q[-20:], output[-20:])
