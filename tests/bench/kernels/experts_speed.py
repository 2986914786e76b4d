"""On one GPU: is 26B-A4B's mixture of experts right, how long does each part take, and which tiles are fastest?

    python tests/bench experts_speed [--rows 1 8 32] [--bandwidth 4.3e12]

First the router's choice and the layer's result are compared with float64 at all kinds of row counts, and a captured
step with padding with an eager one without. Then each product is timed with every tile, on experts that change from
call to call so that they come from memory, and the parts and the whole layer by kernels and in plain PyTorch. Every
time goes to $OUT/experts_speed.txt where OUT is set. Exits 1 when a comparison fails.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor

from bench.kernels.elementwise_speed import EPS, KERNELS, activations, captured, microseconds
from modelserve.model.architecture import ModelArchitecture
from modelserve.published import published_model
from modelserve.sizing.backends.resolve import EXPERT_FEW_ROWS, Formats, resolve
from modelserve_worker.kernels.experts import routing_triton
from modelserve_worker.kernels.experts.experts import (
    BranchNorms,
    Choice,
    ExpertBackend,
    PlainExperts,
    Shares,
)
from modelserve_worker.kernels.experts.experts_triton import TILES, ExpertTile, products_with
from modelserve_worker.kernels.operations import Operations
from modelserve_worker.layers.moe import MixtureOfExperts
from modelserve_worker.layers.placement import Placement

CUDA, BF16 = torch.device("cuda"), torch.bfloat16
CALLS, COMPILERS = 16, 14
BLOCKS = {
    True: ((16, 128, 1, 5), (16, 128, 1, 8), (16, 64, 1, 10), (16, 256, 1, 4), (16, 128, 2, 4), (32, 128, 2, 4),
           (32, 128, 2, 6), (64, 64, 4, 6)),
    False: ((64, 64, 4, 4), (64, 64, 4, 8), (32, 64, 1, 8), (16, 64, 1, 6), (128, 64, 8, 5), (128, 64, 4, 6),
            (64, 128, 4, 3), (64, 64, 2, 8), (32, 128, 2, 4)),
}  # fmt: skip
FEW_ROUTED = ((4, 8), (1, 8), (4, 16), (2, 16), (8, 16))
MANY_ROUTED = ({"BLOCK_T": 32}, {"num_stages": 4}, {"BLOCK_H": 64, "SPLITS": 4})


def architecture() -> ModelArchitecture:
    facts = published_model("hf://google/gemma-4-26B-A4B")
    assert facts is not None
    return facts.architecture


def _capability() -> int:
    major, minor = torch.cuda.get_device_capability(CUDA)
    return 10 * major + minor


def placement() -> Placement:
    return Placement(CUDA, BF16, operations=Operations(resolve(_capability(), architecture(), Formats()), CUDA))


def mixture() -> MixtureOfExperts:
    """The layer with random weights."""
    layer = MixtureOfExperts(architecture(), placement())
    layer.experts.branch_rows = 0  # the dense MLP has no part in it
    for parameter in layer.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
        else:
            parameter.normal_(mean=1.0, std=0.2)
    layer.router.weight.normal_(std=2.0)
    return layer


def with_backend(layer: MixtureOfExperts, backend: ExpertBackend) -> MixtureOfExperts:
    layer.backend = layer.router.backend = layer.experts.backend = backend
    layer.experts.few_rows = 0 if isinstance(backend, PlainExperts) else EXPERT_FEW_ROWS
    return layer


def tiles(rows: int, gated: bool) -> Iterator[ExpertTile]:
    for block in (8,) if rows <= 8 else (8, 16):
        yield from (ExpertTile(n, k, block, warps, stages) for n, k, warps, stages in BLOCKS[gated])


def choices(rows: int) -> Choice:
    a = architecture()
    experts = torch.rand((rows, a.num_experts), device=CUDA).argsort(dim=1)[:, : a.top_k_experts].to(torch.int32)
    return Choice(torch.rand(experts.shape, device=CUDA), experts.contiguous())


def compile_tiles(given: list[tuple[int, bool, ExpertTile]]) -> None:
    """In a process of its own, so that many compile at a time; results lie in Triton's cache."""
    a = architecture()
    shapes = {True: (2 * a.moe_intermediate_size, a.hidden_size), False: (a.hidden_size, a.moe_intermediate_size)}
    matrices = {gated: torch.zeros((a.num_experts, *shape), device=CUDA, dtype=BF16) for gated, shape in shapes.items()}
    for rows, gated, tile in given:
        choice = choices(rows)
        inputs = activations(rows * (1 if gated else a.top_k_experts), shapes[gated][1])
        try:
            products_with(inputs, choice, matrices[gated], tile, gated=gated)
        except Exception as error:  # a tile that this GPU cannot hold
            print(f"{tile}: {type(error).__name__} {str(error)[:80]}", file=sys.stderr)
    torch.cuda.synchronize()


