"""cuBLASLt as PyTorch brings it: what it offers for a product of bfloat16 matrices, and the launch of one of those.

Through ctypes, since PyTorch lets nobody choose. Names and numbers are those of NVIDIA's cublasLt.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from modelserve_worker.kernels.compute_stream import check_compute_stream

WORKSPACE_BYTES = 1 << 20  # most that an offer may want: those that do not split the inputs want four bytes
_NAMES = ("libcublasLt.so.13", "libcublasLt.so.12")  # which PyTorch has loaded
_COMPUTE_32F, _R_32F, _R_16BF, _TRANSPOSED = 68, 0, 14, 1
_DESC_TRANSA, _PREF_WORKSPACE, _CONFIG_TILE, _CONFIG_SPLITS = 3, 1, 1, 2
_MOST_OFFERS = 16


class _Heuristic(ctypes.Structure):
    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of output [rows, outputs] = x [rows, inputs] times the transposed matrix [outputs, inputs].

    Elements of a row lie side by side; strides are from row to row, in elements.
    """

    rows: int
    outputs: int
    inputs: int
    x_stride: int
    matrix_stride: int
    output_stride: int


@dataclass(frozen=True, slots=True)
class Offer:
    """One way to compute a product. `tile` is a cublasLtMatmulTile_t, `waves` its tiles for each multiprocessor,
    `splits` the parts of the inputs that are summed apart."""

    tile: int
    splits: int
    waves: float
    algorithm: Any


@dataclass(frozen=True, slots=True)
class Product:
    """Sizes as the library knows them, of one device."""

    description: ctypes.c_void_p
    layouts: tuple[ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]  # of the matrix, of x, of the output


@cache
def library() -> ctypes.CDLL | None:
    """None where there is none of these versions."""
    for name in _NAMES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


class CublasLt:
    """The library on one device. Launches share a workspace, since a stream computes one product after the other."""

    def __init__(self, device: torch.device) -> None:
        """Raises RuntimeError where the library is missing or gives no handle."""
        found = library()
        if found is None:
            raise RuntimeError(f"none of {', '.join(_NAMES)} is there")
        self._library = found
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        with torch.cuda.device(device):
            self._handle = self._created("cublasLtCreate")

    def product(self, sizes: Sizes) -> Product:
        """Its column-major view: output^T [outputs, rows] = matrix [inputs, outputs]^T x [inputs, rows]."""
        description = self._created("cublasLtMatmulDescCreate", ctypes.c_int(_COMPUTE_32F), ctypes.c_int(_R_32F))
        self._set("cublasLtMatmulDescSetAttribute", description, _DESC_TRANSA, ctypes.c_int32(_TRANSPOSED))
        layouts = (
            self._layout(sizes.inputs, sizes.outputs, sizes.matrix_stride),
            self._layout(sizes.inputs, sizes.rows, sizes.x_stride),
            self._layout(sizes.outputs, sizes.rows, sizes.output_stride),
        )
        return Product(description, layouts)

    def offers(self, product: Product) -> list[Offer]:
        """In the library's order. Pointers are taken to be multiples of 256 bytes."""
        preference = self._created("cublasLtMatmulPreferenceCreate")
        self._set("cublasLtMatmulPreferenceSetAttribute", preference, _PREF_WORKSPACE, ctypes.c_uint64(WORKSPACE_BYTES))
        found, count = (_Heuristic * _MOST_OFFERS)(), ctypes.c_int()
        matrix, x, output = product.layouts
        self._call(
            "cublasLtMatmulAlgoGetHeuristic", self._handle, product.description, matrix, x, output, output, preference,
            ctypes.c_int(_MOST_OFFERS), found, ctypes.byref(count),
        )  # fmt: skip
        self._call("cublasLtMatmulPreferenceDestroy", preference)
        return [
            Offer(
                tile=self._configured(each.algorithm, _CONFIG_TILE),
                splits=self._configured(each.algorithm, _CONFIG_SPLITS),
                waves=each.waves,
                algorithm=each.algorithm,
            )
            for each in list(found)[: count.value]
            if each.state == 0
        ]

    def launch(self, product: Product, offer: Offer, x: Tensor, matrix: Tensor, output: Tensor) -> None:
        """On the current stream of the current device, which is this one's."""
        stream = torch.cuda.current_stream().cuda_stream
        check_compute_stream(stream)  # the workspace is one
        of_matrix, of_x, of_output = product.layouts
        written = ctypes.c_void_p(output.data_ptr())
        self._call(
            "cublasLtMatmul", self._handle, product.description,
            ctypes.byref(self._one), ctypes.c_void_p(matrix.data_ptr()), of_matrix,
            ctypes.c_void_p(x.data_ptr()), of_x, ctypes.byref(self._zero), written, of_output, written, of_output,
            offer.algorithm, ctypes.c_void_p(self._workspace.data_ptr()), ctypes.c_size_t(WORKSPACE_BYTES),
            ctypes.c_void_p(stream),
        )  # fmt: skip

    def _layout(self, rows: int, columns: int, stride: int) -> ctypes.c_void_p:
        return self._created(
            "cublasLtMatrixLayoutCreate", ctypes.c_int(_R_16BF), ctypes.c_uint64(rows), ctypes.c_uint64(columns),
            ctypes.c_int64(stride),
        )  # fmt: skip

    def _configured(self, algorithm: Any, attribute: int) -> int:
        value, written = ctypes.c_int32(), ctypes.c_size_t()
        self._call(
            "cublasLtMatmulAlgoConfigGetAttribute", algorithm, ctypes.c_int(attribute), ctypes.byref(value),
            ctypes.c_size_t(ctypes.sizeof(value)), ctypes.byref(written),
        )  # fmt: skip
        return value.value

    def _created(self, function: str, *arguments: Any) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self._call(function, ctypes.byref(made), *arguments)
        return made

    def _set(self, function: str, owner: ctypes.c_void_p, attribute: int, value: Any) -> None:
        self._call(function, owner, ctypes.c_int(attribute), ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))

    def _call(self, function: str, *arguments: Any) -> None:
        status = getattr(self._library, function)(*arguments)
        if status:
            raise RuntimeError(f"{function} of cuBLASLt: status {status}")


def strided(x: Tensor, matrix: Tensor, output: Tensor) -> Sizes:
    """The sizes of a product of these."""
    rows, inputs = x.shape
    return Sizes(rows, matrix.shape[0], inputs, x.stride(0), matrix.stride(0), output.stride(0))


def fits(tensors: Sequence[Tensor]) -> bool:
    """Whether these are as `offers` takes them to be: bfloat16, rows of neighbours, multiples of 256 bytes."""
    return all(
        each.dtype == torch.bfloat16 and each.stride(1) == 1 and each.stride(0) % 8 == 0 and each.data_ptr() % 256 == 0
        for each in tensors
    )
