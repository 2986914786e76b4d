"""On a GPU: milliseconds of drafts by drafters that propose blocks, and of what they make of each step, against floors.

    python tests/bench block_times --drafters "z-lab 31B" "RedHat dspark 31B"

Random weights at the published geometry of drafter and target, captured; block tables name pages at random. A floor is
what has to be read, weights, head and rows of the context, at 4.3 TB/s, or multiplied at 790 TFLOP/s, whichever takes
longer.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from architecture_of import architecture_of
from dflash_configs import published_configs

from bench.deadline import add_deadline, within
from modelserve.model.architecture import LayerKind, ModelArchitecture
from modelserve.sizing.backends.resolve import Formats, resolve
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout, cache_geometry
from modelserve.sizing.weights.dflash import dflash_weight_bytes, draft_cache
from modelserve_worker.attention.target_caches import PoolOfTarget
from modelserve_worker.cache.kv_cache import KVCache
from modelserve_worker.drafters.block_drafter import BlockDrafter
from modelserve_worker.kernels.operations import Operations
from modelserve_worker.kernels.step import Step
from modelserve_worker.layers.placement import Placement
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM
from modelserve_worker.step.block_tables import BlockTables
from modelserve_worker.weights.loader import load_dflash, load_model

BANDWIDTH, FLOPS = 4.3e12, 790e12
LONGEST, ROWS = 16_384, 8_192
CUDA = torch.device("cuda")


def target_of(variant: str) -> Gemma4ForCausalLM:
    """Random weights, for contexts as long as are measured."""
    whole = architecture_of(variant).model_copy(update={"max_position_embeddings": LONGEST})
    capability = 10 * torch.cuda.get_device_capability()[0] + torch.cuda.get_device_capability()[1]
    layout = KVCacheLayout.least(whole)
    operations = Operations(resolve(capability, whole, Formats(None, KVCacheDtype.BFLOAT16, layout), "fast"), CUDA)
    return load_model(whole, Path("/"), Placement(CUDA, torch.bfloat16, operations=operations), load_format="dummy")


def milliseconds(launch: Callable[[], Any], *, times: int = 30) -> float:
    """Of one replay of what is captured, in a row of them."""
    for _ in range(2):
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(times):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / times


def step_of(rows: int, slots: int) -> Step:
    """Rows of decodes, dealt out to slots, or of one chunk."""
    each = torch.arange(rows, dtype=torch.int32, device=CUDA)
    slot, positions = (each % slots, 2000 + each // slots) if slots > 1 else (torch.zeros_like(each), each)
    return Step(positions, torch.tensor([rows], dtype=torch.int32, device=CUDA), slot, slot, slot, None, None,
                ring_slots=torch.where(positions >= rows - 2143, slot, -1) if slots == 1 else slot)  # fmt: skip


def measured(name: str, config: dict[str, Any], model: Gemma4ForCausalLM, *, requests: list[int], context: int,
             most: int) -> list[str]:  # fmt: skip
    architecture: ModelArchitecture = model.architecture
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        network = load_dflash(Path(folder), model, load_format="dummy")
    kept = draft_cache(network.architecture)
    geometry = cache_geometry(
        architecture, dtype=KVCacheDtype.BFLOAT16, layout=KVCacheLayout.least(architecture), tensor_parallel_size=1,
        draft=kept,
    )  # fmt: skip
    tables = BlockTables(geometry, max_num_seqs=most, max_model_len=LONGEST, device=CUDA)
    cache = KVCache(geometry, 6 << 30, device=CUDA)
    table = tables.device[LayerKind.GLOBAL]
    table.copy_(torch.randint(0, cache.num_pages[LayerKind.GLOBAL], table.shape, device=CUDA))
    drafter = BlockDrafter(network, model, num_tokens=16, max_num_seqs=most, step_rows=ROWS)
    drafter.attach(PoolOfTarget(model, cache, tables, kernels=SimpleNamespace()))  # type: ignore[arg-type]
    weights = dflash_weight_bytes(network.architecture, tensor_parallel_size=1)
    head = 0 if network.head.own is not None else architecture.vocab_size * architecture.hidden_size * 2
    of = network.architecture
    parameters = sum(p.numel() for layer in network.layers for p in layer.parameters() if p.dim() > 1)
    lines = []
    for count in requests:
        drafter.buffers.slots[:count] = torch.arange(count, device=CUDA)
        drafter.buffers.positions[:count] = context
        took = milliseconds(lambda count=count: drafter.run(count))
        row = 2 * 2 * of.num_key_value_heads * of.head_dim
        rows = kept.full_layers * context + kept.window_layers * min(context, kept.window)
        aside = sum(p.numel() * 2 for p in (*network.fc.parameters(), *network.hidden_norm.parameters()))
        read = (weights - aside + head + count * row * rows) / BANDWIDTH
        scored = count * drafter.proposed(count) * (architecture.vocab_size if head else of.draft_vocab_size or 0)
        flops = 2 * (count * of.block_rows * parameters + scored * of.hidden_size) / FLOPS
        floor = 1e3 * max(read, flops)
        lines.append(f"| {name} | draft of {count} x {drafter.proposed(count)} at {context} | {took:.3f} | {floor:.3f} "
                     f"| {took / floor:.2f} |")  # fmt: skip
    for rows, slots in ((1, 2), (16, 2), (128, 8), (ROWS, 1)):
        step = step_of(rows, slots)
        took = milliseconds(lambda step=step: drafter.store(step))
        projected = (len(of.taps) * of.hidden_size + of.num_hidden_layers * of.values_per_row
                     * of.num_key_value_heads * of.head_dim) * of.hidden_size  # fmt: skip
        floor = 1e3 * max(2 * projected / BANDWIDTH, 2 * rows * projected / FLOPS)
        lines.append(f"| {name} | {rows} rows of a step stored | {took:.3f} | {floor:.3f} | {took / floor:.2f} |")
    lines.append(
        f"| {name} | weights {weights / 1e9:.3f} GB, of a request of {context} tokens "
        f"{(geometry.held_bytes(context) - plain(architecture).held_bytes(context)) / 1e6:.1f} MB | | | |"
    )
    return lines


def plain(architecture: ModelArchitecture) -> Any:
    """The geometry without a drafter."""
    return cache_geometry(architecture, dtype=KVCacheDtype.BFLOAT16, layout=KVCacheLayout.least(architecture),
                          tensor_parallel_size=1)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafters", nargs="+", default=list(published_configs()), metavar="NAME",
                        help=f"of {', '.join(published_configs())}")  # fmt: skip
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--context", type=int, default=2048)
    add_deadline(parser)
    options = parser.parse_args()
    found, models = [], dict[str, Gemma4ForCausalLM]()
    with within(options.deadline) as time_left:
        for name in options.drafters:
            config, variant = published_configs()[name]
            if variant not in models:
                models.clear()
                torch.cuda.empty_cache()
                began = time.perf_counter()
                models[variant] = target_of(variant)
                print(f"{variant} there after {time.perf_counter() - began:.1f} s", flush=True)
            try:
                found += measured(
                    name, config, models[variant], requests=options.requests, context=options.context,
                    most=max(options.requests),
                )  # fmt: skip
            except Exception as error:
                found.append(f"| {name} | {type(error).__name__}: {error} | | | |")
            print("\n".join(found[-12:]), f"({time_left.seconds:.0f} s)", flush=True)
    print("\n".join(["", "| drafter | | ms | floor | of it |", "|---|---|---|---|---|", *found]))
    return time_left.code()
