"""What an assistant's drafts are worth on a GPU: tokens a second with 0, 4 and 8 of them, acceptance simulated.

    PYTHONPATH=operator:worker:tests/gpu python tests/gpu/drafts_on_gpu.py --variant 31B [--drafts 0 4 8] [--batch 1 32]

Published shapes, random weights. Model and assistant do all their work, but what is sampled and what is proposed is
decided beforehand: drafts 1 to i of a step are right with a chance of 0.8 * 0.82^(i - 1), which is 3.4 tokens a step
of 4 drafts and 4.5 of 8. Then the time of one draft, and of a step that verifies k drafts beside one of a row each.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from random_checkpoint import config_json, read_config
from torch import Tensor

from modelserve.architecture import ModelArchitecture
from modelserve.assistant import AssistantArchitecture
from modelserve.engine_args import EngineArgs
from modelserve.published import assistant_of
from modelserve.sizing.pages import CacheGeometry, KVCacheDtype, KVCacheLayout, cache_geometry
from modelserve_worker.batch import AdmittedRequest
from modelserve_worker.engine.engine import Engine
from modelserve_worker.execution.assistant_drafter import AssistantDrafter
from modelserve_worker.execution.device import kernel_table
from modelserve_worker.execution.drafter import Accepted, Drafter, Proposal, ReaderOf
from modelserve_worker.execution.kv_cache import KVCache
from modelserve_worker.execution.loader import load_assistant, load_model
from modelserve_worker.execution.model_runner import GPUModelRunner
from modelserve_worker.execution.sampler import Sampler, SamplerOutput
from modelserve_worker.execution.startup import profile_batches
from modelserve_worker.kernels.operations import Operations
from modelserve_worker.layers.parallel import TensorParallel
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM
from modelserve_worker.request import Request, SamplingParams
from modelserve_worker.scheduling.admission import SchedulerLimits
from modelserve_worker.scheduling.scheduler import Scheduler

FIRST, DECAY = 0.8, 0.82


class Decided:
    """What every slot says at every position, and what is proposed there: int32 [slots, positions] and [.., k]."""

    def __init__(self, slots: int, positions: int, k: int, *, vocab_size: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(1)
        said = torch.randint(3, vocab_size - 1, (slots, positions + k + 1), generator=generator, dtype=torch.int32)
        chances = FIRST * DECAY ** torch.arange(k)
        right = torch.rand(slots, positions, 1, generator=generator) < chances  # falling: right up to some draft
        following = said.unfold(1, k + 1, 1)[:, :positions, 1:]
        self.said = said.to(device)
        self.proposed = torch.where(right, following, following + 1).to(device)


class SimulatedDrafter(Drafter):
    """Runs an assistant, and proposes what was decided."""

    def __init__(self, inner: AssistantDrafter, decided: Decided) -> None:
        self.inner, self.decided, self.num_tokens = inner, decided, inner.num_tokens

    def attach(self, reader_of: ReaderOf) -> None:
        self.inner.attach(reader_of)

    def capture(self, pool: Any) -> None:
        self.inner.capture(pool)

    def admit(self, admitted: Sequence[AdmittedRequest]) -> None:
        self.inner.admit(admitted)

    def propose(self, accepted: Accepted) -> Proposal:
        _, counts = self.inner.propose(accepted)
        return Proposal(self.decided.proposed[accepted.slots, accepted.positions], counts)


def decide_samples(sampler: Sampler, decided: Decided) -> None:
    """The sampler draws, and says what was decided."""
    sample = sampler.sample

    def decided_sample(logits: Tensor, **rows: Any) -> SamplerOutput:
        sample(logits, **rows)
        return SamplerOutput(decided.said[rows["slots"], rows["positions"]].long(), None)

    sampler.sample = decided_sample  # type: ignore[method-assign]


@dataclass
class Setting:
    model: Gemma4ForCausalLM
    assistant: Path
    device: torch.device
    context: int
    output: int
    chunk: int
    kv_dtype: str

    @property
    def longest(self) -> int:
        return self.context + self.output + 64


@dataclass
class Measured:
    batch: int
    k: int
    tokens_per_second: float
    tokens_per_step: float
    step_ms: float
    draft_us: float = float("nan")
    verified_us: float = float("nan")

    def row(self, variant: str, without: Measured) -> str:
        times = self.tokens_per_second / without.tokens_per_second
        return (
            f"| {variant} | {self.batch} | {self.k} | {self.tokens_per_second:.1f} | {times:.2f} x | "
            f"{self.tokens_per_step:.2f} | {self.step_ms:.2f} | {self.draft_us:.0f} | {self.verified_us / 1e3:.2f} |"
        )


def geometry_of(architecture: ModelArchitecture, kv_dtype: str) -> CacheGeometry:
    return cache_geometry(
        architecture, tensor_parallel_size=1,
        dtype=KVCacheDtype(architecture.dtype if kv_dtype == "auto" else kv_dtype),
        layout=KVCacheLayout.V_ONLY if architecture.attention_k_eq_v else KVCacheLayout.KV,
    )  # fmt: skip


def runner_of(setting: Setting, k: int, slots: int) -> tuple[GPUModelRunner, int]:
    """A runner whose steps are captured over a pool for `slots` requests, and the pool's bytes."""
    architecture = setting.model.architecture
    decided = Decided(slots, setting.longest + k, k, vocab_size=architecture.vocab_size, device=setting.device)
    drafter = None
    if k:
        assistant = load_assistant(setting.assistant, setting.model, load_format="dummy")
        drafter = SimulatedDrafter(AssistantDrafter(assistant, num_tokens=k, max_num_seqs=slots), decided)
    geometry = geometry_of(architecture, setting.kv_dtype)
    pool = (slots + 1) * geometry.held_bytes(setting.longest) // 128 * 128
    cache = KVCache(geometry, pool, device=setting.device)
    cache.arena.zero_()
    runner = GPUModelRunner(
        setting.model, cache, max_num_batched_tokens=setting.chunk, max_num_seqs=slots, max_model_len=setting.longest,
        drafter=drafter,
    )  # fmt: skip
    runner.profile(profile_batches(start=0, tokens=min(setting.chunk, setting.context), rows=slots))
    decide_samples(runner._sampler, decided)
    if k:  # steps of k + 1 rows, before they are captured
        run(setting, runner, pool, batch=min(2, slots), output=4 * (k + 1))
    runner.capture_graphs()
    return runner, pool


