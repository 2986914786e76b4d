"""Whether this machine's products are what profile `exact` rests on, tried at the start with the model's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from modelserve_worker.kernels.products.exact_products import check_places
from modelserve_worker.layers.moe import Router
from modelserve_worker.layers.norm import RMSNorm
from modelserve_worker.layers.stored.matrix import StoredMatrix
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM

Product = Callable[[Tensor], Tensor]  # [T, K] -> [T, N]


@torch.no_grad()
def check_exact(model: Gemma4ForCausalLM) -> None:
    """One product of each shape and format: of layers, of one expert's rows, of routers and of the head.

    Raises InvalidInput for the first by which a row has other bits in another place, or beside another number of rows.
    """
    tried: set[tuple[object, ...]] = set()
    for shape, inputs, product in _products(model):
        if shape not in tried:
            tried.add(shape)
            check_places(product, model.norm.weight.new_empty(inputs))


def _products(model: Gemma4ForCausalLM) -> Iterator[tuple[tuple[object, ...], int, Product]]:
    """What tells a product from others, its inputs, and it."""
    for _, matrix in model.stored_matrices():
        product = partial(of_one_expert, matrix) if matrix.experts else matrix.linear
        yield (type(matrix), matrix.experts, matrix.rows, matrix.columns), matrix.columns, product
    for module in model.modules():
        if isinstance(module, Router):
            yield (Router,), model.architecture.hidden_size, partial(routed, module, model.norm)
    yield ("head",), model.architecture.hidden_size, model.head


def of_one_expert(matrix: StoredMatrix, x: Tensor) -> Tensor:
    """All rows of x times the matrix of one in the middle."""
    ends = torch.zeros(matrix.experts, dtype=torch.int32, device=x.device)
    ends[matrix.experts // 2 :] = x.shape[0]
    return matrix.grouped(x, ends)


def routed(router: Router, norm: RMSNorm, x: Tensor) -> Tensor:
    """Weights and numbers of the experts that rows choose."""
    choice = router(x, norm).choice
    return torch.cat((choice.weights, choice.experts.float()), dim=-1)
