"""On one Hopper GPU: what each tile that cuBLASLt offers makes of products of many rows while the GPU is at its limit.

    PYTHONPATH=operator:worker:tests/gpu python tests/gpu/product_tiles.py [--models 31B E4B]
        [--rows 1024 2048 8192] [--ms 20]

Every offer, PyTorch's own product and the one that `kernels/many_rows.py` chooses are timed in turns, each for --ms in
captured graphs over matrices that no cache holds, three times; medians. First whether all offers that do not split the
inputs give the same bits. A line for each product; last, rates of tiles fitted to all of them (`RATES`): time is turns
of the multiprocessors over rate, and what each product's own circumstances are drops out.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial

import torch
from layer_products import WIDTHS

from modelserve_worker.kernels.cublaslt import CublasLt, Offer, strided
from modelserve_worker.kernels.many_rows import RATES, chosen

CUDA = torch.device("cuda")
ROUNDS = 3
BASE = 23  # the tile whose rate is 1


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def microseconds(graph: torch.cuda.CUDAGraph, ms: float) -> float:
    def timed(replays: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        return 1e3 * begin.elapsed_time(end) / replays

    return timed(max(1, int(ms * 1e3 / timed(1))))


def fitted(timed: list[tuple[int, float, float, str]]) -> dict[int, float]:
    """Rates by tile from (tile, waves, us, product), in turns: of tiles given products, of products given tiles."""
    work = [(tile, math.log(us * waves / math.ceil(waves - 1e-3)), product) for tile, waves, us, product in timed]
    rate, base = defaultdict(float), defaultdict(float)
    for _ in range(100):
        for values, of, other, sign in ((base, 2, rate, 1), (rate, 0, base, -1)):
            found = defaultdict(list)
            for tile, log, product in work:
                found[(tile, log, product)[of]].append(sign * log + (other[tile] if of == 2 else other[product]))
            values.update((key, statistics.median(each)) for key, each in found.items())
    return {tile: math.exp(value - rate[BASE]) for tile, value in sorted(rate.items())}


class Case:
    """One product: its matrices, one after the other, and the ways to compute it."""

    def __init__(self, library: CublasLt, rows: int, outputs: int, inputs: int) -> None:
        count = min(6, 1 + (250 << 20) // (2 * outputs * inputs))
        self.library = library
        self.x = torch.randn(rows, inputs, device=CUDA).bfloat16()
        self.matrices = [torch.randn(outputs, inputs, device=CUDA).bfloat16() * inputs**-0.5 for _ in range(count)]
        self.output = torch.empty(rows, outputs, device=CUDA, dtype=torch.bfloat16)
        self.product = library.product(strided(self.x, self.matrices[0], self.output))
        self.offers = library.offers(self.product)
        self.flops = 2e-6 * rows * outputs * inputs

    def by(self, offer: Offer | None) -> None:
        for matrix in self.matrices:
            if offer is None:
                torch.mm(self.x, matrix.t(), out=self.output)
            else:
                self.library.launch(self.product, offer, self.x, matrix, self.output)

    def same_bits(self) -> bool:
        first = None
        for offer in self.offers:
            self.output.fill_(math.nan)
            self.library.launch(self.product, offer, self.x, self.matrices[0], self.output)
            first = self.output.clone() if first is None and offer.splits <= 1 else first
            if offer.splits <= 1 and not torch.equal(self.output, first):
                return False
        return True

    def times(self, ms: float) -> list[float]:
        """us of each offer, and of PyTorch's product last."""
        graphs = [captured(partial(self.by, offer)) for offer in (*self.offers, None)]
        found = [[microseconds(graph, ms) for graph in graphs] for _ in range(ROUNDS)]
        return [statistics.median(each) / len(self.matrices) for each in zip(*found, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(WIDTHS))
    parser.add_argument("--rows", nargs="+", type=int, default=[1024, 1280, 1536, 1792, 2048, 4096, 8192])
    parser.add_argument("--ms", type=float, default=20)
    options = parser.parse_args()
    library, timed, layers = CublasLt(CUDA), [], defaultdict(list)
    for model, rows in itertools.product(options.models, options.rows):
        hidden, qkv, attended, inner = WIDTHS[model]
        sizes = {"qkv": (qkv, hidden), "o": (hidden, attended), "gate_up": (2 * inner, hidden), "down": (hidden, inner)}
        for name, size in sizes.items():
            case = Case(library, rows, *size)
            same = case.same_bits()
            *us, torch_us = case.times(options.ms)
            choice = us[case.offers.index(chosen(case.offers))]
            layers[model, rows].append((torch_us, choice, min(us)))
            ways = sorted(zip(us, case.offers, strict=True), key=lambda way: way[0])
            best = ", ".join(f"{torch_us / t:.3f} ({o.tile})" for t, o in ways[:3])
            timed += [(offer.tile, offer.waves, t, f"{model} {name} {rows}") for t, offer in ways if offer.splits <= 1]
            print(
                f"{model} {name:8} {rows:5} PyTorch {torch_us:8.1f} us, {case.flops / torch_us:4.0f} TFLOP/s; over it:"
                f" chosen {torch_us / choice:.3f}, best {best}; {'the same bits' if same else 'OTHER BITS'}",
                flush=True,
            )
    for (model, rows), products in layers.items():
        torch_us, choice, fastest = map(sum, zip(*products, strict=True))
        print(
            f"{model} {rows:5} a layer: PyTorch {torch_us:8.1f} us, chosen {choice:8.1f} ({torch_us / choice:.3f}), "
            f"best {fastest:8.1f} ({torch_us / fastest:.3f})"
        )
    counts = Counter(tile for tile, *_ in timed)
    for tile, rate in fitted(timed).items():
        print(f"tile {tile:4}: rate {rate:.3f} of {counts[tile]} offers; in use {RATES.get(tile)}")


if __name__ == "__main__":
    main()
