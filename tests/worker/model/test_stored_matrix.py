"""Stored matrices by themselves: elements against float64, the scratch of a product, and no wait for the host."""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import Any

import pytest
import torch
from architecture_of import architecture_of
from published_layouts import matrix_elements
from quantise import FORMATS, quantization_config
from quantised_layouts import matrix_tensors
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from modelserve.model.weight_format import StoredType, TextLinear
from modelserve.sizing.weights.dequantisation import bytes_beside, kernels, scratch_bytes
from modelserve.sizing.weights.text import WeightTensor
from modelserve_worker.kernels.products.fp8_linear import e4m3_precision
from modelserve_worker.layers.placement import Placement
from modelserve_worker.layers.stored.fp8 import Fp8Matrix
from modelserve_worker.layers.stored.matrix import StoredMatrix
from modelserve_worker.layers.stored.stored_matrix import stored_matrix
from modelserve_worker.models.weight_source import MatrixNames, MatrixShare, matrix_sources, whole

ROWS, COLUMNS = 144, 384
NAMES = MatrixNames(dense="", stem="", module="")
CPU = torch.device("cpu")


def filled(name: str, dtype: torch.dtype) -> tuple[StoredMatrix, Tensor]:
    """A matrix of random weights in the format, and its elements in float64."""
    stored, generator = FORMATS[name], torch.Generator().manual_seed(5)
    weight = torch.randn((ROWS, COLUMNS), generator=generator)
    matrix = stored_matrix(TextLinear.DOWN, [ROWS], COLUMNS, Placement(CPU, dtype, weight_format=stored))
    order = torch.randperm(COLUMNS, generator=generator) if stored.activation_order else torch.arange(COLUMNS)
    parts = {
        part.removeprefix(".").removeprefix("weight").removeprefix("_"): tensor
        for part, tensor in matrix_tensors(weight, stored, order).items()
    }
    for source in matrix_sources(matrix, NAMES, MatrixShare((whole(ROWS),), whole(COLUMNS))):
        if source.regions:
            source.parameter.copy_(parts[source.name].view(source.parameter.shape))
    elements = matrix_elements(parts, quantization_config(architecture_of("31B"), stored, ()))
    matrix.loaded()
    return matrix, torch.from_numpy(elements)


@pytest.mark.parametrize("name", FORMATS)
def test_elements_and_products_are_those_of_float64(name: str) -> None:
    matrix, expected = filled(name, torch.float32)
    x = torch.randn((3, COLUMNS), generator=torch.Generator().manual_seed(6))
    torch.testing.assert_close(matrix.linear(x).double(), x.double() @ expected.T, rtol=1e-5, atol=1e-4)
    order = getattr(matrix, "order", None)
    columns = expected if order is None else expected[:, order.long()]
    assert float((matrix.dense().double() - columns).abs().max()) <= 2**-24 * float(expected.abs().max())
    rounded, _ = filled(name, torch.bfloat16)
    assert torch.equal(rounded.dense(), columns.bfloat16())  # rounded once


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_are_rounded_where_the_checkpoint_was_made_for_it(dtype: torch.dtype) -> None:
    """Blocks' and experts' inputs are not: no kernel does so at all numbers of rows."""
    x = torch.randn((3, COLUMNS), generator=torch.Generator().manual_seed(6)).to(dtype)
    for name in ("fp8_channel", "fp8_tensor", "fp8_block"):
        for experts in (0, 2):
            stored = FORMATS[name].model_copy(update={"fp8_activations": True})
            placement = Placement(CPU, dtype, weight_format=stored)
            linear = TextLinear.EXPERT_DOWN if experts else TextLinear.DOWN
            matrix = stored_matrix(linear, [ROWS], COLUMNS, placement, experts=experts)
            assert isinstance(matrix, Fp8Matrix)
            assert matrix.rounds_inputs == (name != "fp8_block" and not experts)
    matrix, _ = filled("fp8_channel", dtype)
    assert isinstance(matrix, Fp8Matrix)
    as_it_is, of_rounded = matrix.linear(x), matrix.linear(e4m3_precision(x))
    matrix.rounds_inputs = True
    assert torch.equal(matrix.linear(x), of_rounded)
    assert not torch.equal(of_rounded, as_it_is)


class KernelTrace(TorchDispatchMode):
    """Kernels that operations would launch, and the most bytes that their results held at a time beside the inputs."""

    VIEWS = ("view", "unsqueeze", "slice", "expand", "transpose", "t.", "split", "movedim", "permute", "alias", "empty",
             "select", "detach", "narrow", "as_strided", "_unsafe_view", "_reshape_alias")  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[str] = []
        self.held = self.most = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.__name__
        if not name.startswith(self.VIEWS) or name.startswith("index_select"):
            self.kernels.append(name)
        for tensor in result if isinstance(result, tuple | list) else (result,):
            address = tensor.untyped_storage().data_ptr()
            known = any(
                isinstance(a, Tensor) and a.untyped_storage().data_ptr() == address
                for a in (*args, *(kwargs or {}).values())
            )
            if not known and address:
                size = tensor.untyped_storage().nbytes()
                self.held += size
                weakref.finalize(tensor, self._free, size)
        self.most = max(self.most, self.held)
        return result

    def _free(self, size: int) -> None:
        self.held -= size

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)


@pytest.mark.parametrize("name", FORMATS)
def test_a_product_takes_the_scratch_and_the_kernels_that_are_counted(name: str) -> None:
    """In memory of its own, and in a workspace that holds no byte too many."""
    stored, tensor = FORMATS[name], WeightTensor("linear", ROWS, COLUMNS, linear=TextLinear.DOWN)
    matrix, _ = filled(name, torch.bfloat16)
    with KernelTrace() as trace:
        alone = matrix.dense()
    scratch = scratch_bytes(tensor, stored, element_size=2)
    beside = bytes_beside(tensor, stored, element_size=2, tokens=0)
    assert scratch <= trace.most <= scratch + beside
    of_order = 1 if stored.activation_order else 0  # of the inputs, which `linear` takes
    assert len(trace.kernels) <= kernels(tensor, stored) - of_order <= len(trace.kernels) + 2, trace.kernels

    matrix.workspace = torch.full((scratch,), 255, dtype=torch.uint8)
    with KernelTrace() as trace:
        shared = matrix.dense()
    assert torch.equal(shared, alone)
    assert shared.untyped_storage().data_ptr() == matrix.workspace.untyped_storage().data_ptr()
    assert trace.most <= beside


@pytest.mark.parametrize("name", FORMATS)
def test_no_product_waits_for_the_host(name: str) -> None:
    """Tensors without values: what asked for one would fail, and a captured step could not hold it."""
    matrix, _ = filled(name, torch.bfloat16)
    matrix = matrix.to("meta")
    assert matrix.linear(torch.empty((5, COLUMNS), dtype=torch.bfloat16, device="meta")).shape == (5, ROWS)


def test_a_dense_matrix_is_its_own() -> None:
    for stored in (None, FORMATS["int4_g32"].model_copy(update={"dense": (TextLinear.DOWN,)})):
        matrix = stored_matrix(TextLinear.DOWN, [4], 8, Placement(CPU, torch.float32, weight_format=stored))
        assert matrix.dense() is next(iter(matrix.parameters()))
    assert FORMATS["int4_g32"].of(None) is StoredType.BFLOAT16