def exact_row(layer: MixtureOfExperts, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """float64: the weighted sum of one row's experts of x, its `pre_norm`."""
    gate_up, down = layer.experts.gate_up.dense(), layer.experts.down.dense()
    total = torch.zeros(down.shape[1], dtype=torch.float64, device=CUDA)
    for weight, expert in zip(weights.double(), experts.tolist(), strict=True):
        gate, up = (gate_up[expert].double() @ x.double()).chunk(2)
        total += weight * (down[expert].double() @ (torch.nn.functional.gelu(gate, approximate="tanh") * up))
    return total


def wrong(layer: MixtureOfExperts) -> Iterator[str]:
    router, backend = layer.router, layer.backend
    for rows in (1, 2, 7, 8, 16, 17, 40, 64, 65, 300, 2048):
        x = activations(rows, architecture().hidden_size) * 3
        routed = router(x, layer.pre_norm)
        normed, choice = routed.normed, routed.choice
        wide = x.double()
        scaled = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * router.scale.double() * x.shape[1] ** -0.5
        logits = scaled @ router.weight.double().t()
        picked = logits.gather(1, choice.experts.long())
        left = logits.scatter(1, choice.experts.long(), -torch.inf)
        margin = float((left.amax(1) - picked.amin(1)).max())
        weights = picked.softmax(1) * router.per_expert_scale.double()[choice.experts.long()]
        error = float((choice.weights - weights).norm() / weights.norm())
        if margin > 2e-5 or not error < 1e-5:
            yield f"router at {rows} rows: {margin:.1e} left above what was chosen, weights {error:.1e}: WRONG"
        shares = layer.experts(normed, choice)
        assert isinstance(shares, Shares)
        result, again = (backend.weighted_sum(each) for each in (shares, layer.experts(normed, choice)))
        for row in {0, rows // 2, rows - 1}:
            truth = exact_row(layer, normed[row], choice.weights[row], choice.experts[row])
            error = float((result[row].double() - truth).norm() / truth.norm())
            if not error < 1e-2:
                yield f"experts at {rows} rows, row {row}: {error:.1e} of the norm: WRONG"
        if not torch.equal(result, again):
            yield f"experts at {rows} rows: two calls differ: WRONG"
    yield from wrong_padding(layer)


def wrong_padding(layer: MixtureOfExperts) -> Iterator[str]:
    """Rows 0-39 of captured steps of 64 and 128 rows against an eager step of 40; the rest must be finite."""
    for rows in (64, 128):
        x, num_rows = activations(rows, architecture().hidden_size), torch.tensor([40], device=CUDA, dtype=torch.int32)
        dense, kept = activations(*x.shape), []

        def run(x: Tensor, dense: Tensor, num_rows: Tensor | None) -> Tensor:
            x = x.clone()
            _, normed = layer(
                x, x, layer.route(x, num_rows), lambda _: dense, added_norm=layer.pre_norm, scalar=None,
                next_weight=layer.pre_norm.weight,
            )  # fmt: skip
            assert normed is not None
            return normed

        graph = captured([partial(lambda kept, run, *given: kept.append(run(*given)), kept, run, x, dense, num_rows)])
        x.copy_(activations(*x.shape))
        graph.replay()
        alone = run(x[:40], dense[:40], None)
        torch.cuda.synchronize()
        difference = float((kept[-1][:40].float() - alone.float()).norm() / alone.float().norm())
        if not (difference < 1e-2 and bool(kept[-1].isfinite().all())):
            yield f"captured at {rows} rows with padding: {difference:.1e} of the norm: WRONG"


def product_times(rows: int, layer: MixtureOfExperts, bandwidth: float, log: object) -> Iterator[str]:
    a = architecture()
    for gated in (True, False):
        matrix = (layer.experts.gate_up if gated else layer.experts.down).dense()
        given = [choices(rows) for _ in range(CALLS)]
        inputs = activations(rows * (1 if gated else a.top_k_experts), matrix.shape[2])
        read = sum(len(each.experts.unique()) for each in given) / CALLS * matrix[0].nbytes
        times = {}
        for tile in dict.fromkeys((*tiles(rows, gated), used(rows, gated))):
            try:
                calls = [partial(products_with, inputs, each, matrix, tile, gated=gated) for each in given]
                times[tile] = microseconds(calls)
            except Exception as error:
                print(f"{tile}: {type(error).__name__}", file=log)
                continue
            print(f"{rows} {'gate_up' if gated else 'down'} {tile} {times[tile]:.2f}", file=log, flush=True)
        floor = read / bandwidth * 1e6
        best = sorted(times, key=lambda tile: times[tile])[:3]
        named = "; ".join(f"{t.outputs}x{t.inputs}x{t.rows} w{t.warps} s{t.stages} {times[t]:.1f}" for t in best)
        yield (
            f"{'gate_up' if gated else 'down':12}{rows:6}{times[used(rows, gated)]:9.1f}{floor:9.1f}"
            f"{floor / times[used(rows, gated)]:7.0%}  {named}"
        )


def router_times(layer: MixtureOfExperts) -> Iterator[str]:
    """Launches of the router to choose from; the first of either are those in use."""
    few = routing_triton.FEW_LAUNCH
    launches = [(1, few, [{"GROUP": group, "num_warps": warps} for group, warps in FEW_ROUTED])]
    launches += [(rows, routing_triton.many_launch(rows), MANY_ROUTED) for rows in (32, 512, 2048, 8192)]
    for rows, launch, variants in launches:
        x, kept = activations(rows, architecture().hidden_size), dict(launch)
        for variant in ({}, *variants):
            launch.update(variant)
            yield f"route {rows:6} {launch} {microseconds([lambda x=x: layer.router(x, layer.pre_norm)] * 8):.1f}"
            launch.update(kept)


def used(rows: int, gated: bool) -> ExpertTile:
    return next(TILES[most] for most in TILES if rows <= most)[0 if gated else 1]


def part_times(rows: int, layer: MixtureOfExperts) -> Iterator[str]:
    """The parts beside the products by kernels, then the layer by kernels and in plain PyTorch."""
    a = architecture()
    x, dense = activations(rows, a.hidden_size), activations(rows, a.hidden_size)
    few = rows <= EXPERT_FEW_ROWS
    calls: dict[str, Callable[[], object]] = {"route": lambda: layer.router(x, layer.pre_norm)}
    choice = choices(rows)
    if not few:
        calls["deal"] = lambda: layer.backend.deal(x, choice, a.num_experts)
        dealt = layer.backend.deal(x, choice, a.num_experts)
        gate_up, down = layer.experts.gate_up, layer.experts.down
        inner = activations(len(dealt.rows), a.moe_intermediate_size)
        calls["grouped gate_up"] = lambda: gate_up.grouped_gated(dealt.rows, dealt.ends, KERNELS)
        calls["grouped down"] = lambda: down.grouped(inner, dealt.ends)
        shares = Shares(activations(rows * a.top_k_experts, a.hidden_size), choice, dealt.places)
    else:
        shares = Shares(activations(rows * a.top_k_experts, a.hidden_size), choice)
    norm = layer.pre_norm
    norms = BranchNorms(norm.weight, norm.weight, norm.weight)
    scalar = torch.full((1,), 0.5, device=CUDA, dtype=BF16)
    end = {"scalar": scalar, "next_weight": norm.weight, "eps": EPS}
    calls["add_branches"] = lambda: layer.backend.add_branches(x, dense, shares, norms, **end)
    repeats = CALLS if rows <= 512 else 3
    times = {name: microseconds([call] * repeats) for name, call in calls.items()}
    steps = {"added_norm": norm, "scalar": scalar, "next_weight": norm.weight}
    kernels = layer.backend
    for name, backend in (("layer", kernels), ("plain layer", PlainExperts())):
        inputs = [activations(rows, a.hidden_size) for _ in range(repeats)]  # so that experts change
        with_backend(layer, backend)
        times[name] = microseconds(
            [lambda each=each: layer(each, each, layer.route(each, None), lambda _: dense, **steps) for each in inputs]
        )
    with_backend(layer, kernels)
    for name, taken in times.items():
        yield f"{name:16}{rows:6}{taken:9.1f}"


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32], help="of the products")
    parser.add_argument("--part-rows", type=int, nargs="+", default=[1, 8, 32, 64, 512, 8192])
    parser.add_argument("--bandwidth", type=float, default=4.3e12, help="bytes a second; the default is an H200's")
    chosen = parser.parse_args()
    todo = [(rows, gated, tile) for rows in chosen.rows for gated in (True, False) for tile in tiles(rows, gated)]
    with ProcessPoolExecutor(COMPILERS, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_tiles, [todo[i::COMPILERS] for i in range(COMPILERS)]))
    layer = mixture()
    faults = list(wrong(layer))
    print(*faults, f"{len(faults)} comparisons with float64 failed", sep="\n", flush=True)
    log = (Path(os.environ["OUT"]) / "experts_speed.txt").open("w") if "OUT" in os.environ else sys.stderr
    table = [line for rows in chosen.rows for line in product_times(rows, layer, chosen.bandwidth, log)]
    routers = list(router_times(layer))
    parts = [line for rows in chosen.part_rows for line in part_times(rows, layer)]
    print(f"{torch.cuda.get_device_name()}, {chosen.bandwidth / 1e12:.1f} TB/s")
    print(f"{'product':12}{'rows':>6}{'us':>9}{'floor':>9}{'':7}  fastest tiles: outputs x inputs x rows, us")
    print(*table, *routers, f"{'part':16}{'rows':>6}{'us':>9}", *parts, sep="\n")
    return int(bool(faults))
