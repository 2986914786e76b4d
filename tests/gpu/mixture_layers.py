"""On one Hopper GPU: microseconds of a layer of 26B-A4B without attention, by how experts are launched.

    PYTHONPATH=operator:worker:tests/gpu python tests/gpu/mixture_layers.py [--rows 1 8 32 128] [--layers 6]

A captured chain of layers that have matrices of their own: output projection, norm, router, dense MLP, experts, the sum
of both and the next projection of queries, keys and values. Variants take turns, there and back, and each is compared
with the same kernels one after the other, bit by bit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from elementwise_speed import DOORS, EPS, activations, microseconds
from experts_speed import BF16, CUDA, architecture, mixture, placement

sys.path.append(str(Path(__file__).parents[1] / "worker" / "kernels"))
from launch_order import one_after_the_other
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from modelserve.sizing.backends.products import CHOSEN_ROWS, FEW_ROWS, GROUPED_DENSE_ROWS
from modelserve.sizing.backends.resolve import EXPERT_FEW_ROWS, ROUTED_ROWS
from modelserve_worker.kernels.experts import routing_triton
from modelserve_worker.kernels.products.hopper.linear_rows_sm90 import dense_rows
from modelserve_worker.layers.mlp import GatedMLP
from modelserve_worker.layers.moe import MixtureOfExperts

PASSES = 4  # through all layers, of one graph
BANDWIDTH = 4.3e12


def matrix(rows: int, columns: int) -> Tensor:
    return torch.randn((rows, columns), device=CUDA, dtype=BF16) * columns**-0.5


class Layer:
    def __init__(self) -> None:
        a = architecture()
        hidden, width = a.hidden_size, a.intermediate_size
        attended = a.num_attention_heads * a.head_dim
        self.output, self.qkv = matrix(hidden, attended), matrix(2 * attended, hidden)
        self.mixture: MixtureOfExperts = mixture()
        self.mlp = GatedMLP(hidden, width, placement(), down_in_parts=False)
        self.gate_up, self.down = self.mlp.gate_up.matrix.dense(), self.mlp.down.matrix.dense()
        for each in (self.gate_up, self.down):
            each.normal_(std=each.shape[1] ** -0.5)

    @property
    def bytes(self) -> float:
        """Of a row alone."""
        a = architecture()
        dense = sum(each.nbytes for each in (self.output, self.qkv, self.gate_up, self.down))
        expert = 3 * a.moe_intermediate_size * a.hidden_size * 2
        return dense + a.top_k_experts * expert


class Chain:
    def __init__(self, count: int, rows: int) -> None:
        a = architecture()
        self.layers = [Layer() for _ in range(count)]
        self.start = activations(rows, a.hidden_size)
        self.attended = activations(rows, a.num_attention_heads * a.head_dim)
        self.scalar = torch.full((1,), 0.7, device=CUDA, dtype=BF16)

    def run(
        self,
        *,
        streamed: bool = True,
        fused: bool = True,
        settles: bool = False,
        few_rows: int = EXPERT_FEW_ROWS,
        branch_rows: int = GROUPED_DENSE_ROWS,
    ) -> Tensor:
        """`fused`: the norms are the router's, or of many rows the residual's. `settles`: all dense products do."""
        x = self.start.clone()
        few = len(x) <= FEW_ROWS
        product = partial(dense_rows, settles=settles) if few else library
        for layer in self.layers * PASSES:
            moe = layer.mixture
            doors = moe.doors
            doors._streamed_rows = CHOSEN_ROWS if streamed else 0
            moe.experts.few_rows, moe.experts.branch_rows = few_rows, branch_rows
            delta = product(self.attended, layer.output, split=True)
            if fused:
                x, normed, routed = moe.add_and_route(x, delta, moe.pre_norm, moe.pre_norm, None)
            else:
                x, normed = DOORS.residual_norm(
                    x, delta, moe.pre_norm.weight, scalar=None, next_weight=moe.pre_norm.weight, eps=EPS
                )
                routed = moe.route(x, None)
            mlp = partial(_few_mlp, product, layer, settles=settles or streamed) if few else layer.mlp
            if moe.experts.takes_mlp(len(x)):
                mlp = layer.mlp
            x, normed = moe(
                x, normed, routed, mlp, added_norm=moe.pre_norm, scalar=self.scalar, next_weight=moe.pre_norm.weight
            )
            product(normed, layer.qkv)
        return x


def library(x: Tensor, weight: Tensor, *, split: bool = False) -> Tensor:  # as `dense_rows`
    return torch.nn.functional.linear(x, weight)


def _few_mlp(product: Callable[..., Tensor], layer: Layer, normed: Tensor, *, settles: bool) -> Tensor:
    return dense_rows(product(normed, layer.gate_up, gated=True), layer.down, settles=settles)


STREAMED = {  # of rows whose experts' products may stream
    "programs that find experts": {"streamed": False, "fused": False},
    "streamed experts": {"fused": False},
    "norm and router in one": {},
    "all products settle": {"settles": True},
}
FOUND = {  # of rows that find their experts by themselves, or are dealt out
    "programs that find experts": {"branch_rows": 0},
    "dealt, the MLP beside experts": {"few_rows": CHOSEN_ROWS},
}
DEALT = {
    "the MLP's own products": {"branch_rows": 0, "fused": False},
    "both norms in one": {"branch_rows": 0},
    "the MLP beside experts": {},
}
FEW_LAUNCHES = ((4, 8), (2, 8), (1, 8), (2, 4), (4, 16))  # experts and warps of a program of the router


def variants(rows: int) -> dict[str, dict[str, Any]]:
    return STREAMED if rows <= CHOSEN_ROWS else FOUND if rows <= EXPERT_FEW_ROWS else DEALT


def captured_differs(run: Callable[[], Tensor], replays: int) -> int:
    run()
    with one_after_the_other():
        expected = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    wrong = torch.zeros((), dtype=torch.int64, device=CUDA)
    for _ in range(replays):
        result.fill_(torch.nan)
        graph.replay()
        wrong += (result != expected).any()
    return int(wrong) + int(not bool(expected.isfinite().all()))


def timeline(run: Callable[[], Tensor]) -> None:
    """Of one layer in a replay: when each kernel starts and ends, in us, and how long after the end of the one before
    (less than nothing: it starts before that)."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        graph.replay()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.end)
    kernels = len(events) // 3 * 2
    first = next(i for i in range(kernels, len(events)) if "add_branches" in events[i].name)
    last = next(i for i in range(first + 1, len(events)) if "add_branches" in events[i].name)
    begun = events[first].time_range.end
    for before, event in pairwise(events[first : last + 1]):
        times, ended = event.time_range, before.time_range.end
        print(
            f"  {event.name[:24]:24} {times.start - begun:7.2f} to {times.end - begun:7.2f}, starts "
            f"{times.start - ended:6.2f}, takes {times.end - max(ended, times.start):6.2f} of its own"
        )


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--replays", type=int, default=50)
    parser.add_argument("--timeline", nargs="*", default=[], choices=list(STREAMED | FOUND | DEALT))
    options = parser.parse_args()
    faults = 0
    for rows in options.rows:
        chain, tried = Chain(options.layers, rows), variants(rows)
        layers = options.layers * PASSES
        times: dict[str, list[float]] = {name: [] for name in tried}
        for names in (list(tried), list(reversed(tried))):
            for name in names:
                times[name].append(microseconds([partial(chain.run, **tried[name])]) / layers)
        found = {}
        if rows <= ROUTED_ROWS:
            kept = dict(routing_triton.FEW_LAUNCH)
            for group, warps in FEW_LAUNCHES * 2:
                routing_triton.FEW_LAUNCH.update({"GROUP": group, "num_warps": warps})
                found.setdefault((group, warps), []).append(microseconds([chain.run]) / layers)
            routing_triton.FEW_LAUNCH.update(kept)
        floor = f", floor {1e6 * chain.layers[0].bytes / BANDWIDTH:.1f}" if rows == 1 else ""
        print(f"{rows} rows, us a layer{floor}")
        for name, taken in times.items():
            wrong = captured_differs(partial(chain.run, **tried[name]), options.replays)
            faults += wrong
            print(f"  {name:28} {taken[0]:7.2f} {taken[1]:7.2f}   {wrong} replays differ", flush=True)
        for (group, warps), taken in found.items():
            print(f"  router of {group} experts, {warps} warps a program: {taken[0]:.2f} {taken[1]:.2f}")
        for name in options.timeline:
            if name in tried:
                print(f"{rows} rows, {name}:")
                timeline(partial(chain.run, **tried[name]))
        del chain
        torch.cuda.empty_cache()
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
