"""Which of the library's ways a product of many rows takes, and on Hopper what comes out of each."""

from __future__ import annotations

import math

import pytest
import torch
from hopper import captured, on_hopper
from torch import Tensor

from modelserve_worker.kernels import many_rows
from modelserve_worker.kernels.cublaslt import CublasLt, Offer, fits, library, strided
from modelserve_worker.kernels.few_rows import dense_product
from modelserve_worker.kernels.many_rows import LEAST_ROWS, chosen, many_rows_door, write_product

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def offer(tile: int, waves: float, splits: int = 1) -> Offer:
    return Offer(tile, splits, waves, None)


@pytest.mark.parametrize(("offers", "place"), [
    ([(209, 28.02), (24, 31.03), (201, 45.58), (197, 47.52)], 2),  # 31B's qkv at 8,192 rows
    ([(31, 13.58), (24, 10.18), (197, 15.52), (201, 15.0)], 3),
    ([(23, 10.18), (197, 15.52), (29, 16.0)], 1),  # a fuller tile that is not among the known ones
    ([(23, 1.95), (197, 1.30)], 0),
    ([(24, 8.0), (23, 8.0)], 1),
    ([(201, 16.0004), (23, 15.0)], 0),  # sixteen turns, of a number that was rounded
])  # fmt: skip
def test_an_offer_is_chosen_for_full_turns_and_thrifty_tiles(offers: list[tuple[int, float]], place: int) -> None:
    made = [offer(*each) for each in offers]
    assert chosen(made) is made[place]


def test_no_offer_that_splits_the_inputs_is_chosen_since_that_is_another_order_of_sums() -> None:
    whole = offer(23, 1.01)
    assert chosen([offer(201, 1.0, splits=3), whole]) is whole
    assert chosen([offer(201, 1.0, splits=3)]) is None
    assert chosen([offer(31, 1.0)]) is None, "a tile that is no faster"
    assert chosen([]) is None


def test_without_a_door_products_are_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert many_rows_door(CPU) is None
    x, matrix, wide = torch.randn(4, 64), torch.randn(96, 64), torch.zeros(4, 128)
    write_product(x, matrix, wide[:, 32:])
    assert torch.allclose(wide[:, 32:], x @ matrix.t(), atol=1e-4)
    assert not wide[:, :32].any()

    class Refuses:
        def multiply(self, *_: Tensor) -> bool:
            return False

    monkeypatch.setattr(many_rows, "many_rows_door", lambda _: Refuses())
    write_product(x, matrix, wide[:, :96])
    assert torch.allclose(wide[:, :96], x @ matrix.t(), atol=1e-4)


def test_rows_that_the_library_may_not_take_for_aligned_are_refused() -> None:
    rows = torch.empty(4 * 1024, dtype=torch.bfloat16)
    rows = rows[(-rows.data_ptr() // 2) % 128 :][: 4 * 512].view(4, 512)
    assert fits((rows, rows[:, 128:]))
    assert not fits((rows, rows[:, 64:])), "begins at 128 bytes"
    assert not fits((rows.float(),))
    assert not fits((rows.t(),))


@pytest.fixture
def door() -> many_rows.ManyRows:
    assert library() is not None
    found = many_rows_door(CUDA)
    assert found is not None
    return found


def bfloat16(*shape: int) -> Tensor:
    return torch.randn(*shape, device=CUDA).bfloat16()


@on_hopper
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [
    (8192, 5376, 8192), (8191, 3072, 2560), (4097, 16384, 5376), (4096, 20480, 2560),
])  # fmt: skip
def test_every_offer_gives_the_same_bits_near_float64(door, rows: int, outputs: int, inputs: int) -> None:
    x, matrix = bfloat16(rows, inputs), bfloat16(outputs, inputs) * inputs**-0.5
    expected = x.double() @ matrix.double().t()
    output = torch.full((rows, outputs), math.nan, device=CUDA, dtype=torch.bfloat16)
    assert door.multiply(x, matrix, output)
    assert (output.double() - expected).norm() < 4e-3 * expected.norm()
    assert torch.equal(dense_product(x, matrix), output)
    own = CublasLt(CUDA)
    product = own.product(strided(x, matrix, output))
    offers = [each for each in own.offers(product) if each.splits <= 1]
    assert len(offers) > 1
    for each in offers:
        other = torch.full_like(output, math.nan)
        own.launch(product, each, x, matrix, other)
        assert torch.equal(other, output), each


@on_hopper
def test_parts_of_wider_rows_are_read_and_written_alone() -> None:
    x, matrix, wide = bfloat16(5000, 4096)[:, 2048:], bfloat16(4096, 2048)[1024:], bfloat16(5000, 8192)
    before, part = wide.clone(), wide[:, 1024 : 1024 + 3072]
    expected = x.double() @ matrix.double().t()
    own = CublasLt(CUDA)
    product = own.product(strided(x, matrix, part))
    for each in own.offers(product):
        part.fill_(math.nan)
        own.launch(product, each, x, matrix, part)
        assert (part.double() - expected).norm() < 4e-3 * expected.norm()
        assert torch.equal(wide[:, :1024], before[:, :1024])
        assert torch.equal(wide[:, 4096:], before[:, 4096:])


@on_hopper
def test_what_the_door_is_not_for_it_leaves_alone(door) -> None:
    matrix = bfloat16(4096, 2048)
    for x, output in (
        (bfloat16(LEAST_ROWS - 1, 2048), bfloat16(LEAST_ROWS - 1, 4096)),
        (bfloat16(LEAST_ROWS, 2112)[:, 64:], bfloat16(LEAST_ROWS, 4096)),
    ):
        before = output.clone()
        assert not door.multiply(x, matrix, output)
        assert torch.equal(output, before)
        write_product(x, matrix, output)
        expected = x.double() @ matrix.double().t()
        assert (output.double() - expected).norm() < 4e-3 * expected.norm()


@on_hopper
def test_a_captured_product_reads_what_its_inputs_hold_at_each_replay(door) -> None:
    x, matrix = bfloat16(8192, 2560), bfloat16(20480, 2560) * 0.02
    graph, output = captured(lambda: dense_product(x, matrix))
    for _ in range(3):
        x.copy_(bfloat16(8192, 2560))
        graph.replay()
        assert torch.equal(output, dense_product(x, matrix))
