"""On one Hopper GPU: products of tens of rows in bfloat16, cuBLAS's and every division of `cluster_rows_sm90.cu`.

    python tests/bench cluster_rows_speed [--models E4B 31B] [--rows 64 96 128]
        [--seconds 60]

First every division that is timed is compared with float64. Then, for each matrix and number of rows, the fastest are
printed in us with the norm before the product, in captured graphs over weights that come from memory, between two times
of cuBLAS, with GELU where the matrix has it. A division is tile x parts. Last, layers' products and norms by cuBLAS and
by the fastest divisions, in turns.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from bench.kernels.elementwise_speed import EPS, KERNELS, microseconds
from modelserve_worker.kernels.compiling.cuda_kernel import kept
from modelserve_worker.kernels.products.hopper import cluster_rows_sm90
from modelserve_worker.kernels.products.hopper.cluster_rows_sm90 import AT_ONCE, ROWS, ClusterKernel, cluster_rows
from modelserve_worker.kernels.products.linear_tiles import busy

CUDA = torch.device("cuda")
SHAPES = {  # outputs x inputs, of layers' matrices in their order and of others
    "E4B": {
        "qkv": (3072, 2560), "o": (2560, 2048), "gate_up": (20480, 2560), "down": (2560, 10240),
        "ple_gate": (256, 2560), "ple_proj": (2560, 256), "q": (2048, 2560), "qkv_g": (6144, 2560), "o_g": (2560, 4096),
    },
    "26B": {"qkv": (8192, 2816), "o": (2816, 4096), "gate_up": (4224, 2816), "down": (2816, 2112), "o_g": (2816, 8192)},
    "31B": {"qkv": (16384, 5376), "o": (5376, 8192), "gate_up": (43008, 5376), "down": (5376, 21504)},
}  # fmt: skip
PASS_BYTES, MOST_CALLS, REPLAYS = 350_000_000, 48, 7
POOL = 520_000_000  # elements that matrices are taken from
NORMED = 256  # numbers that are normed before a product, whatever its inputs: one kernel is ahead of all
LEAST_BUSY, LEAST_BLOCKS, MOST_X, MOST_TRIED = 0.55, 60, 4.5, 14


def divisions(shape: tuple[int, int], rows: int, *, gated: bool) -> list[ClusterKernel]:
    """Those that leave few multiprocessors without work and read x not too often, by a cost of bytes, best first."""
    matrix_rows, inputs = shape
    bucket = next(most for most in ROWS if rows <= most)
    found = []
    for tile in range(32, 257, 32):
        for parts in range(1, 9):
            tiles = -(-matrix_rows // tile)
            if tiles * rows > MOST_X * matrix_rows or inputs // 64 < parts:
                continue
            kernel = ClusterKernel(tile, parts, bucket, gated)
            blocks, at_once = tiles * parts, AT_ONCE[parts]
            used = busy(blocks, at_once)
            if (blocks > at_once and parts > 1) or (used < LEAST_BUSY and blocks < LEAST_BLOCKS and parts < 8):
                continue
            moved, x = matrix_rows * inputs, tiles * rows * inputs
            # By bytes, and as if parts cost more and x less.
            costs = ((0.7 * x + moved) / used + 8e5 * (parts - 1), (0.3 * x + moved) / used + 3e6 * (parts - 1))
            found.append((costs, kernel))
    tried = [sorted(found, key=lambda each: each[0][way])[:MOST_TRIED] for way in (0, 1)]
    return list(dict.fromkeys(kernel for each in tried for _, kernel in each))


def named(kernel: ClusterKernel) -> str:
    return f"{kernel.tile}x{kernel.parts}"


def with_kernel(kernel: ClusterKernel, x: Tensor, weight: Tensor) -> Tensor:
    with mock.patch.object(cluster_rows_sm90, "kernel_for", return_value=kernel):
        return cluster_rows(x, weight, gated=kernel.gated)


def library(x: Tensor, weight: Tensor, *, gated: bool) -> Tensor:
    product = functional.linear(x, weight)
    return KERNELS.gated_gelu(product) if gated else product


def wrong(kernel: ClusterKernel) -> Iterator[str]:
    """Uneven numbers of tiles and of blocks, rows that fill no warp."""
    for rows in (33, kernel.rows - 3, kernel.rows):
        weight = (torch.randn(1072, 1216, device=CUDA) * 1216**-0.5).bfloat16()
        x = torch.randn(rows, 1216, device=CUDA).bfloat16()
        wanted = x.double() @ weight.double().t()
        if kernel.gated:
            gate, up = wanted.bfloat16().double().chunk(2, dim=1)
            wanted = functional.gelu(gate, approximate="tanh") * up
        output = with_kernel(kernel, x, weight)
        error = float(((output.double() - wanted).norm(dim=1) / wanted.norm(dim=1)).max())
        if not error < 8e-3:
            yield f"{named(kernel)} {kernel.rows} {kernel.gated} at {rows} rows: {error:.1e}"
        if not all(torch.equal(with_kernel(kernel, x, weight), output) for _ in range(4)):
            yield f"{named(kernel)} {kernel.rows} {kernel.gated} at {rows} rows: bits differ"


class Case:
    def __init__(self, shape: tuple[int, int], rows: int, *, gated: bool, pool: Tensor) -> None:
        outputs, inputs = shape
        size = outputs * inputs
        count = min(MOST_CALLS, POOL // size, max(2, PASS_BYTES // (2 * size)))
        self.matrices = [pool[i * size : (i + 1) * size].view(outputs, inputs) for i in range(count)]
        self.x = torch.randn(rows, inputs, device=CUDA).bfloat16()
        self.weight = torch.ones(NORMED, device=CUDA).bfloat16()
        self.gated = gated

    def time(self, kernel: ClusterKernel | None) -> float:
        def call(matrix: Tensor) -> Tensor:
            x = KERNELS.rms_norm(self.x.view(-1, NORMED), self.weight, eps=EPS).view(self.x.shape)
            if kernel is None:
                return library(x, matrix, gated=self.gated)
            return with_kernel(kernel, x, matrix)

        return microseconds([lambda matrix=matrix: call(matrix) for matrix in self.matrices], replays=REPLAYS)


def layers(model: str, rows: int, best: dict[str, ClusterKernel | None], pool: Tensor, *, ours: bool) -> float:
    """us a layer of qkv, o, norm, gate_up, down, norm, over several layers' weights."""
    shapes = {name: SHAPES[model][name] for name in ("qkv", "o", "gate_up", "down")}
    size = sum(outputs * inputs for outputs, inputs in shapes.values())
    count = max(2, min(6, POOL // size))
    hidden, attended = shapes["qkv"][1], shapes["o"][1]
    x, attention = (torch.randn(rows, n, device=CUDA).bfloat16() for n in (hidden, attended))
    weight, scalar = torch.ones(hidden, device=CUDA).bfloat16(), torch.full((1,), 0.5, device=CUDA).bfloat16()

    def run() -> None:
        at, residual, normed = 0, x.clone(), x
        for _ in range(count):
            matrices = {}
            for name, (outputs, inputs) in shapes.items():
                at = at if at + outputs * inputs <= POOL else 0
                matrices[name] = pool[at : at + outputs * inputs].view(outputs, inputs)
                at += outputs * inputs

            def multiply(name: str, rows_of: Tensor, matrices: dict[str, Tensor] = matrices) -> Tensor:
                kernel = best.get(name) if ours else None
                if kernel is None:
                    return library(rows_of, matrices[name], gated=name == "gate_up")
                return with_kernel(kernel, rows_of, matrices[name])

            multiply("qkv", normed)
            for inputs in (attention, None):
                inner = multiply("gate_up", normed) if inputs is None else inputs
                delta = multiply("down" if inputs is None else "o", inner)
                residual, normed = KERNELS.residual_norm(
                    residual, delta, weight, scalar=scalar, next_weight=weight, eps=EPS
                )

    return microseconds([run], replays=REPLAYS) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--rows", type=int, nargs="+", default=[128, 64, 96])
    parser.add_argument("--seconds", type=float, default=1e9, help="after which nothing more is begun")
    options = parser.parse_args()
    began = time.monotonic()
    cases = [
        (model, name, rows, divisions(shape, rows, gated=name == "gate_up"))
        for rows in options.rows for model in options.models for name, shape in SHAPES[model].items()
    ]  # fmt: skip
    kernels = list(dict.fromkeys(kernel for *_, each in cases for kernel in each))
    with ProcessPoolExecutor(min(14, os.cpu_count() or 1), mp_context=get_context("spawn")) as workers:
        building = workers.map(kept, [kernel.source for kernel in kernels], chunksize=4)
        pool = torch.randn(POOL, device=CUDA, dtype=torch.bfloat16).mul_(0.02)
        for model in options.models:  # compiled meanwhile
            layers(model, options.rows[0], {}, pool, ours=False)
        list(building)
    print(f"{torch.cuda.get_device_name()}: {len(kernels)} kernels, {time.monotonic() - began:.0f} s", flush=True)
    faults = {line.split(" at ")[0]: line for kernel in kernels for line in wrong(kernel)}
    print(f"{len(faults)} kernels wrong, {time.monotonic() - began:.0f} s", *list(faults.values())[:5], sep="\n")
    warm, heated = torch.randn(8192, 8192, device=CUDA).bfloat16(), time.monotonic()
    while time.monotonic() - heated < 1:
        warm @ warm
        torch.cuda.synchronize()
    best: dict[tuple[str, int], dict[str, ClusterKernel | None]] = {}
    lines: dict[tuple[str, str], str] = {}
    for model, name, rows, tried in cases:
        if time.monotonic() - began > options.seconds:
            break
        case = Case(SHAPES[model][name], rows, gated=name == "gate_up", pool=pool)
        before = case.time(None)
        times = {kernel: case.time(kernel) for kernel in tried}
        after = case.time(None)
        fastest = sorted(times, key=times.__getitem__)
        wins = bool(fastest) and times[fastest[0]] < min(before, after)
        best.setdefault((model, rows), {})[name] = fastest[0] if wins else None
        found = " ".join(f"{named(kernel)}:{times[kernel]:.1f}" for kernel in fastest[:5])
        lines[model, name] = lines.get((model, name), "") + f" | {rows}: {before:.1f} {after:.1f} > {found}"
    for (model, name), line in lines.items():
        print(f"{model} {name}{line}")
    print(f"{time.monotonic() - began:.0f} s")
    for (model, rows), chosen in best.items():
        if "down" not in chosen or time.monotonic() - began > options.seconds + 8:
            continue
        turns = [layers(model, rows, chosen, pool, ours=ours) for ours in (False, True) * 3]
        print(f"layer {model} {rows}: cuBLAS, ours in turns " + " ".join(f"{each:.1f}" for each in turns), flush=True)
