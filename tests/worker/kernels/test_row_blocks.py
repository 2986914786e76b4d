"""What a CPU multiplies: rows in blocks of few sizes, in which a row has the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from modelserve_worker.kernels.products.row_blocks import grouped_product, plain_product

pytestmark = pytest.mark.drawn

BLOCKS = {4, 8, 16, 32, 64, 128, 256}


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """As workers have: a product is shared out among them."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("outputs", "inputs"), [(1536, 6144), (2560, 10240), (112, 2048), (64, 64)])
def test_on_a_cpu_a_row_has_the_bits_that_it_has_beside_others(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    """PyTorch alone rounds a few of the sums of a single row otherwise, which every answer that decodes alone is."""
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(outputs, inputs, generator=generator) / inputs**0.5).to(dtype)
    rows = torch.randn(300, inputs, generator=generator).to(dtype)
    beside = plain_product(rows, weight)
    for count in (1, 2, 3, 5, 12, 70):
        assert torch.equal(plain_product(rows[:count], weight), beside[:count])
        assert torch.equal(plain_product(rows[-count:], weight), beside[-count:])


def test_on_a_cpu_products_are_of_few_counts_of_rows(multiplied: list[int]) -> None:
    """PyTorch keeps a kernel for each count that it meets; the rows that are asked for come back."""
    weight, rows = torch.randn(4, 8), torch.randn(1024, 8)
    expected = rows.double() @ weight.double().t()
    for count in range(1025):
        multiplied.clear()
        product = plain_product(rows[:count], weight)
        assert product.shape == (count, 4)
        torch.testing.assert_close(product.double(), expected[:count], atol=1e-5, rtol=0)
        assert set(multiplied) <= BLOCKS
        assert sum(multiplied) <= count + 24
        assert len(multiplied) <= 4 + count // 256


def test_on_a_cpu_products_of_experts_are_of_few_counts_of_rows_and_a_row_has_the_same_bits(
    multiplied: list[int],
) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(3, 64, 256, generator=generator).bfloat16()
    rows = torch.randn(130, 256, generator=generator).bfloat16()
    expected = (rows[:120].double()[:, None] @ weights.double()[[0] * 7 + [2] * 113].transpose(1, 2)).squeeze(1)
    together = grouped_product(rows, weights, torch.tensor([7, 7, 120], dtype=torch.int32))
    assert together.shape == (130, 64), "rows of no expert are there, and undefined"
    torch.testing.assert_close(together[:120].double(), expected, rtol=1e-2, atol=1e-1)
    for row, expert in ((0, 0), (6, 0), (7, 2), (119, 2)):
        ends = torch.tensor([int(each >= expert) for each in range(3)], dtype=torch.int32)
        assert torch.equal(grouped_product(rows[row : row + 1], weights, ends)[0], together[row])
    assert set(multiplied) <= BLOCKS


@pytest.fixture
def multiplied() -> Iterator[list[int]]:
    """Rows of each product that PyTorch is asked for."""
    counts: list[int] = []

    class Products(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.nn.functional.linear:
                counts.append(args[0].shape[0])
            return function(*args, **kwargs or {})

    with Products():
        yield counts
