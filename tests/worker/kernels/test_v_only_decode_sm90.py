"""Decode attention of V-only global layers against float64 attention: on a Hopper GPU, and emulated on a CPU."""

from __future__ import annotations

from pathlib import Path

import emulated_global_decode
import emulated_kernel
import pytest
import torch
from attention_cases import (
    decode_step,
    derived_keys,
    folded,
    hopper_kernels,
    key_weight,
    layout,
    padded_decodes,
    pages_of,
    rotation,
)
from hopper import captured, on_hopper, point_decodes
from launch_order import one_after_the_other
from paged_case import PagedCase, relative_error
from torch import Tensor

from modelserve.sizing.backends.table import Operation
from modelserve_worker.kernels.attention import triton_launches as launches
from modelserve_worker.kernels.attention.hopper import v_only_decode_sm90
from modelserve_worker.kernels.step import Step

WIDTH, PAIRS = v_only_decode_sm90.WIDTH, v_only_decode_sm90.PAIRS
LIMIT = 5e-3  # turned keys, weights and results are rounded to bfloat16 once


class Case:
    """Rows that nobody wrote are NaN."""

    def __init__(self, heads: int, group: int, contexts: list[int], *, device: str = "cuda", seed: int = 0) -> None:
        self.paged = PagedCase("global", heads, WIDTH, "none", True, contexts, 0, device=device, seed=seed, pairs=PAIRS)
        self.heads, self.contexts = heads * group, contexts
        self.weight = key_weight(self.paged)
        self.turns = rotation(self.paged, v_only_decode_sm90.PAGE, PAIRS)

    def queries(self, rows: int) -> Tensor:
        return self.paged.random(rows, self.heads, WIDTH)

    def check(self, slots: list[int], q: Tensor, output: Tensor) -> None:
        """Rows equal attention by `q` as they are before `prepare` folds the weight in; padding is left alone."""
        for row, slot in enumerate(slots):
            if slot < 0:
                assert output[row].isnan().all(), "a padded row is left alone"
                continue
            keys = derived_keys(self.paged, slot, self.weight, PAIRS)
            at = torch.tensor([self.contexts[slot] - 1], device=q.device)
            expected = self.paged.attention(q[row : row + 1], slot, at, keys)
            assert relative_error(output[row : row + 1], expected) < LIMIT


@pytest.mark.skipif(emulated_kernel.compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("beside", [False, True])
def test_the_emulated_kernel_equals_float64_attention(tmp_path: Path, beside: bool) -> None:
    """Splits of one tile and of more than there are stages, ends inside of tiles and pages, padded rows and queries."""
    library = emulated_global_decode.library(tmp_path)
    for heads, group, contexts, most in ((2, 8, [333, 31], 2), (1, 3, [64, 1, 97], 4)):
        case = Case(heads, group, contexts, device="cpu", seed=heads)
        slots, decode = padded_decodes(case.paged)
        q = case.queries(len(slots))
        output = emulated_global_decode.attended(
            library, case.paged, folded(q, case.weight, PAIRS), decode, key_weight=case.weight, turns=case.turns,
            most_splits=most, split_pages=1, beside=beside,
        )  # fmt: skip
        case.check(slots, q, output)


def attended(case: Case, q: Tensor, step: Step) -> Tensor:
    rows, output = layout(case.paged), torch.full_like(q, torch.nan)
    kernels = hopper_kernels(rows, Operation.DECODE_ATTENTION, query_heads=case.heads)
    workspace = torch.full(
        (len(q) * launches.decode_workspace(rows, query_heads=case.heads),), torch.nan, device="cuda"
    )
    kernels.decode(
        folded(q, case.weight, PAIRS), output, step, pages=pages_of(case.paged),
        workspace=workspace, key_weight=case.weight, turns=case.turns,
    )  # fmt: skip
    return output


# 31B, 26B-A4B, ranks of them; groups that no model has.
@on_hopper
@pytest.mark.parametrize(("heads", "group"), [(4, 8), (2, 8), (1, 8), (3, 1), (2, 5)])
def test_rows_equal_float64_attention_and_repeat_bit_for_bit(heads: int, group: int) -> None:
    contexts = [1, 31, 32, 33, 64, 65, 160, 2304, 8200, 20_000]
    case = Case(heads, group, contexts, seed=heads)
    few = ([0], [9], [8, 2], [4, -1, 5], [6, 7, 8, 0], [-1], [*range(10)])
    for slots in (*few, [*range(10)] * 4 + [-1] * 25, [8, -1] * 65):  # many have longer splits, or none
        q, step = case.queries(len(slots)), decode_step(case.paged, slots)
        output = attended(case, q, step)
        for _ in range(20):
            assert torch.equal(attended(case, q, step).nan_to_num(7.0), output.nan_to_num(7.0))
        case.check(slots[:12], q, output)
        case.check(slots[-12:], q[-12:], output[-12:])


@on_hopper
@pytest.mark.parametrize("seed", range(6))
def test_random_lengths_equal_float64_attention(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    contexts = torch.randint(1, 9000, (24,), generator=generator).tolist()
    case = Case((4, 2, 1)[seed % 3], 8, contexts, seed=seed)
    slots = torch.randperm(24, generator=generator).tolist()
    q = case.queries(24)
    case.check(slots, q, attended(case, q, decode_step(case.paged, slots)))


@on_hopper
def test_a_row_has_the_same_bits_beside_any_other() -> None:
    case = Case(4, 8, [1500, 40, 900, 5000])
    q = case.queries(1).expand(4, -1, -1).contiguous()
    alone = attended(case, q[:1], decode_step(case.paged, [0]))
    for slots in ([0, 1], [2, 0], [3, 1, 0, 2]):
        beside = attended(case, q[: len(slots)], decode_step(case.paged, slots))
        assert torch.equal(beside[slots.index(0)], alone[0])


@on_hopper
def test_a_captured_launch_attends_over_what_the_step_arrays_say_then() -> None:
    """Tables and positions change under it, rows become padding; launches that start early have the same bits."""
    case = Case(4, 8, [1500, 20, 3000, 1024])
    q, step = case.queries(4), decode_step(case.paged, [0] * 4)
    graph, output = captured(lambda: attended(case, q, step))
    for slots in ([3, 1, 2, 0], [-1, 2, -1, 1], [1, -1, -1, -1]):
        point_decodes(step, case.paged, slots)
        with one_after_the_other():
            expected = attended(case, q, step)
        for _ in range(50):
            output.fill_(torch.nan)
            graph.replay()
            assert torch.equal(output.nan_to_num(7.0), expected.nan_to_num(7.0))
        case.check(slots, q, output)
