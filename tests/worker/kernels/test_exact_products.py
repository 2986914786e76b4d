"""Products of the profile `exact`: right, and with the same bits for a row whatever rows lie beside it."""

from __future__ import annotations

import pytest
import torch
from ordered_dots import add_in_order

from modelserve.errors import InvalidInput
from modelserve_worker.kernels.exact_products import PlainExactProducts, check_places
from modelserve_worker.kernels.exact_products_triton import TritonExactProducts


@pytest.fixture(autouse=True)
def ordered_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    add_in_order(monkeypatch)


PRODUCTS = (PlainExactProducts(), TritonExactProducts())


@pytest.mark.parametrize("products", PRODUCTS, ids=("plain", "triton"))
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 70, 64), (17, 130, 100), (40, 64, 192)])
def test_products_are_right_and_rows_stand_alone(products, rows, outputs, inputs) -> None:
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    result = products.dense(x, weight)
    torch.testing.assert_close(result.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-4)
    place = rows // 2
    assert torch.equal(products.dense(x[place : place + 1], weight)[0], result[place])


@pytest.mark.parametrize("products", PRODUCTS, ids=("plain", "triton"))
def test_experts_have_the_bits_of_their_own_products(products) -> None:
    """Of four experts, one without rows; rows behind the last end are nobody's."""
    x, weights = torch.randn(30, 96), torch.randn(4, 80, 96)
    ends = torch.tensor([3, 3, 20, 28], dtype=torch.int32)
    result = products.grouped(x, weights, ends)
    for expert, (first, end) in enumerate(((0, 3), (3, 3), (3, 20), (20, 28))):
        assert torch.equal(result[first:end], products.dense(x[first:end], weights[expert]))


def test_a_product_that_looks_at_its_neighbours_is_refused() -> None:
    weight = torch.randn(8, 24)
    check_places(lambda x: PlainExactProducts().dense(x, weight), weight[0])
    with pytest.raises(InvalidInput, match=r"profile exact: .* as row 1 of 16 than alone; use profile fast"):
        check_places(lambda x: x @ weight.T + len(x), weight[0])