def run(setting: Setting, runner: GPUModelRunner, pool: int, *, batch: int, output: int) -> tuple[int, int, float]:
    """Tokens, steps and seconds from when all have their first token until the first of them ends."""
    limits = SchedulerLimits(setting.chunk, runner._most["max_num_seqs"], setting.longest, ())
    engine = Engine(
        Scheduler(
            limits, runner.cache.geometry, pool, draft_tokens=runner.draft_tokens, asked_drafts=runner.asked_drafts
        ),
        runner,
    )
    generator = torch.Generator().manual_seed(2)
    for number in range(batch):
        prompt = torch.randint(3, setting.model.architecture.vocab_size, (setting.context,), generator=generator)
        sampling = SamplingParams(seed=number, max_tokens=output, temperature=0.0, ignore_eos=True)
        engine.add(Request(f"r{number}", tuple(prompt.tolist()), sampling))
    begun: set[str] = set()
    tokens = steps = 0
    began = ended = 0.0
    while engine.has_work:
        outputs = engine.step()
        now = time.perf_counter()
        assert all(each.error is None for each in outputs), outputs
        if len(begun) < batch:
            begun |= {each.request_id for each in outputs if each.token_ids}
            began = now
        elif not ended:
            tokens += sum(len(each.token_ids) for each in outputs)
            steps += bool(outputs)
            ended = now if any(each.finish_reason for each in outputs) else 0.0
    return tokens, steps, ended - began


def seconds_of(launch: Callable[[], object], device: torch.device, repeats: int) -> float:
    launch()
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        launch()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / repeats


def draft_seconds(setting: Setting, runner: GPUModelRunner, batch: int) -> float:
    """Of one draft of each of `batch` requests, whose caches hold what the last run left."""
    drafter = runner._drafter
    assert isinstance(drafter, SimulatedDrafter)
    slots = torch.arange(batch, dtype=torch.int32, device=setting.device)
    positions = torch.full_like(slots, setting.context)
    hidden = torch.zeros(
        batch, setting.model.architecture.hidden_size, dtype=setting.model.dtype, device=setting.device
    )
    repeats = 50 if setting.device.type == "cuda" else 2
    accepted = Accepted(slots, slots, positions, slots, slots, slots.long(), hidden)
    took = seconds_of(lambda: drafter.inner.propose(accepted), setting.device, repeats)
    return took / drafter.num_tokens


