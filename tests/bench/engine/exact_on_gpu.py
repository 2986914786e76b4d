"""On one GPU: does profile `exact` keep its promise, and what does it cost?

    export MODELSERVE_KERNELS_DIR=/tmp/exact-kernels
    python tests/bench exact_on_gpu --parts compile --variant E4B    # of several models at a time
    python tests/bench exact_on_gpu --parts bits drafts times [--variant E4B] [--seconds 60]

Random weights at the published geometry. `bits`: some requests alone, then beside others at three chunk sizes in two
orders of arrival, captured, that is with padding, behind cached rows, and preempted. `drafts`: with a drafter that is
right with probability 0, 0.5 and 1 at k = 1 to 4. Tokens and log probabilities are compared to the bit; every line says
`same` or who differs, and what `--seconds` of a model have no room for is `not tried`. `times`: a table of milliseconds
of captured steps, fast beside exact: 1 and 32 decodes behind 2,048 tokens, and a prompt of 8,192; it comes last, also
where --deadline or SIGTERM ends the tool before.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from exact_traffic import Exactly, Said, differing, requests
from true_drafter import TrueDrafter

from bench.deadline import add_deadline, within
from modelserve.engine_args import EngineArgs
from modelserve.model.architecture import ModelArchitecture
from modelserve.model.weight_format import WeightFormat
from modelserve.published import published_model
from modelserve.sizing.backends.resolve import Formats, resolve
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout, cache_geometry
from modelserve.sizing.rank_settings import Profile
from modelserve_worker.batch import NO_UPDATES, AdmittedRequest, ScheduledBatch, TableUpdates
from modelserve_worker.cache.kv_cache import KVCache
from modelserve_worker.kernels.compiling.cache_folder import SHIPPED_VARIABLE
from modelserve_worker.kernels.compiling.kernel_cache import use_kernel_cache
from modelserve_worker.kernels.operations import Operations
from modelserve_worker.layers.placement import Placement
from modelserve_worker.models.exact_check import check_exact
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM
from modelserve_worker.request import SamplingParams
from modelserve_worker.runner.model_runner import GPUModelRunner
from modelserve_worker.startup.kernel_build import build_kernels
from modelserve_worker.weights.loader import load_model

MANY, SOME, LONGEST, PROMPT = 32, 6, 2304, 8192
COMPARED = {"E4B": 30, "31B": 12, "26B-A4B": 6}  # layers: of E4B those with a cache of their own, and six more
TIMED = {"E4B": 42, "31B": 30, "26B-A4B": 30}  # half of 31B, beside which the pages of 32 requests fit
BEGAN = time.monotonic()


def say(text: str) -> None:
    print(f"{time.monotonic() - BEGAN:6.1f} s  {text}", flush=True)


def architecture_of(variant: str, layers: int) -> ModelArchitecture:
    """The first `layers` of a published model."""
    facts = published_model(f"hf://google/gemma-4-{variant}-it")
    assert facts is not None
    found = facts.architecture
    full = tuple(layer for layer in found.full_attention_layers if layer < layers)
    shared = max(0, found.num_kv_shared_layers - (found.num_hidden_layers - layers))
    return found.model_copy(
        update={"num_hidden_layers": layers, "full_attention_layers": full, "num_kv_shared_layers": shared}
    )


def compile_ahead(variant: str, folder: Path, processes: int) -> None:
    """What both profiles launch on this GPU, into the folder that start-ups look in first."""
    major, minor = torch.cuda.get_device_capability()
    for profile in ("exact", "fast"):
        args = EngineArgs(model=variant, profile=profile, max_num_batched_tokens=PROMPT, max_num_seqs=MANY)
        count = build_kernels(
            architecture_of(variant, COMPARED[variant]), args, weight_format=None, output=folder,
            capabilities=[10 * major + minor], processes=processes,
        )  # fmt: skip
        say(f"{variant}: {count} kernels of profile {profile} are compiled")


def load(architecture: ModelArchitecture, profile: Profile, weights: WeightFormat | None = None) -> Gemma4ForCausalLM:
    device = torch.device("cuda")
    major, minor = torch.cuda.get_device_capability(device)
    table = resolve(10 * major + minor, architecture, Formats(weights, kv_layout=layout_of(architecture)), profile)
    placement = Placement(device, torch.bfloat16, weight_format=weights, operations=Operations(table, device))
    model = load_model(architecture, Path(), placement, load_format="dummy")
    if profile == "exact":
        check_exact(model)
    say(f"{architecture.num_hidden_layers} layers of profile {profile} are loaded")
    return model


def layout_of(architecture: ModelArchitecture) -> KVCacheLayout:
    return KVCacheLayout.V_ONLY if architecture.attention_k_eq_v else KVCacheLayout.KV


class Promises:
    """Comparisons with what some requests say alone, for as long as there is time."""

    def __init__(self, model: Gemma4ForCausalLM, seconds: float) -> None:
        self.engines, self.vocabulary = engines(model, LONGEST), model.architecture.vocab_size
        self.ends, self.kept = time.monotonic() + seconds, True
        self.alone: dict[str, Said] = {}
        for request in self.wanted(SOME):
            self.alone |= self.engines.run([request], chunk=4096)
        say(f"{SOME} requests alone")

    def wanted(self, count: int):
        return requests(count, longest_prompt=2200, most_tokens=24, vocab_size=self.vocabulary)

    def compare(self, what: str, run: Callable[[], dict[str, Said]]) -> None:
        if time.monotonic() > self.ends:
            say(f"{what:58} not tried")
            return
        said = run()
        found = differing(said, self.alone)
        self.kept &= not found
        cached = sum(one.cached > 0 for one in said.values())
        behind = f" ({cached} behind cached rows)" if cached else ""
        say(f"{what + behind:58} {'same' if not found else 'DIFFERS: ' + ' '.join(found)}")

    def beside_others(self) -> None:
        run = self.engines.run
        others = f"beside {MANY - SOME} others"
        for chunk, order in ((4096, None), (512, 1), (300, 2)):
            captured = chunk == 512
            self.compare(
                f"{others}, chunks of {chunk}{', captured and padded' * captured}",
                lambda chunk=chunk, order=order, captured=captured: run(
                    self.wanted(MANY), chunk=chunk, order=order, captured=captured
                ),
            )
        self.compare("preempted", lambda: run(self.wanted(SOME), chunk=300, order=3, preempted_every=4))
        self.compare(others, lambda: run(self.wanted(MANY), chunk=512, order=4, prefix_caching=True))

    def with_drafts(self) -> None:
        answers = {name: one.tokens for name, one in self.alone.items()}
        for k, right in ((4, 0.5), (1, 0.5), (2, 1.0), (3, 0.5), (4, 1.0), (4, 0.0), (1, 1.0), (2, 0.0)):
            drafter = TrueDrafter(
                answers, num_tokens=k, right=right, slots=MANY, longest=LONGEST, vocab_size=self.vocabulary,
                device=torch.device("cuda"),
            )  # fmt: skip
            captured = k == 4 and right == 0.5
            self.compare(
                f"k = {k}, right with probability {right}{', captured' * captured}",
                lambda k=k, drafter=drafter, captured=captured: self.engines.run(
                    self.wanted(SOME), chunk=512, order=k, drafter=drafter, ahead=True, captured=captured
                ),
            )


def engines(model: Gemma4ForCausalLM, longest: int) -> Exactly:
    architecture = model.architecture
    geometry = cache_geometry(
        architecture, dtype=KVCacheDtype.BFLOAT16, layout=layout_of(architecture), tensor_parallel_size=1
    )
    return Exactly(model, geometry, longest, MANY, torch.device("cuda"))


def milliseconds(model: Gemma4ForCausalLM) -> dict[str, float]:
    """Of captured steps one after the other, the mean."""
    longest = PROMPT + 64
    geometry = engines(model, longest).geometry
    pages = MANY * geometry.held_bytes(LONGEST) + geometry.held_bytes(longest)
    cache = KVCache(geometry, pages // 128 * 128, device=torch.device("cuda"))
    cache.arena.zero_()
    runner = GPUModelRunner(model, cache, max_num_batched_tokens=PROMPT, max_num_seqs=MANY, max_model_len=longest)
    steps = {
        "1 decode": (decodes(1, geometry), 20),
        "32 decodes": (decodes(MANY, geometry), 20),
        f"prompt of {PROMPT}": (prompt_step(geometry, longest), 3),
    }
    for step, _ in steps.values():
        runner.execute(step).result()  # compiles what was not
    runner.capture_graphs()
    found = {}
    for name, (step, count) in steps.items():
        runner.execute(step).result()
        torch.cuda.synchronize()
        began = time.perf_counter()
        pending = [runner.execute(step) for _ in range(count)]
        pending[-1].result()
        torch.cuda.synchronize()
        found[name] = (time.perf_counter() - began) / count * 1e3
    say(", ".join(f"{name} {taken:.2f} ms" for name, taken in found.items()))
    return found


def decodes(slots: int, geometry) -> ScheduledBatch:
    """Behind 2,047 tokens, each request with pages of its own."""
    tables = (_pages(slots, geometry.global_pages(LONGEST)), _pages(slots, geometry.sliding_table_entries))
    return _step(slots, start=2047, length=1, tables=tables)


def prompt_step(geometry, longest: int) -> ScheduledBatch:
    return _step(
        1,
        start=0,
        length=PROMPT,
        tables=(_pages(1, geometry.global_pages(longest)), _pages(1, geometry.sliding_table_entries)),
    )


def _step(slots: int, *, start: int, length: int, tables: tuple[TableUpdates, TableUpdates]) -> ScheduledBatch:
    owners = np.arange(slots, dtype=np.int32)
    sampling = SamplingParams(seed=0, max_tokens=9, temperature=0.0)
    return ScheduledBatch(
        step=1, slots=owners, starts=np.full(slots, start, dtype=np.int32),
        lengths=np.full(slots, length, dtype=np.int32), sampled=np.ones(slots, dtype=np.int32),
        output_counts=np.zeros(slots, dtype=np.int32), token_ids=np.full(slots * length, 5, dtype=np.int32),
        admitted=tuple(AdmittedRequest(int(slot), f"r{slot}", sampling, (5,), ()) for slot in owners), page_moves=(),
        global_updates=tables[0], sliding_updates=tables[1], generated=0 if length > 1 else slots,
    )  # fmt: skip


def _pages(slots: int, entries: int) -> TableUpdates:
    if not entries:
        return NO_UPDATES
    owners, indices = (each.ravel().astype(np.int32) for each in np.mgrid[:slots, :entries])
    return TableUpdates(owners, indices, (owners * entries + indices).astype(np.int32))


def timed(
    variant: str, times: dict[tuple[str, str], dict[Profile, float]], weights: WeightFormat | None = None
) -> None:
    """Adds to `times` what it finds, by model and step."""
    profiles: tuple[Profile, ...] = ("fast", "exact")
    for profile in profiles:
        model = load(architecture_of(variant, TIMED[variant]), profile, weights)
        for name, taken in milliseconds(model).items():
            times.setdefault((variant, name), {})[profile] = taken
        del model
        gc.collect()
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=list(TIMED), action="append")
    parser.add_argument("--parts", choices=["compile", "bits", "drafts", "times"], nargs="+", default=["bits", "times"])
    parser.add_argument("--seconds", type=float, default=60.0, help="for the comparisons of a model")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) // 6), help="that compile")
    add_deadline(parser)
    chosen = parser.parse_args()
    parts, times, broken = {*chosen.parts}, {}, []
    if "compile" in parts and SHIPPED_VARIABLE not in os.environ:
        parser.error(f"--parts compile: name the folder to fill in {SHIPPED_VARIABLE}")
    say(f"{torch.cuda.get_device_name()}, {' '.join(chosen.parts)}")
    with within(chosen.deadline) as time_left:
        for variant in chosen.variant or TIMED:
            if "compile" in parts:
                compile_ahead(variant, Path(os.environ[SHIPPED_VARIABLE]), chosen.processes)
            if parts & {"bits", "drafts"} and not compared(variant, parts, chosen.seconds):
                broken.append(variant)
            if "times" in parts:
                use_kernel_cache()
                say(variant)
                timed(variant, times)
    print("\n".join(table(times)))
    raise SystemExit(time_left.code(broken))


def compared(variant: str, parts: set[str], seconds: float) -> bool:
    """Whether the promise was kept."""
    use_kernel_cache()
    say(variant)
    model = load(architecture_of(variant, COMPARED[variant]), "exact")
    promises = Promises(model, seconds)
    if "bits" in parts:
        promises.beside_others()
    if "drafts" in parts:
        promises.with_drafts()
    kept = promises.kept
    del model, promises
    gc.collect()
    torch.cuda.empty_cache()
    return kept


def table(times: dict[tuple[str, str], dict[Profile, float]]) -> list[str]:
    """Of what there is."""
    lines = [f"{'ms a step':20} {'':16} {'fast':>8} {'exact':>8} {'ratio':>6}"] if times else []
    for (variant, name), of_profile in times.items():
        fast, exact = of_profile.get("fast", math.nan), of_profile.get("exact", math.nan)
        layers = f"{variant}, {TIMED[variant]} layers"
        lines.append(f"{layers:20} {name:16} {fast:8.2f} {exact:8.2f} {exact / fast:6.2f}")
    return lines
