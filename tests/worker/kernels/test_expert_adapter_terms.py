"""The additive term of adapters of experts against float64: kernels and plain PyTorch, and blocks of dealt rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from modelserve.sizing.adapters import BLOCK_ROWS, expert_blocks
from modelserve_worker.kernels.adapters.expert_terms import ExpertBlocks, ExpertTerms, PlainExpertTerms
from modelserve_worker.kernels.adapters.expert_terms_triton import TritonExpertTerms
from modelserve_worker.kernels.adapters.terms import NO_ADAPTER, AdapterBlocks, SlotFactors, row_blocks
from modelserve_worker.kernels.experts.experts import NO_EXPERT, Choice, PlainExperts

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
SLOTS, TOP_K = 3, 3
# Outputs of each part, parts, inputs, rank and experts: one part and two, pieces of inputs that are part empty.
SHAPES = [(40, 2, 80, 5, 7), (72, 1, 300, 16, 4), (300, 2, 64, 64, 12)]
PUBLISHED = [(704, 2, 2816, 16, 128), (2816, 1, 704, 16, 128), (704, 2, 2816, 256, 8)]


@dataclass(frozen=True)
class Dealt:
    """What rows of a step chose: of each dealt row its adapter and expert."""

    rows: AdapterBlocks
    chosen: Tensor
    places: Tensor
    pairs: dict[int, tuple[int, int]]  # dealt row -> slot, expert; of those that have an adapter


def dealt(slots: list[int], experts: int, *, top_k: int = TOP_K, padding: int = 0, idle: int = 0) -> Dealt:
    """Rows of these adapters, the last `idle` of which only pad the step; blocks padded likewise."""
    count = len(slots)
    top_k = min(top_k, experts)
    chosen = torch.stack([torch.randperm(experts)[:top_k] for _ in range(count)]).int()
    chosen[count - idle :] = NO_EXPERT
    found = PlainExperts().deal(torch.zeros(count, 1), Choice(torch.zeros(chosen.shape), chosen), experts)
    pairs = {
        int(found.places[row, choice]): (slots[row], int(chosen[row, choice]))
        for row in range(count - idle)
        for choice in range(top_k)
        if slots[row] != NO_ADAPTER
    }
    rows, of_blocks = (torch.from_numpy(each) for each in row_blocks(np.array(slots, dtype=np.int32)))
    empty = torch.full((padding,), NO_ADAPTER, dtype=torch.int32)
    padded = torch.cat((rows, empty.repeat_interleave(BLOCK_ROWS))).to(DEVICE)
    blocks = AdapterBlocks(
        padded, torch.cat((of_blocks, empty)).to(DEVICE), torch.tensor(slots, dtype=torch.int32, device=DEVICE)
    )
    return Dealt(blocks, chosen.to(DEVICE), found.places.to(DEVICE), pairs)


def factors_of(outputs: int, parts: int, inputs: int, rank: int, experts: int, dtype: torch.dtype) -> SlotFactors:
    """Random, in slots that lie apart, of ranks that end before the largest in one of them."""
    count, rows = experts * parts * rank * inputs, parts * outputs
    memory = torch.randn(SLOTS, count + experts * rows * rank + 48, device=DEVICE).to(dtype)
    a = memory[:, :count].view(SLOTS, experts, parts * rank, inputs)
    b = memory[:, count : count + experts * rows * rank].view(SLOTS, experts, rows, rank)
    a.mul_(inputs**-0.5)
    b[1, ..., rank // 2 :] = 0
    scales = torch.rand(SLOTS, experts + 3, 2, device=DEVICE)[:, 3:, :parts] + 0.5  # of one layer among others
    return SlotFactors(a, b, scales, (outputs,) * parts)


def exact(x: Tensor, y: Tensor, factors: SlotFactors, case: Dealt) -> Tensor:
    result, outputs, rank = y.double(), factors.parts[0], factors.rank
    for row, (slot, expert) in case.pairs.items():
        for part in range(len(factors.parts)):
            a = factors.a[slot, expert, part * rank : (part + 1) * rank].double()
            mine = slice(part * outputs, (part + 1) * outputs)
            term = factors.b[slot, expert, mine].double() @ (a @ x[row].double())
            result[row, mine] += factors.scales[slot, expert, part].double() * term
    return result


def add(terms: ExpertTerms, x: Tensor, y: Tensor, factors: SlotFactors, case: Dealt) -> ExpertBlocks:
    blocks = terms.blocks(case.rows, case.chosen, case.places, factors)
    terms.expand(terms.shrink(x, factors, blocks), y, factors, blocks)
    return blocks


def check(terms: ExpertTerms, shape: tuple[int, ...], dtype: torch.dtype, rows: int, *, top_k: int = TOP_K) -> None:
    outputs, parts, inputs, rank, experts = shape
    slots = np.random.default_rng(rows).integers(NO_ADAPTER, SLOTS, rows).tolist()
    case = dealt(slots, experts, top_k=top_k, padding=2, idle=rows // 9)
    factors = factors_of(outputs, parts, inputs, rank, experts, dtype)
    x = torch.randn(case.places.numel(), inputs, device=DEVICE).to(dtype)
    before = torch.randn(len(x), parts * outputs, device=DEVICE).to(dtype)
    y = before.clone()
    add(terms, x, y, factors, case)
    expected = exact(x, before, factors, case)
    error, unit = (y.double() - expected).abs(), torch.finfo(dtype).eps
    # What lies between the factors is rounded to the compute dtype once, then the sum.
    scale = float((expected - before.double()).abs().max()) + 1
    assert float((error - expected.abs() * unit).max()) <= 4 * unit * scale
    alone = [row for row in range(len(x)) if row not in case.pairs]
    assert torch.equal(y[alone], before[alone])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 37])
def test_plain_terms(shape: tuple[int, ...], dtype: torch.dtype, rows: int) -> None:
    check(PlainExpertTerms(), shape, dtype, rows)


@pytest.mark.parametrize("shape", SHAPES[:2])
def test_kernels_in_the_interpreter_or_on_a_gpu(shape: tuple[int, ...]) -> None:
    check(TritonExpertTerms(), shape, torch.float32, 37)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("shape", SHAPES + PUBLISHED)
@pytest.mark.parametrize("rows", [1, 32, 700])
def test_kernels_on_a_gpu(shape: tuple[int, ...], rows: int) -> None:
    check(TritonExpertTerms(), shape, torch.bfloat16, rows, top_k=8)


@pytest.mark.parametrize("terms", [PlainExpertTerms(), TritonExpertTerms()])
@pytest.mark.parametrize(("rows", "experts"), [(1, 4), (5, 9), (150, 2), (90, 40)])
def test_blocks_have_every_pair_once_and_no_more_than_there_is_room_for(
    terms: ExpertTerms, rows: int, experts: int
) -> None:
    """Of one adapter and one expert each, whatever rows chose: all the same, or each another."""
    slots = np.random.default_rng(rows).integers(NO_ADAPTER, SLOTS, rows).tolist()
    case = dealt(slots, experts, padding=1, idle=rows // 9)
    factors = factors_of(16, 1, 16, 4, experts, torch.float32)
    blocks = terms.blocks(case.rows, case.chosen, case.places, factors)
    assert len(blocks.slots) <= expert_blocks(case.chosen.numel(), min(SLOTS, rows), experts)
    assert len(blocks.rows) == len(blocks.slots) * BLOCK_ROWS
    placed: dict[int, tuple[int, int]] = {}
    each = zip(blocks.rows.view(-1, BLOCK_ROWS).tolist(), blocks.slots.tolist(), blocks.experts.tolist(), strict=True)
    for block, slot, expert in each:
        inside = [row for row in block if row >= 0]
        assert bool(inside) == (slot != NO_ADAPTER)
        assert not set(inside) & set(placed)
        placed |= dict.fromkeys(inside, (slot, expert))
    assert placed == case.pairs


def test_room_for_blocks_is_what_the_worst_choice_takes() -> None:
    for choices in (1, 7, 64, 500):
        for pairs in (1, 3, 40, 1000):
            # One row of each pair of adapter and expert but one, which has all others.
            most = min(choices, pairs)
            worst = most - 1 + -(-(choices - most + 1) // BLOCK_ROWS)
            assert worst <= expert_blocks(choices, 1, pairs) <= worst + 1


def test_a_rows_bits_do_not_depend_on_others() -> None:
    factors = factors_of(48, 2, 96, 4, 5, torch.bfloat16)
    slots = [row % SLOTS for row in range(20)]
    case = dealt(slots, 5)
    x = torch.randn(case.places.numel(), 96, device=DEVICE).bfloat16()
    y = torch.randn(len(x), 96, device=DEVICE).bfloat16()
    every: list[ExpertTerms] = [PlainExpertTerms(exact=True), TritonExpertTerms()]
    for terms in every:
        together = y.clone()
        add(terms, x, together, factors, case)
        for row in (0, 7, 19):
            row_slots = np.array([slot if at == row else NO_ADAPTER for at, slot in enumerate(slots)], dtype=np.int32)
            blocks = AdapterBlocks(*(torch.from_numpy(each).to(DEVICE) for each in (*row_blocks(row_slots), row_slots)))
            alone = y.clone()
            add(terms, x, alone, factors, Dealt(blocks, case.chosen, case.places, {}))
            mine = case.places[row].tolist()
            assert torch.equal(alone[mine], together[mine])
            others = [each for each in range(len(y)) if each not in mine]
            assert torch.equal(alone[others], y[others])
