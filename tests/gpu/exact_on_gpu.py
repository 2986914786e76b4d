"""On one GPU: does profile `exact` keep its promise, and what does it cost?

    PYTHONPATH=operator:worker:tests/worker/execution:tests/gpu python tests/gpu/exact_on_gpu.py

Random weights at the published geometry, all layers of E4B and the first of 31B and 26B-A4B. Of each: some requests
alone, then beside 31 others at three chunk sizes in two orders of arrival, captured; preempted; with a drafter that is
right with probability 0, 0.5 and 1 at k = 1 to 4. Tokens and log probabilities are compared to the bit. Every line says
`same` or who differs. Last a table of milliseconds: steps of 1 and 32 decodes and of one prompt, fast and exact.
"""

from __future__ import annotations

import argparse
import gc
import time
from pathlib import Path

import numpy as np
import torch
from exact_traffic import Exactly, Said, differing, requests
from true_drafter import TrueDrafter

from modelserve.architecture import ModelArchitecture
from modelserve.published import published_model
from modelserve.sizing.backends.resolve import Formats, resolve
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout, cache_geometry
from modelserve_worker.batch import NO_UPDATES, AdmittedRequest, ScheduledBatch, TableUpdates
from modelserve_worker.execution.kv_cache import KVCache
from modelserve_worker.execution.loader import load_model
from modelserve_worker.execution.model_runner import GPUModelRunner
from modelserve_worker.kernels.kernel_cache import use_kernel_cache
from modelserve_worker.kernels.operations import Operations
from modelserve_worker.layers.parallel import TensorParallel
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM
from modelserve_worker.request import SamplingParams

MANY, SOME, LONGEST = 32, 6, 2304
LAYERS = {"E4B": None, "31B": 12, "26B-A4B": 6}


def architecture_of(variant: str, layers: int | None) -> ModelArchitecture:
    facts = published_model(f"hf://google/gemma-4-{variant}-it")
    assert facts is not None
    found = facts.architecture
    if layers is None:
        return found
    full = tuple(layer for layer in found.full_attention_layers if layer < layers)
    return found.model_copy(update={"num_hidden_layers": layers, "full_attention_layers": full})


def layout_of(architecture: ModelArchitecture) -> KVCacheLayout:
    return KVCacheLayout.V_ONLY if architecture.attention_k_eq_v else KVCacheLayout.KV


def load(architecture: ModelArchitecture, *, exact: bool) -> Gemma4ForCausalLM:
    device = torch.device("cuda")
    major, minor = torch.cuda.get_device_capability(device)
    formats = Formats(kv_layout=layout_of(architecture))
    table = resolve(10 * major + minor, architecture, formats, "exact" if exact else "fast")
    model = load_model(
        architecture, Path(), parallel=TensorParallel(), device=device, dtype=torch.bfloat16, load_format="dummy",
        operations=Operations(table, device),
    )  # fmt: skip
    if exact:
        model.check_exact()
    return model


def engines(model: Gemma4ForCausalLM) -> Exactly:
    architecture = model.architecture
    geometry = cache_geometry(
        architecture, dtype=KVCacheDtype.BFLOAT16, layout=layout_of(architecture), tensor_parallel_size=1
    )
    return Exactly(model, geometry, LONGEST, MANY, torch.device("cuda"))


def compare(what: str, said: dict[str, Said], alone: dict[str, Said]) -> bool:
    found = differing(said, alone)
    print(f"  {what:58} {'same' if not found else 'DIFFERS: ' + ' '.join(found)}", flush=True)
    return not found


def promises(model: Gemma4ForCausalLM) -> bool:
    """Whether all of them are kept."""
    exactly, vocabulary = engines(model), model.architecture.vocab_size

    def wanted(count: int):
        return requests(count, longest_prompt=2200, most_tokens=40, vocab_size=vocabulary)

    alone: dict[str, Said] = {}
    for request in wanted(SOME):
        alone |= exactly.run([request], chunk=4096)
    kept = True
    for chunk, order in ((4096, None), (512, 1), (300, 2)):
        captured = chunk == 512
        said = exactly.run(wanted(MANY), chunk=chunk, order=order, captured=captured)
        kept &= compare(f"beside {MANY - SOME} others, chunks of {chunk}{', captured' * captured}", said, alone)
    said = exactly.run(wanted(SOME), chunk=300, order=3, preempted_every=9)
    kept &= compare("preempted", said, alone)
    said = exactly.run(wanted(MANY), chunk=512, order=4, prefix_caching=True)
    kept &= compare(f"{sum(one.cached > 0 for one in said.values())} of {MANY} behind cached rows", said, alone)
    for k in range(1, 5):
        for right in (0.0, 0.5, 1.0):
            drafter = TrueDrafter(
                {name: one.tokens for name, one in alone.items()}, num_tokens=k, right=right, slots=MANY,
                longest=LONGEST, vocab_size=vocabulary, device=torch.device("cuda"),
            )  # fmt: skip
            captured = right == 0.5
            said = exactly.run(wanted(SOME), chunk=512, order=k, drafter=drafter, ahead=True, captured=captured)
            kept &= compare(f"k = {k}, right with probability {right}{', captured' * captured}", said, alone)
    return kept


