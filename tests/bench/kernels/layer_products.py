"""On one Hopper GPU: the linear layers of a decoder layer, one after the other with the norms between them, us a layer.

    python tests/bench layer_products [--models 31B E4B] [--formats bf16 int4 fp8]
        [--rows 1 8 32]

In captured graphs over several layers' weights, which come from memory as a step's do. qkv, o, norm, gate_up with GELU,
down, norm; without attention. First line of each case: o and down whole, then in parts that the norm adds; then every
other division of one matrix (tile x parts) with the others as they are. The floor is bytes at --bandwidth.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from bench.kernels.elementwise_speed import microseconds
from bench.kernels.linear_speed import fp8_matrix, int4_matrix
from modelserve.sizing.backends.products import INTEGER_ROWS
from modelserve_worker.kernels.elementwise.elementwise_triton import TritonElementwise
from modelserve_worker.kernels.products.hopper import linear_rows_sm90
from modelserve_worker.kernels.products.hopper.integer_rows_sm90 import integer_rows
from modelserve_worker.kernels.products.hopper.linear_rows_sm90 import (
    RowsKernel,
    dense_rows,
    fp8_rows,
    int4_rows,
    kernel_for,
)
from modelserve_worker.kernels.products.int4_linear import Int4Tiles

CUDA = torch.device("cuda")
LAYERS = {"31B": 3, "E4B": 8}  # together larger than any cache
WIDTHS = {"31B": (5376, 16384, 8192, 21504), "E4B": (2560, 3072, 2048, 10240)}  # hidden, qkv, o's inputs, inner


def int4_product(x: Tensor, matrix: Int4Tiles, **how: bool) -> Tensor:
    return (integer_rows if len(x) <= INTEGER_ROWS[-1] else int4_rows)(x, matrix, **how)


FORMATS: dict[str, tuple[Callable[[int, int], Any], Callable[..., Tensor], float]] = {
    "bf16": (lambda n, k: torch.randn(n, k, device=CUDA, dtype=torch.bfloat16) * k**-0.5, dense_rows, 2.0),
    "int4": (int4_matrix, int4_product, 0.5 + 2 / 32),
    "fp8": (fp8_matrix, fp8_rows, 1.0),
}
SPLIT = ("o", "down")
DIVISIONS = [(tile, parts) for tile in (128, 64, 32) for parts in (1, 2, 3, 4)]


class Chain:
    """Layers of one model in one format, and the division of each matrix that is not the kernel's own choice."""

    def __init__(self, model: str, fmt: str, rows: int) -> None:
        hidden, qkv, attended, inner = WIDTHS[model]
        make, self.product, bytes_each = FORMATS[fmt]
        sizes = {"qkv": (qkv, hidden), "o": (hidden, attended), "gate_up": (2 * inner, hidden), "down": (hidden, inner)}
        self.layers = [{name: make(*size) for name, size in sizes.items()} for _ in range(LAYERS[model])]
        self.bytes = bytes_each * sum(outputs * inputs for outputs, inputs in sizes.values())
        self.x, self.attended = (torch.randn(rows, n, device=CUDA).bfloat16() for n in (hidden, attended))
        self.weight = torch.ones(hidden, device=CUDA).bfloat16()
        self.scalar = torch.full((1,), 0.5, device=CUDA).bfloat16()
        self.divided: dict[str, tuple[int, int]] = {}
        self.split = True

    def run(self) -> None:
        backend, normed, x = TritonElementwise(), self.x, self.x.clone()
        norms = {"scalar": self.scalar, "next_weight": self.weight, "eps": 1e-6}
        for layer in self.layers:
            self.multiply("qkv", normed, layer)
            for name, inputs in (("o", self.attended), ("down", None)):
                if inputs is None:
                    inputs = self.multiply("gate_up", normed, layer, gated=True)
                delta = self.multiply(name, inputs, layer, split=self.split)
                x, following = backend.residual_norm(x, delta, self.weight, **norms)
                assert following is not None
                normed = following

    def multiply(self, name: str, x: Tensor, layer: dict[str, Any], **how: bool) -> Tensor:
        def chosen(rows: int, matrix_rows: int, **options: Any) -> RowsKernel:
            kernel = kernel_for(rows, matrix_rows, **options)
            tile, parts = self.divided.get(name, (kernel.tile, kernel.parts))
            return replace(kernel, tile=tile, parts=parts)

        with mock.patch.object(linear_rows_sm90, "kernel_for", chosen):
            return self.product(x, layer[name], **how)

    def microseconds(self, *, split: bool = True, **divided: tuple[int, int]) -> float:
        self.split, self.divided = split, divided
        return microseconds([self.run]) / len(self.layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(WIDTHS), choices=WIDTHS)
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--bandwidth", type=float, default=4.3e12, help="bytes a second; the default is an H200's")
    options = parser.parse_args()
    warm, began = torch.randn(8192, 8192, device=CUDA).bfloat16(), time.monotonic()
    while time.monotonic() - began < 1.5:  # from idle clocks to those of a step
        warm @ warm
        torch.cuda.synchronize()
    for model in options.models:
        for fmt in options.formats:
            for rows in options.rows:
                chain = Chain(model, fmt, rows)
                floor = 1e6 * chain.bytes / options.bandwidth
                whole, split = (chain.microseconds(split=each) for each in (False, True))
                print(f"{model} {fmt} {rows} rows: floor {floor:.1f}, whole {whole:.1f}, in parts {split:.1f}")
                for name in ("qkv", "o", "gate_up", "down"):
                    others = [each for each in DIVISIONS if each[1] == 1 or name in SPLIT]
                    others = [each for each in others if fmt != "int4" or each[0] > 32]
                    found = [f"{each[0]}x{each[1]} {chain.microseconds(**{name: each}):.1f}" for each in others]
                    print(f"  {name}: {', '.join(found)}", flush=True)
