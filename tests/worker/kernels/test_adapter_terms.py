"""The additive term of adapters against float64: kernels and plain PyTorch, and blocks of rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from modelserve.sizing.adapters import BLOCK_ROWS, FEW_ROWS
from modelserve_worker.kernels.adapters.terms import (
    NO_ADAPTER,
    AdapterBlocks,
    AdapterTerms,
    PlainTerms,
    SlotFactors,
    row_blocks,
)
from modelserve_worker.kernels.adapters.terms_triton import TritonTerms

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
SLOTS = 3
# Parts, inputs and rank: fused and single matrices, tiles that parts cross, pieces of inputs that are part empty.
SHAPES = [((96, 32, 32), 80, 5), ((40,), 300, 16), ((130, 130), 64, 1), ((256,), 520, 32), ((64, 64, 64), 96, 64)]
PUBLISHED = [
    ((8192, 4096, 4096), 5376, 16),
    ((21504, 21504), 5376, 16),
    ((5376,), 21504, 64),
    ((256,), 2560, 8),
    ((4096, 2048, 2048), 5376, 256),
]


def factors_of(parts: tuple[int, ...], inputs: int, rank: int, dtype: torch.dtype) -> SlotFactors:
    """Random, in slots that lie apart; ranks end before the largest, as adapters of lower ranks have them."""
    count = len(parts) * rank * inputs
    memory = torch.randn(SLOTS, count + sum(parts) * rank + 48, device=DEVICE).to(dtype)
    a = memory[:, :count].view(SLOTS, len(parts) * rank, inputs)
    b = memory[:, count : count + sum(parts) * rank].view(SLOTS, sum(parts), rank)
    a.mul_(inputs**-0.5)
    b[1, :, rank // 2 :] = 0
    scales = torch.rand(SLOTS, 4, len(parts), device=DEVICE)[:, 1] + 0.5  # of one matrix among others
    return SlotFactors(a, b, scales, parts)


def exact(x: Tensor, y: Tensor, factors: SlotFactors, slots: list[int]) -> Tensor:
    result, first = y.double(), np.cumsum([0, *factors.parts]).tolist()
    for row, slot in enumerate(slots):
        if slot == NO_ADAPTER:
            continue
        for part, size in enumerate(factors.parts):
            mine = slice(part * factors.rank, (part + 1) * factors.rank)
            outputs = slice(first[part], first[part] + size)
            shrunk = factors.a[slot, mine].double() @ x[row].double()
            result[row, outputs] += factors.scales[slot, part].double() * (factors.b[slot, outputs].double() @ shrunk)
    return result


def blocks_of(slots: list[int], *, padding: int = 0) -> AdapterBlocks:
    rows, of_blocks = (torch.from_numpy(each) for each in row_blocks(np.array(slots, dtype=np.int32)))
    empty = torch.full((padding,), NO_ADAPTER, dtype=torch.int32)
    rows = torch.cat((rows, empty.repeat_interleave(BLOCK_ROWS)))
    row_slots = torch.tensor(slots, dtype=torch.int32, device=DEVICE)
    return AdapterBlocks(rows.to(DEVICE), torch.cat((of_blocks, empty)).to(DEVICE), row_slots)


def add(terms: AdapterTerms, x: Tensor, y: Tensor, factors: SlotFactors, blocks: AdapterBlocks) -> None:
    if few := terms.few(x, factors):
        terms.expand_few(terms.shrink_few(few, factors, blocks, settled=False), y)
    else:
        terms.expand(terms.shrink(x, factors, blocks), y, factors, blocks)


def check(terms: AdapterTerms, parts: tuple[int, ...], inputs: int, rank: int, dtype: torch.dtype, rows: int) -> None:
    generator = np.random.default_rng(rows)
    slots = generator.integers(NO_ADAPTER, SLOTS, rows).tolist()
    factors = factors_of(parts, inputs, rank, dtype)
    x = torch.randn(rows, inputs + 16, device=DEVICE).to(dtype)[:, :inputs]  # rows lie apart
    for result in (dtype, torch.float32):
        before = torch.randn(rows, sum(parts), device=DEVICE).to(result)
        y = before.clone()
        add(terms, x, y, factors, blocks_of(slots, padding=2))
        expected = exact(x, before, factors, slots)
        error = (y.double() - expected).abs()
        # What lies between the factors is rounded to the compute dtype once, then the sum to the result's.
        unit = torch.finfo(dtype).eps
        scale = float((expected - before.double()).abs().max()) + 1
        assert float((error - expected.abs() * torch.finfo(result).eps).max()) <= 4 * unit * scale
        alone = [row for row, slot in enumerate(slots) if slot == NO_ADAPTER]
        assert torch.equal(y[alone], before[alone])
        blocks = blocks_of(slots, padding=2)
        few = terms.few(x, factors)
        assert (few is None) == (isinstance(terms, PlainTerms) or rows > FEW_ROWS)
        if few is not None:
            term = terms.shrink_few(few, factors, blocks, settled=False).dense()
            assert float((term - (expected - before.double())).abs().max()) <= 4 * unit * scale
            assert not term[alone].any()
            plain = PlainTerms()
            y = before.clone()
            plain.expand_few(plain.shrink_few(few, factors, blocks, settled=False), y)
            assert float((y.double() - expected).abs().max()) <= 4 * unit * (float(expected.abs().max()) + 1)


@pytest.mark.parametrize(("parts", "inputs", "rank"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 37])
def test_plain_terms(parts: tuple[int, ...], inputs: int, rank: int, dtype: torch.dtype, rows: int) -> None:
    check(PlainTerms(), parts, inputs, rank, dtype, rows)


@pytest.mark.parametrize(("parts", "inputs", "rank"), SHAPES[:3])
@pytest.mark.parametrize("rows", [9, FEW_ROWS + 1])
def test_kernels_in_the_interpreter_or_on_a_gpu(parts: tuple[int, ...], inputs: int, rank: int, rows: int) -> None:
    check(TritonTerms(), parts, inputs, rank, torch.float32, rows)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize(("parts", "inputs", "rank"), SHAPES + PUBLISHED)
@pytest.mark.parametrize("rows", [1, 3, 32, 700])
def test_kernels_on_a_gpu(parts: tuple[int, ...], inputs: int, rank: int, rows: int) -> None:
    check(TritonTerms(), parts, inputs, rank, torch.bfloat16, rows)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU or torch.cuda.get_device_capability() != (9, 0), reason="needs Hopper")
@pytest.mark.parametrize(("parts", "inputs"), [((2048, 512, 512), 2560), ((256,), 2560), ((2560,), 10240)])
@pytest.mark.parametrize("rows", [1, 8, 32])
def test_a_x_beside_the_product(parts: tuple[int, ...], inputs: int, rows: int) -> None:
    """A norm, its product, A x beside that, and who reads both: captured, with another x each time."""
    from modelserve_worker.kernels.elementwise.elementwise_triton import TritonElementwise
    from modelserve_worker.kernels.products.hopper.linear_rows_sm90 import dense_rows

    slots = np.random.default_rng(rows).integers(NO_ADAPTER, SLOTS, rows).tolist()
    terms, elementwise, blocks = TritonTerms(), TritonElementwise(), blocks_of(slots, padding=2)
    factors, weight = factors_of(parts, inputs, 16, torch.bfloat16), torch.ones(inputs, device=DEVICE).bfloat16()
    matrix = (torch.randn(sum(parts), inputs, device=DEVICE) * inputs**-0.5).bfloat16()
    ends = torch.ones(sum(parts), device=DEVICE).bfloat16()
    taken = torch.empty(rows, inputs, device=DEVICE).bfloat16()
    residual = torch.zeros(rows, sum(parts), device=DEVICE).bfloat16()

    def step(settled: bool) -> Tensor:
        x = elementwise.rms_norm(taken, weight, eps=1e-6)
        few = terms.few(x, factors)
        assert few is not None
        y = dense_rows(x, matrix, beside=settled)
        term = terms.shrink_few(few, factors, blocks, settled=settled)
        if len(parts) == 1 and terms.left_to_readers(factors, normed=True):
            options = {"scalar": None, "next_weight": None, "eps": 1e-6, "term": term}
            return elementwise.residual_norm(residual.clone(), y, ends, **options)[0]
        terms.expand_few(term, y)
        return y.clone()

    step(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [step(True) for _ in range(8)]
    for _ in range(20):
        taken.copy_(torch.randn(rows, inputs, device=DEVICE))
        expected = step(False)
        graph.replay()
        assert all(torch.equal(expected, each) for each in results)


def test_a_rows_bits_do_not_depend_on_others() -> None:
    factors = factors_of((48, 16), 96, 4, torch.bfloat16)
    x, y = torch.randn(20, 96, device=DEVICE).bfloat16(), torch.randn(20, 64, device=DEVICE).bfloat16()
    slots = [row % SLOTS for row in range(20)]
    terms: list[AdapterTerms] = [PlainTerms(exact=True), TritonTerms(), TritonTerms(exact=True)]
    for each in terms:
        together, alone = y.clone(), y.clone()
        add(each, x, together, factors, blocks_of(slots))
        for row in (0, 7, 19):
            add(
                each, x, alone, factors, blocks_of([slot if at == row else NO_ADAPTER for at, slot in enumerate(slots)])
            )
            assert torch.equal(alone[row], together[row])
    # Of the last, whatever a step's size is.
    many = torch.randn(FEW_ROWS + 1, 96, device=DEVICE).bfloat16()
    results = torch.zeros(FEW_ROWS + 1, 64, device=DEVICE).bfloat16()
    single = torch.zeros(1, 64, device=DEVICE).bfloat16()
    add(terms[-1], many, results, factors, blocks_of([1] * len(many)))
    add(terms[-1], many[5:6], single, factors, blocks_of([1]))
    assert torch.equal(single[0], results[5])


def test_blocks_have_every_row_once_and_one_adapter_each() -> None:
    slots = np.random.default_rng(2).integers(NO_ADAPTER, 5, 200).astype(np.int32)
    rows, of_blocks = row_blocks(slots)
    placed = rows.reshape(-1, BLOCK_ROWS)
    assert sorted(rows[rows >= 0].tolist()) == np.flatnonzero(slots >= 0).tolist()
    for block, slot in zip(placed, of_blocks, strict=True):
        assert set(slots[block[block >= 0]].tolist()) == {slot}
    assert len(row_blocks(np.full(3, NO_ADAPTER, dtype=np.int32))[1]) == 0
