"""On one GPU: are the kernels of quantised linear layers right there, and which tile is fastest for which shape?

    python tests/bench linear_speed [--formats int4 fp8] [--models 31B E4B] [--rows 1 8 ...]

First every kernel and tile is compared with float64 on fresh random inputs. Then each is timed inside a CUDA graph of
many calls on weights of their own, so that these come from memory and not from the cache. Every time goes to
$OUT/linear_speed.txt where OUT is set; the table comes last: for each shape and number of rows the fastest tile, its
share of the floor (the larger of bytes by --bandwidth and operations by --flops), that of the way in use
(`linear_tiles.py`, `linear_rows_sm90.py` and `linear_int4_sm90.py` of `kernels/products`), and on bfloat16 weights
cuBLAS and, up to 32 rows on Hopper, our kernel. Exits 1 when a comparison fails.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from plain_products import fp8_elements, int4_elements, int4_zero_points
from torch import Tensor
from torch.nn import functional

from bench.kernels.kernel_speed import microseconds
from modelserve.sizing.backends.generations import FP8_CAPABILITY, HOPPER
from modelserve.sizing.backends.products import INTEGER_ROWS, most_fused_rows
from modelserve.sizing.weights.quantised_tiles import fp8_inputs, int4_tiles, nvfp4_tiles
from modelserve_worker.kernels.products.fp8_linear import SCALE_BLOCK, Fp8Pairs, e4m3_precision
from modelserve_worker.kernels.products.fp8_linear_triton import fp8_product_with, rounded_inputs
from modelserve_worker.kernels.products.hopper.integer_rows_sm90 import integer_rows
from modelserve_worker.kernels.products.hopper.linear_int4_sm90 import int4_product
from modelserve_worker.kernels.products.hopper.linear_rows_sm90 import ROWS, dense_rows, fp8_rows, int4_rows
from modelserve_worker.kernels.products.int4_linear import Int4Tiles
from modelserve_worker.kernels.products.int4_linear_triton import int4_dequantised_product, int4_product_with
from modelserve_worker.kernels.products.linear_tiles import FEW_ROWS, LinearTile, SharedBuffers, linear_tile
from modelserve_worker.kernels.products.nvfp4_linear import GROUPS, Nvfp4Tiles

CUDA = torch.device("cuda")
SHAPES = {  # outputs x inputs of the fused matrices
    "31B": {"qkv": (16384, 5376), "o": (5376, 8192), "gate_up": (43008, 5376), "down": (5376, 21504)},
    "E4B": {"qkv": (3072, 2560), "o": (2560, 2048), "gate_up": (20480, 2560), "down": (2560, 10240)},
}
SHARED = SharedBuffers(CUDA)
STREAMED = "own"  # kernels for Hopper alone
PASS_BYTES, MOST_CALLS = 400_000_000, 64  # of one graph: several times the cache of any GPU
TOLERANCE = 8e-3  # of products of bfloat16 elements, each rounded
Product = Callable[[Tensor], Tensor]


def variants(fmt: str, rows: int) -> Iterator[tuple[str, LinearTile]]:
    """Tiles to try, by name: outputs x rows of a block, warps, stages, programs that share the inputs."""
    if rows <= FEW_ROWS:
        block = 8 if rows <= 8 else 16
        for outputs, warps, stages in ((32, 2, 3), (32, 2, 5), (64, 2, 3), (64, 2, 4), (64, 4, 4), (128, 4, 3)):
            for programs in (384, 512, 1024, 1536):
                name = f"{outputs}x{block} w{warps} s{stages} p{programs}"
                yield name, LinearTile(outputs, block, warps, stages, programs, few=True)
    if rows > 8:
        for outputs, block, warps, stages, programs in (
            (64, 32, 4, 3, 528), (64, 64, 4, 3, 264), (128, 32, 8, 3, 264), (128, 64, 8, 3, 264), (128, 64, 4, 3, 264),
            (64, 128, 4, 3, 264), (128, 128, 8, 2, 240), (128, 128, 8, 3, 240), (128, 256, 8, 2, 120),
        ):  # fmt: skip
            if block <= 2 * rows and not (fmt == "int4" and stages == 3 and block >= 128):  # shared memory
                yield (
                    f"{outputs}x{block} w{warps} s{stages} p{programs}",
                    LinearTile(outputs, block, warps, stages, programs),
                )


def int4_matrix(outputs: int, inputs: int, group: int = 32, *, zeros: bool = False) -> Int4Tiles:
    tiles = int4_tiles(inputs)
    words = torch.randint(-(2**31), 2**31, (tiles, outputs, 32), device=CUDA).to(torch.int32)
    scales = (0.02 * torch.rand((tiles, 256 // group, outputs), device=CUDA) * inputs**-0.5).bfloat16()
    points = int4_zero_points(tiles, 256 // group, outputs, device=CUDA) if zeros else None
    return Int4Tiles(words, scales, points, inputs)


def nvfp4_matrix(outputs: int, inputs: int) -> Nvfp4Tiles:
    tiles = nvfp4_tiles(inputs)
    words = torch.randint(-(2**31), 2**31, (tiles, outputs, 32), device=CUDA).to(torch.int32)
    codes = torch.randint(88, 112, (tiles, GROUPS, outputs), device=CUDA, dtype=torch.uint8)  # from 2 to 16
    scales = torch.rand(outputs, device=CUDA) * inputs**-0.5 / 20
    return Nvfp4Tiles(words, codes, scales, inputs)


def fp8_matrix(outputs: int, inputs: int) -> Fp8Pairs:
    elements = (torch.randn((outputs, fp8_inputs(inputs)), device=CUDA) * 64).to(torch.float8_e4m3fn)
    scales = torch.rand(outputs, device=CUDA) * inputs**-0.5 / 64
    return Fp8Pairs(elements, scales, inputs, 0, True)


def products(fmt: str, rows: int, capability: int) -> Iterator[tuple[str, Callable[[Int4Tiles | Fp8Pairs], Product]]]:
    """Ways to multiply, by name; those whose tile the GPU cannot hold fail when they are called."""
    for name, tile in variants(fmt, rows):
        if fmt == "int4":
            yield name, lambda matrix, tile=tile: lambda x: int4_product_with(x, matrix, tile, shared=SHARED)
        else:
            yield name, lambda matrix, tile=tile: lambda x: fp8_product_with(x, matrix, tile, shared=SHARED)
    if capability == HOPPER and fmt == "int4" and rows <= INTEGER_ROWS[-1]:
        yield STREAMED, lambda matrix: lambda x: integer_rows(x, matrix)
    elif capability == HOPPER and rows <= ROWS[-1]:
        yield STREAMED, lambda matrix: lambda x: int4_rows(x, matrix) if fmt == "int4" else fp8_rows(x, matrix)
    elif capability == HOPPER and fmt == "int4":
        yield STREAMED, lambda matrix: lambda x: int4_product(x, matrix, shared=SHARED)
    if fmt == "int4" and rows >= 256:
        yield "dequantised", lambda matrix: lambda x: int4_dequantised_product(x, matrix, shared=SHARED)
    if fmt == "fp8" and rows > 8 and capability >= FP8_CAPABILITY:
        for fast in (False, True):
            yield (
                f"scaled_mm{' fast sums' if fast else ''}",
                lambda matrix, fast=fast: lambda x: scaled(x, matrix, fast),
            )


def scaled(x: Tensor, matrix: Fp8Pairs, fast: bool) -> Tensor:
    rounded, scales = rounded_inputs(x)
    return torch._scaled_mm(
        rounded, matrix.elements.t(), scale_a=scales, scale_b=matrix.scales.unsqueeze(0), out_dtype=x.dtype,
        use_fast_accum=fast,
    )  # fmt: skip


def chosen(fmt: str, rows: int, capability: int) -> str:
    """Name of the way that serving takes."""
    if capability == HOPPER and (rows <= ROWS[-1] or fmt == "int4"):
        return STREAMED
    if fmt == "int4" and rows > most_fused_rows(capability):
        return "dequantised"
    if fmt == "fp8" and rows > FEW_ROWS and capability >= FP8_CAPABILITY:
        return "scaled_mm fast sums"
    tile = linear_tile(fmt, rows, capability=capability)
    return f"{tile.outputs}x{tile.rows} w{tile.warps} s{tile.stages} p{tile.programs}"


def wrong(fmt: str, capability: int) -> Iterator[str]:
    """Products that are not near float64's; one line each. Inputs in part of a tile, rows in part of a block."""
    for rows in (1, 7, 16, 100, 300):
        for outputs, inputs in ((272, 1536), (528, 2112)):
            matrix = int4_matrix(outputs, inputs) if fmt == "int4" else fp8_matrix(outputs, inputs)
            reference = int4_elements if fmt == "int4" else fp8_elements
            x = torch.randn((rows, inputs), device=CUDA).bfloat16()
            expected = (x if fmt == "int4" else e4m3_precision(x)).double() @ reference(matrix, torch.float64).t()
            for name, product in products(fmt, rows, capability):
                if name == STREAMED and fmt == "fp8" and inputs % SCALE_BLOCK:
                    continue  # not in whole blocks, which Triton's kernel takes
                try:
                    output = product(matrix)(x)
                except Exception as error:  # a tile that this GPU cannot hold
                    yield f"{fmt} {name}: {type(error).__name__} {str(error)[:80]}"
                    continue
                error = float((output.double() - expected).norm() / expected.norm())
                if not error < TOLERANCE:
                    yield f"{fmt} {name} {rows} x {inputs} -> {outputs}: {error:.1e} of the norm: WRONG"
                if not torch.equal(output, product(matrix)(x)):
                    yield f"{fmt} {name} {rows} x {inputs} -> {outputs}: two calls differ: WRONG"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=["int4", "fp8"], choices=["int4", "fp8"])
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 64, 512, 1024, 8192])
    parser.add_argument("--bandwidth", type=float, default=4.3e12, help="bytes a second; the default is an H200's")
    parser.add_argument("--flops", type=float, default=790e12, help="bfloat16 operations a second")
    arguments = parser.parse_args()
    major, minor = torch.cuda.get_device_capability()
    capability = 10 * major + minor
    faults = [line for fmt in arguments.formats for line in wrong(fmt, capability)]
    print(*faults, sep="\n")
    log = (Path(os.environ["OUT"]) / "linear_speed.txt").open("w") if "OUT" in os.environ else sys.stderr
    table = []
    for model in arguments.models:
        for layer, (outputs, inputs) in SHAPES[model].items():
            table += measured(f"{model} {layer}", outputs, inputs, arguments, capability, log)
    print(
        f"{torch.cuda.get_device_name()}, {arguments.bandwidth / 1e12:.1f} TB/s, {arguments.flops / 1e12:.0f} TFLOP/s"
    )
    headings = f"{'shape':14}{'format':>7}{'rows':>6}{'us':>9}{'floor':>7}  {'fastest':24}{'in use':>9}"
    print(f"{headings}{'cuBLAS bf16':>13}{'ours bf16':>11}")
    print(*table, sep="\n")
    return int(any("WRONG" in line for line in faults))