def verification_seconds(runner: GPUModelRunner, batch: int) -> float:
    """Of a captured step of `batch` segments with all their drafts: forward pass and head, positions as packed last."""
    graphs = runner._graphs
    if graphs is None:
        return float("nan")
    most = runner.draft_tokens + 1
    size = min(size for size in graphs._decode if size.few == most and size.rows >= batch * most)
    if runner.draft_tokens:
        runner._packer._decodes.device("assumed").fill_(-1)  # a replay does not move them again
    graph, _ = graphs._decode[size]
    return seconds_of(graph.replay, torch.device("cuda"), 30)


def measure(setting: Setting, *, drafts: Sequence[int], batches: Sequence[int]) -> list[Measured]:
    found = []
    for k in drafts:
        began = time.perf_counter()
        runner, pool = runner_of(setting, k, max(batches))
        print(f"k = {k}: ready after {time.perf_counter() - began:.0f} s", flush=True)
        for batch in batches:
            tokens, steps, seconds = run(setting, runner, pool, batch=batch, output=setting.output)
            each = Measured(batch, k, tokens / seconds, tokens / steps / batch, 1e3 * seconds / steps)
            each.verified_us = 1e6 * verification_seconds(runner, batch)
            if k:
                each.draft_us = 1e6 * draft_seconds(setting, runner, batch)
            print(each, flush=True)
            found.append(each)
        runner.shutdown()
        del runner
        if setting.device.type == "cuda":
            torch.cuda.empty_cache()
    return found


def table(variant: str, found: Sequence[Measured]) -> str:
    without = {each.batch: each for each in found if each.k == 0}
    lines = [
        "| model | c | k | tok/s (simulated) | of k = 0 | tokens a step | step, ms | one draft, us | verified, ms |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    ordered = sorted(found, key=lambda each: (each.batch, each.k))
    return "\n".join((*lines, *(each.row(variant, without.get(each.batch, each)) for each in ordered)))


def assistant_config(target: ModelArchitecture, assistant: AssistantArchitecture) -> dict[str, Any]:
    config = config_json(assistant)
    ordered = assistant.num_centroids > 0
    return config | {
        "model_type": "gemma4_assistant", "backbone_hidden_size": target.hidden_size,
        "use_ordered_embeddings": ordered, "num_centroids": assistant.num_centroids,
        "centroid_intermediate_top_k": assistant.centroid_top_k,
    }  # fmt: skip


def small_assistant(target: ModelArchitecture) -> AssistantArchitecture:
    """Of the demo's model."""
    return AssistantArchitecture.model_validate(
        target.model_dump()
        | {
            "num_hidden_layers": 4, "num_kv_shared_layers": 4, "full_attention_layers": (3,), "hidden_size": 64,
            "intermediate_size": 64, "backbone_hidden_size": target.hidden_size,
        }
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", required=True, help="E2B, E4B, 12B, 26B-A4B, 31B or tiny")
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 4, 8])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda", 0))
    options = parser.parse_args(argv)
    config = read_config(options.variant)
    target = ModelArchitecture.from_config(config)
    assistant = small_assistant(target) if options.variant == "tiny" else assistant_of(options.variant)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(assistant_config(target, assistant)))
        geometry = geometry_of(target, options.kv_cache_dtype)
        kernels = kernel_table(options.device, target, geometry, EngineArgs(model=directory))
        model = load_model(
            target, Path(directory), parallel=TensorParallel(), operations=Operations(kernels, options.device),
            device=options.device, dtype=torch.bfloat16, load_format="dummy",
        )  # fmt: skip
        setting = Setting(
            model, Path(directory), options.device, options.context, options.output, options.chunk,
            options.kv_cache_dtype,
        )  # fmt: skip
        found = measure(setting, drafts=options.drafts, batches=options.batch)
    where = torch.cuda.get_device_name() if options.device.type == "cuda" else "CPU"
    print(f"\n{where}, context {options.context}, cache {options.kv_cache_dtype}, {options.output} tokens each\n")
    print(table(options.variant, found))


if __name__ == "__main__":
    main()
