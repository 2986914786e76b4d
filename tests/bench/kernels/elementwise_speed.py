"""On one GPU: microseconds of every elementwise kernel inside a CUDA graph, and its share of the floor.

    python tests/bench elementwise_speed [--rows 1 64 8192] [--bandwidth 4.3e12]

The floor is one read of every input and one write of every output at the given bytes a second. A graph holds many calls
on buffers of their own, as a step has them, so that large inputs come from memory and not from the cache.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from modelserve_worker.kernels.elementwise.elementwise_triton import TritonElementwise

CUDA = torch.device("cuda")
KERNELS = TritonElementwise()
EPS = 1e-6
PASS_BYTES = 400_000_000  # of one graph: several times the cache of any GPU
MOST_CALLS, ROUNDS = 64, 20


def activations(*shape: int) -> Tensor:
    return torch.randn(shape, device=CUDA, dtype=torch.bfloat16)


@dataclass(frozen=True)
class Case:
    """`make(rows)` allocates the inputs of one call and returns that call; `row_bytes` are read and written per row."""

    name: str
    row_bytes: int
    make: Callable[[int], Callable[[], object]]


def residual_norm(width: int) -> Case:
    def make(rows: int) -> Callable[[], object]:
        residual, delta, weight = activations(rows, width), activations(rows, width), activations(width)
        scalar = torch.full((1,), 0.5, device=CUDA, dtype=torch.bfloat16)  # or the sum would grow at every replay
        return lambda: KERNELS.residual_norm(residual, delta, weight, scalar=scalar, next_weight=weight, eps=EPS)

    return Case(f"residual_norm {width}", 4 * 2 * width, make)


def rms_norm(width: int) -> Case:
    def make(rows: int) -> Callable[[], object]:
        x, weight = activations(rows, width), activations(width)
        return lambda: KERNELS.rms_norm(x, weight, eps=EPS)

    return Case(f"rms_norm {width}", 2 * 2 * width, make)


def gated_gelu(width: int) -> Case:
    def make(rows: int) -> Callable[[], object]:
        gate_up = activations(rows, 2 * width)
        return lambda: KERNELS.gated_gelu(gate_up)

    return Case(f"gated_gelu {width}", 3 * 2 * width, make)


def per_layer_inputs(layers: int, width: int) -> Case:
    def make(rows: int) -> Callable[[], object]:
        projected, looked_up = activations(rows, layers * width), activations(rows, layers * width)
        weight = activations(width)
        return lambda: KERNELS.per_layer_inputs(projected, looked_up, weight, projection_scale=0.02, eps=EPS)

    return Case(f"per_layer_inputs {layers}x{width}", 3 * 2 * layers * width, make)


def embed(width: int) -> Case:
    def make(rows: int) -> Callable[[], object]:
        table, ids = activations(4096, width), torch.randint(4096, (rows,), device=CUDA, dtype=torch.int32)
        return lambda: KERNELS.embed(ids, table, scale=50.0)

    return Case(f"embed {width}", 2 * 2 * width, make)


CASES = (
    residual_norm(2560), residual_norm(5376), rms_norm(5376), gated_gelu(10240), gated_gelu(21504),
    per_layer_inputs(42, 256), embed(5376),
)  # fmt: skip


def captured(calls: list[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """One graph of all calls, in order; the first one is run before, to be compiled."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def microseconds(calls: list[Callable[[], object]], *, replays: int = ROUNDS) -> float:
    """Median over replays of the time of one of the calls."""
    graph, times = captured(calls), []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def measured(case: Case, rows: int) -> float:
    """Microseconds of one call of the case."""
    count = min(MOST_CALLS, max(4, PASS_BYTES // (rows * case.row_bytes)))
    return microseconds([case.make(rows) for _ in range(count)])  # kept: they own the inputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 8192])
    parser.add_argument("--bandwidth", type=float, default=4.3e12, help="bytes a second; the default is an H200's")
    chosen = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, bfloat16, {chosen.bandwidth / 1e12:.1f} TB/s")
    print(f"{'kernel':24}{'rows':>7}{'us':>10}{'of the floor':>14}")
    for case in CASES:
        for rows in chosen.rows:
            taken = measured(case, rows)
            floor = rows * case.row_bytes / chosen.bandwidth * 1e6
            print(f"{case.name:24}{rows:7}{taken:10.2f}{floor / taken:14.0%}")