def measured(
    shape: str, outputs: int, inputs: int, arguments: argparse.Namespace, capability: int, log: object
) -> Iterator[str]:
    """Lines of the table for one shape."""
    stored = {"int4": outputs * inputs * (0.5 + 2 / 32), "fp8": outputs * (inputs + 4.0)}
    dense_bytes = 2 * outputs * inputs
    weights = [torch.randn((outputs, inputs), device=CUDA).bfloat16() for _ in range(copies(dense_bytes))]
    dense, ours = {}, {}
    for rows in arguments.rows:
        x = torch.randn((rows, inputs), device=CUDA).bfloat16()
        dense[rows] = microseconds([partial(functional.linear, x, w) for w in weights])
        if capability == HOPPER and rows <= ROWS[-1]:
            ours[rows] = microseconds([partial(dense_rows, x, w) for w in weights])
    del weights
    for fmt in arguments.formats:
        make = int4_matrix if fmt == "int4" else fp8_matrix
        matrices = [make(outputs, inputs) for _ in range(copies(stored[fmt]))]
        for rows in arguments.rows:
            x = torch.randn((rows, inputs), device=CUDA).bfloat16()
            times = {}
            large = rows > most_fused_rows(80) and (fmt == "int4" or capability >= FP8_CAPABILITY)
            for name, product in products(fmt, rows, capability):
                if large and not name.startswith(("dequantised", "scaled")):
                    continue
                try:
                    times[name] = microseconds([partial(product(m), x) for m in matrices])
                except Exception:
                    continue  # named above
                print(f"{shape} {fmt} {rows} {name} {times[name]:.2f}", file=log, flush=True)
            best = min(times, key=lambda name: times[name])
            moved = stored[fmt] + 2 * rows * (inputs + outputs)
            floor = 1e6 * max(moved / arguments.bandwidth, 2 * rows * outputs * inputs / arguments.flops)
            used = times.get(chosen(fmt, rows, capability), float("nan"))
            yield (
                f"{shape:14}{fmt:>7}{rows:6}{times[best]:9.1f}{floor / times[best]:7.0%}  {best:24}{used:9.1f}"
                f"{dense[rows]:13.1f}{ours.get(rows, float('nan')):11.1f}"
            )


def copies(size: float) -> int:
    return int(min(MOST_CALLS, max(2, PASS_BYTES // size)))
