"""Products of the profile `exact`: right, and with the same bits for a row whatever rows lie beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ordered_dots import ordered_dots  # noqa: F401 - a fixture
from torch.utils._python_dispatch import TorchDispatchMode

from modelserve.errors import InvalidInput
from modelserve.model.weight_format import StoredType, TextLinear
from modelserve.published import published_model
from modelserve.sizing.backends.resolve import Formats, resolve
from modelserve_worker.kernels.operations import Operations
from modelserve_worker.kernels.products.exact_products import PlainExactProducts, check_places
from modelserve_worker.kernels.products.exact_products_triton import TritonExactProducts, TritonGroupedProducts
from modelserve_worker.kernels.products.row_blocks import plain_product

pytestmark = pytest.mark.usefixtures("ordered_dots")
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


class NoGroupedProduct(TorchDispatchMode):
    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert operation is not torch.ops.aten._grouped_mm.default
        return operation(*args, **kwargs or {})


@pytest.mark.parametrize("gpu", [80, 89])
def test_experts_of_other_gpus_than_hoppers_are_multiplied_so_in_profile_fast(gpu) -> None:
    """PyTorch's grouped product reads the ends on the host there; dense products stay PyTorch's."""
    facts = published_model("hf://google/gemma-4-26B-A4B")
    assert facts is not None
    operations = Operations(resolve(gpu, facts.architecture, Formats()), torch.device("cpu"))
    x, weights, ends = torch.randn(30, 2816), torch.randn(4, 48, 2816), torch.tensor([3, 3, 20, 30], dtype=torch.int32)
    products = operations.products(TextLinear.EXPERT_GATE_UP, (1408, 2816), StoredType.BFLOAT16, grouped=True)
    assert products.of(512).multiply is None, "the elements' product is asked"
    assert isinstance(products.elements, TritonGroupedProducts)
    with NoGroupedProduct():
        result = products.elements.grouped(x, weights, ends)
    expert = torch.bucketize(torch.arange(30), ends.long(), right=True)
    expected = torch.einsum("rk,rnk->rn", x.double(), weights[expert].double())
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-3)
    assert torch.equal(products.elements.dense(x, weights[0]), plain_product(x, weights[0]))


def test_a_product_that_looks_at_its_neighbours_is_refused() -> None:
    weight = torch.randn(8, 24)
    check_places(lambda x: PlainExactProducts().dense(x, weight), weight[0])
    with pytest.raises(InvalidInput, match=r"profile exact: .* as row 1 of 16 than alone; use profile fast"):
        check_places(lambda x: x @ weight.T + len(x), weight[0])