def milliseconds(model: Gemma4ForCausalLM) -> dict[str, float]:
    """Of captured steps at a context of 2,048 tokens, the mean of 20; of a prompt of 2,048 tokens."""
    exactly = engines(model)
    geometry, pool = exactly.geometry, MANY * exactly.geometry.held_bytes(LONGEST) // 128 * 128
    cache = KVCache(geometry, pool, device=exactly.device)
    cache.arena.zero_()
    runner = GPUModelRunner(model, cache, max_num_batched_tokens=2048, max_num_seqs=MANY, max_model_len=LONGEST)
    sampling = SamplingParams(seed=0, max_tokens=9, temperature=0.0)
    found = {}
    for name, slots, start, length in (("1 decode", 1, 2047, 1), ("32 decodes", 32, 2047, 1), ("prompt", 1, 0, 2048)):
        step = _step(slots=slots, start=start, length=length, sampling=sampling, geometry=geometry)
        runner.execute(step).result()  # compiles
        if name == "1 decode":
            runner.execute(_step(slots=1, start=0, length=2048, sampling=sampling, geometry=geometry)).result()
            runner.execute(_step(slots=32, start=2047, length=1, sampling=sampling, geometry=geometry)).result()
            runner.capture_graphs()
        for _ in range(3):
            runner.execute(step).result()
        torch.cuda.synchronize()
        began = time.perf_counter()
        pending = [runner.execute(step) for _ in range(20)]
        pending[-1].result()
        torch.cuda.synchronize()
        found[name] = (time.perf_counter() - began) / 20 * 1e3
    return found


def _step(*, slots: int, start: int, length: int, sampling: SamplingParams, geometry) -> ScheduledBatch:
    """Each request with pages of its own."""
    owners = np.arange(slots, dtype=np.int32)
    return ScheduledBatch(
        step=1, slots=owners, starts=np.full(slots, start, dtype=np.int32),
        lengths=np.full(slots, length, dtype=np.int32), sampled=np.ones(slots, dtype=np.int32),
        output_counts=np.zeros(slots, dtype=np.int32), token_ids=np.full(slots * length, 5, dtype=np.int32),
        admitted=tuple(AdmittedRequest(int(slot), f"r{slot}", sampling, (5,), ()) for slot in owners), page_moves=(),
        global_updates=_pages(slots, geometry.global_pages(LONGEST)),
        sliding_updates=_pages(slots, geometry.sliding_table_entries),
        generated=0 if length > 1 else slots,
    )  # fmt: skip


def _pages(slots: int, entries: int) -> TableUpdates:
    if not entries:
        return NO_UPDATES
    owners, indices = (each.ravel().astype(np.int32) for each in np.mgrid[:slots, :entries])
    return TableUpdates(owners, indices, (owners * entries + indices).astype(np.int32))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", choices=list(LAYERS), action="append")
    parser.add_argument("--only-times", action="store_true")
    chosen = parser.parse_args()
    use_kernel_cache()
    print(torch.cuda.get_device_name())
    kept, times = True, {}
    for variant in chosen.variant or LAYERS:
        architecture = architecture_of(variant, LAYERS[variant])
        print(f"{variant}, {architecture.num_hidden_layers} layers", flush=True)
        for exact in (True, False):
            model = load(architecture, exact=exact)
            if exact and not chosen.only_times:
                kept &= promises(model)
            times[variant, exact] = milliseconds(model)
            del model
            gc.collect()
            torch.cuda.empty_cache()
    print(f"\n{'ms a step':12} {'':12} {'fast':>8} {'exact':>8} {'ratio':>6}")
    for variant in chosen.variant or LAYERS:
        for name, fast in times[variant, False].items():
            exact_ms = times[variant, True][name]
            print(f"{variant:12} {name:12} {fast:8.2f} {exact_ms:8.2f} {exact_ms / fast:6.2f}")
    raise SystemExit(0 if kept else 1)


if __name__ == "__main__":
    main()
