"""The matrix of one linear layer, of the class of its format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from modelserve.model.weight_format import BFLOAT16, StoredType, TextLinear
from modelserve_worker.layers.placement import Placement
from modelserve_worker.layers.stored.fp8 import Fp8Matrix
from modelserve_worker.layers.stored.int4 import Int4Matrix
from modelserve_worker.layers.stored.int8 import Int8Matrix
from modelserve_worker.layers.stored.matrix import DenseMatrix, StoredMatrix
from modelserve_worker.layers.stored.nvfp4 import Nvfp4Matrix

_QUANTISED: dict[StoredType, Callable[..., StoredMatrix]] = {
    StoredType.INT4: Int4Matrix,
    StoredType.INT8: Int8Matrix,
    StoredType.FP8: Fp8Matrix,
    StoredType.NVFP4: Nvfp4Matrix,
}


def stored_matrix(
    linear: TextLinear, parts: Sequence[int], columns: int, placement: Placement, *, experts: int = 0
) -> StoredMatrix:
    """The matrix of one linear layer in the checkpoint's format: `parts` rows of each stacked matrix, `columns` inputs.

    A dense matrix is held in the dtype that is computed in. Raises KeyError where the placement's table of kernels is
    of a model without this matrix.
    """
    stored = BFLOAT16 if placement.weight_format is None else placement.weight_format.matrix(linear)
    shape = sum(parts), columns
    arguments: dict[str, Any] = {
        "experts": experts,
        "dtype": placement.dtype,
        "products": placement.operations.products(linear, shape, stored.stored, grouped=experts > 0),
        "device": placement.device,
    }
    if stored.stored in _QUANTISED:
        return _QUANTISED[stored.stored](parts, columns, weight_format=stored, **arguments)
    return DenseMatrix(parts, columns, **arguments)
