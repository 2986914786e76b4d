"""A worker of profile `exact` does not start where one of its model's products looks at the rows beside a row."""

from __future__ import annotations

import pytest
import torch
from model_checkpoints import load_checkpoint, make_checkpoint

from modelserve.errors import InvalidInput
from modelserve_worker.kernels.experts.experts import ExactExperts
from modelserve_worker.kernels.operations import PLAIN_EXACT, MatrixProducts
from modelserve_worker.kernels.products.exact_products import PlainExactProducts
from modelserve_worker.models.exact_check import check_exact, of_one_expert


class Neighbourly(PlainExactProducts):
    """Right but for the last bits, which follow the number of rows, as a library's do."""

    def dense(self, x, weight):
        return super().dense(x, weight) * (1 + 2**-12 * (len(x) > 16))

    def grouped(self, x, weights, ends):
        return super().grouped(x, weights, ends) * (1 + 2**-12 * (len(x) > 16))


class NeighbourlyExperts(ExactExperts):
    def _product(self, x, weight):
        return Neighbourly().dense(x, weight)


@pytest.fixture
def model(tmp_path):
    make_checkpoint("26B-A4B", tmp_path, seed=4)
    return load_checkpoint(tmp_path, operations=PLAIN_EXACT)


def test_products_of_blocks_are_taken(model) -> None:
    check_exact(model)


@pytest.mark.parametrize("which", ["head", "expert", "router", "layer"])
def test_a_model_is_refused_for_one_of_its_products(model, which) -> None:
    layer, products = model.decoder_layer(0), MatrixProducts(elements=Neighbourly())
    if which == "head":
        model._head = products
    elif which == "router":
        layer.moe.router.backend = NeighbourlyExperts()
    else:
        (layer.moe.experts.down if which == "expert" else layer.mlp.gate_up.matrix).products = products
    with pytest.raises(InvalidInput, match=r"profile exact: .* other bits"):
        check_exact(model)


def test_rows_of_an_expert_are_its_product(model) -> None:
    matrix = model.decoder_layer(0).moe.experts.gate_up
    x = torch.randn(5, matrix.columns)
    torch.testing.assert_close(of_one_expert(matrix, x), x @ matrix.dense()[matrix.experts // 2].T)
