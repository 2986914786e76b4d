"""What an assistant's drafts are worth on a GPU, acceptance simulated, and what they cost where none is right.

    python tests/bench drafts_on_gpu --variant 31B [--batch 1 8 32] [--fixed 2] [--block "z-lab 31B"]

Published shapes, random weights. Model and drafters do all their work, but what is sampled and what is proposed is
decided beforehand: drafts 1 to i of a step are right with a chance of 0.8 * 0.82^(i - 1), which is 3.4 tokens a step
of 4 drafts and 4.5 of 8. With --block there is one of that geometry beside it, whose drafts are right with 0.86 each,
which is 6.5 tokens a step of 15: `block` it alone, `block wrong` the same where no draft is ever right, `switch` both.
Rows of the table: `none`, without a drafter; `auto`, as many drafts as pay; `wrong`, the same
where no draft is ever right; a number, so many in every step. `forward` is the captured step, which verifies drafts;
`expected` the time of a token by the arithmetic that the choice of drafts rests on, for as many drafts as there were.
The table comes last, also where --deadline or SIGTERM ends the tool before. What a start with an assistant takes and
leaves is told by `engine_on_gpu.py --drafter --memory-only`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from dflash_configs import published_configs
from torch import Tensor

from bench.deadline import add_deadline, within
from bench.random_checkpoint import assistant_config, read_config
from modelserve.engine_args import EngineArgs
from modelserve.hardware import CATALOGUE
from modelserve.inspection import read_drafter
from modelserve.model.architecture import ModelArchitecture
from modelserve.model.assistant import AssistantArchitecture
from modelserve.planning.speed.draft_time import draft_speeds
from modelserve.planning.speed.step_time import RankSpeed
from modelserve.sizing.draft_pages import DraftCache
from modelserve.sizing.pages import CacheGeometry, KVCacheDtype, KVCacheLayout, cache_geometry
from modelserve.sizing.rank_settings import Profile
from modelserve.sizing.speculation import AUTO_DRAFTS, Speculation
from modelserve_worker.batch import AdmittedRequest, Asked, ScheduledBatch
from modelserve_worker.cache.kv_cache import KVCache
from modelserve_worker.drafters.assistant_drafter import AssistantDrafter
from modelserve_worker.drafters.block_drafter import BlockDrafter
from modelserve_worker.drafters.drafter import Accepted, Drafter, LongestProposal, Proposal, TargetCaches
from modelserve_worker.engine.engine import Engine
from modelserve_worker.kernels.operations import Operations
from modelserve_worker.kernels.step import Step
from modelserve_worker.layers.placement import Placement
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM
from modelserve_worker.request import Request, SamplingParams
from modelserve_worker.runner.model_runner import GPUModelRunner
from modelserve_worker.scheduling.admission import SchedulerLimits
from modelserve_worker.scheduling.costs.step_costs import PlannedCosts
from modelserve_worker.scheduling.scheduler import Scheduler
from modelserve_worker.startup.device import device_facts, kernel_table
from modelserve_worker.startup.profile_steps import profile_batches
from modelserve_worker.step.sampler import Sampler, SamplerOutput
from modelserve_worker.weights.loader import load_assistant, load_dflash, load_model

FIRST, DECAY, BLOCK = 0.8, 0.82, 0.86
SKIPPED = 24  # steps from when all decode, in which it is learned how many drafts pay


class Decided:
    """What every slot says at every position, and what is proposed there: int32 [slots, positions] and [.., k]."""

    def __init__(self, slots: int, positions: int, k: int, *, vocab_size: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(1)
        said = torch.randint(3, vocab_size - 1, (slots, positions + k + 1), generator=generator, dtype=torch.int32)
        following = said.unfold(1, k + 1, 1)[:, :positions, 1:]
        at_all = torch.rand(slots, positions, 1, generator=generator)
        # By design; the chances of all drafts up to one: that falls, so they are right up to some draft.
        laws = FIRST * DECAY ** torch.arange(k), BLOCK ** (1 + torch.arange(k))
        self.said = said.to(device)
        self.right = [torch.where(at_all < law, following, following + 1).to(device) for law in laws]
        self.wrong = [(following + 1).to(device)] * 2
        self.proposed = self.right


class SimulatedDrafter(Drafter):
    """Runs drafters of some designs, and proposes what was decided."""

    speaks_unasked = False

    def __init__(self, inner: Drafter, decided: Decided, designs: Sequence[int]) -> None:
        self.inner, self.decided, self.num_tokens = inner, decided, inner.num_tokens
        self.asked, self.designs = inner.asked, designs

    def attach(self, caches: TargetCaches) -> None:
        self.inner.attach(caches)

    def store(self, step: Step) -> None:
        self.inner.store(step)

    def capture(self, pool: Any) -> None:
        self.inner.capture(pool)

    def admit(self, admitted: Sequence[AdmittedRequest]) -> None:
        self.inner.admit(admitted)

    def propose(self, accepted: Accepted, asked: Asked) -> Proposal:
        _, counts = self.inner.propose(accepted, asked)
        proposed = self.decided.proposed[self.designs[asked.drafter]]
        return Proposal(proposed[accepted.slots, accepted.positions, : self.num_tokens], counts)


def decide_samples(sampler: Sampler, decided: Decided) -> None:
    """The sampler draws, and says what was decided."""
    sample = sampler.sample

    def decided_sample(logits: Tensor, **rows: Any) -> SamplerOutput:
        sample(logits, **rows)
        return SamplerOutput(decided.said[rows["slots"], rows["positions"]].long(), None)

    sampler.sample = decided_sample  # type: ignore[method-assign]


class Watch:
    """What parts of a step take on the device, by name: each call of a watched function stands between two events."""

    def __init__(self) -> None:
        self.spans: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = defaultdict(list)

    def over(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            result = function(*args, **kwargs)
            end.record()
            self.spans[name].append((begin, end))
            return result

        return watched

    def ms(self, name: str, steps: int) -> float:
        """Of a step, on average."""
        torch.cuda.synchronize()
        return sum(begin.elapsed_time(end) for begin, end in self.spans[name]) / max(1, steps)


@dataclass
class Setting:
    model: Gemma4ForCausalLM
    assistant: AssistantArchitecture
    directory: Path  # with its config.json
    device: torch.device
    context: int
    output: int
    chunk: int
    kv_dtype: str
    profile: Profile
    block: Path | None = None  # where the config.json of another drafter is

    @property
    def longest(self) -> int:
        return self.context + self.output + 64

    def costs(self, slots: int, k: int, designs: Sequence[int]) -> PlannedCosts:
        on_gpu = self.device.type == "cuda"
        name = torch.cuda.get_device_name(self.device).replace(" ", "-") if on_gpu else ""
        accelerator, geometry = CATALOGUE.get(name, CATALOGUE["NVIDIA-H200"]), geometry_of(self, designs)
        speed = RankSpeed(
            self.model.architecture, accelerator, geometry, tensor_parallel=1, weight_format=None,
            exact=self.profile == "exact",
        )  # fmt: skip
        drafts = draft_speeds(self.speculation(designs), accelerator, geometry, tensor_parallel=1)
        return PlannedCosts(speed, max_num_seqs=slots, speculation=Speculation(k), drafts=drafts)

    def speculation(self, designs: Sequence[int]) -> Speculation:
        found = Speculation(AUTO_DRAFTS, self.assistant if 0 in designs else None)
        if 1 not in designs:
            return found
        assert self.block is not None
        return found.with_drafter(read_drafter(self.block), as_many_as_pay=True)


@dataclass
class Measured:
    """Of steps in which all requests decode."""

    name: str
    batch: int
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    drafts: int = 0  # rows of them
    asked: int = 0
    expected_ms: float = 0.0
    parts_ms: dict[str, float] = field(default_factory=dict)

    def row(self, variant: str, none: Measured) -> str:
        rate = self.tokens / self.seconds
        tokens, asked = self.tokens / self.steps / self.batch, self.asked / self.steps
        tpot = 1e3 * self.seconds / self.steps / tokens
        drafting = self.parts_ms.get("drafting", 0.0)
        cells = (
            variant, self.batch, self.name, f"{rate:.1f}", f"{rate * none.seconds / none.tokens:.3f}", f"{tokens:.2f}",
            f"{self.drafts / self.steps / self.batch:.2f}", f"{asked:.2f}", f"{tpot:.3f}", f"{self.expected_ms:.3f}",
            f"{100 * (self.expected_ms / tpot - 1):+.0f} %", f"{1e3 * self.seconds / self.steps:.2f}",
            f"{self.parts_ms.get('forward', 0.0):.2f}", f"{self.parts_ms.get('sampling', 0.0):.2f}", f"{drafting:.2f}",
            f"{1e3 * drafting / asked:.0f}" if asked else "",
        )  # fmt: skip
        return "| " + " | ".join(map(str, cells)) + " |"


def geometry_of(setting: Setting, designs: Sequence[int]) -> CacheGeometry:
    return geometry_with(setting.model.architecture, setting.kv_dtype, setting.speculation(designs).draft_cache)


def geometry_with(architecture: ModelArchitecture, kv_dtype: str, draft: DraftCache | None = None) -> CacheGeometry:
    return cache_geometry(
        architecture, tensor_parallel_size=1, draft=draft,
        dtype=KVCacheDtype(architecture.dtype if kv_dtype == "auto" else kv_dtype),
        layout=KVCacheLayout.V_ONLY if architecture.attention_k_eq_v else KVCacheLayout.KV,
    )  # fmt: skip


def runner_of(setting: Setting, k: int, slots: int, designs: Sequence[int]) -> tuple[GPUModelRunner, int, Decided]:
    """A runner whose steps are captured over a pool for `slots` requests, and the pool's bytes."""
    architecture = setting.model.architecture
    decided = Decided(slots, setting.longest + k, k, vocab_size=architecture.vocab_size, device=setting.device)
    drafters: list[Drafter] = []
    if 0 in designs:
        assistant = load_assistant(setting.directory, setting.model, load_format="dummy")
        drafters.append(AssistantDrafter(assistant, num_tokens=min(k, AUTO_DRAFTS), max_num_seqs=slots))
    if 1 in designs:
        assert setting.block is not None
        network = load_dflash(setting.block, setting.model, load_format="dummy")
        rows = max(setting.chunk, Speculation(k).step_rows(slots))
        drafters.append(BlockDrafter(network, setting.model, num_tokens=k, max_num_seqs=slots, step_rows=rows))
    drafter = None
    if drafters:
        inner = drafters[0] if len(drafters) == 1 else LongestProposal(drafters)
        drafter = SimulatedDrafter(inner, decided, designs)
    geometry = geometry_of(setting, designs)
    pool = (slots + 1) * geometry.held_bytes(setting.longest) // 128 * 128
    cache = KVCache(geometry, pool, device=setting.device)
    cache.arena.zero_()
    runner = GPUModelRunner(
        setting.model, cache, max_num_batched_tokens=setting.chunk, max_num_seqs=slots, max_model_len=setting.longest,
        drafter=drafter,
    )  # fmt: skip
    tokens = min(setting.chunk, setting.context)
    runner.profile(profile_batches(start=0, tokens=tokens, rows=slots, few=1 + k, asked=runner.asked_drafts))
    decide_samples(runner._sampler, decided)
    runner.capture_graphs()
    return runner, pool, decided


def run(setting: Setting, runner: GPUModelRunner, pool: int, name: str, batch: int, designs: Sequence[int]) -> Measured:
    """From SKIPPED steps behind the one that gives all their first token, until the first of them ends."""
    slots, k = runner._most["max_num_seqs"], runner.draft_tokens
    limits = SchedulerLimits(setting.chunk, slots, setting.longest, (), max_num_mixed_tokens=setting.chunk)
    costs = setting.costs(slots, k, designs)
    scheduler = Scheduler(
        limits, runner.cache.geometry, pool, draft_tokens=k, asked_drafts=runner.asked_drafts,
        step_costs=None if name.isdecimal() or not k else costs,
    )  # fmt: skip
    engine, found, watch = Engine(scheduler, runner), Measured(name, batch), Watch()
    generator = torch.Generator().manual_seed(2)
    for number in range(batch):
        prompt = torch.randint(3, setting.model.architecture.vocab_size, (setting.context,), generator=generator)
        sampling = SamplingParams(seed=number, max_tokens=setting.output, temperature=0.0, ignore_eos=True)
        engine.add(Request(f"r{number}", tuple(prompt.tolist()), sampling))
    begun: set[str] = set()
    waited, began = 0, 0.0
    with watched(runner, watch, setting.device, found):
        while engine.has_work:
            outputs = engine.step()
            now = time.perf_counter()
            assert all(each.error is None for each in outputs), outputs
            if waited < SKIPPED and any(each.finish_reason for each in outputs):
                raise SystemExit(f"one of {batch} has ended before all decode: --output {setting.output} is too few")
            if len(begun) < batch:
                begun |= {each.request_id for each in outputs if each.token_ids}
            elif waited < SKIPPED:
                waited += bool(outputs)
                if waited == SKIPPED:
                    began, found.drafts, found.asked = now, 0, 0
                    watch.spans.clear()
            elif not found.seconds:
                found.tokens += sum(len(each.token_ids) for each in outputs)
                found.steps += bool(outputs)
                if any(each.finish_reason for each in outputs):
                    found.seconds = now - began
                    spans = {each: watch.ms(each, found.steps) for each in list(watch.spans)}
                    found.parts_ms, drafts, asked = spans, found.drafts, found.asked
    found.drafts, found.asked = drafts, asked
    context = setting.context + setting.output / 2
    steps = costs.seconds(batch, batch * max(1, k), context=context)
    step = (
        steps[round(found.drafts / found.steps)]
        + found.asked / found.steps * costs.draft_seconds(0, batch, 1, context=context)[1]
    )
    found.expected_ms = 1e3 * float(step) * found.steps * batch / found.tokens
    return found


@contextmanager
def watched(runner: GPUModelRunner, watch: Watch, device: torch.device, found: Measured) -> Iterator[None]:
    """While parts of its steps are timed, and their drafts counted."""
    execute, graphs, drafter = runner.execute, runner._graphs, runner._drafter

    def counted(batch: ScheduledBatch) -> Any:
        found.drafts += batch.num_tokens - batch.num_requests
        found.asked += batch.asked.drafts
        return execute(batch)

    sample, replay = runner._sample, None if graphs is None else graphs.replay
    propose = None if drafter is None else drafter.propose
    runner.execute = counted  # type: ignore[method-assign]
    if device.type == "cuda":
        runner._sample = watch.over("sampling", sample)  # type: ignore[method-assign]
        if graphs is not None:
            graphs.replay = watch.over("forward", replay)  # type: ignore[method-assign,arg-type]
        if drafter is not None:
            drafter.propose = watch.over("drafting", propose)  # type: ignore[method-assign,arg-type]
    yield
    for holder, name in ((runner, "execute"), (runner, "_sample"), (graphs, "replay"), (drafter, "propose")):
        if holder is not None:
            vars(holder).pop(name, None)


def measure(setting: Setting, found: list[Measured], *, fixed: Sequence[int], batches: Sequence[int]) -> None:
    """Adds to `found` what it finds."""
    ways: list[tuple[int, list[str], tuple[int, ...]]] = [(0, ["none"], ()), (AUTO_DRAFTS, ["auto", "wrong"], (0,))]
    ways += [(each, [str(each)], (0,)) for each in fixed]
    if setting.block is not None:
        most = setting.speculation((1,)).num_tokens
        ways += [(most, ["block", "block wrong"], (1,)), (most, ["switch"], (0, 1))]
    for k, names, designs in ways:
        began = time.perf_counter()
        runner, pool, decided = runner_of(setting, k, max(batches), designs)
        print(f"k = {k}: ready after {time.perf_counter() - began:.0f} s", flush=True)
        for name in names:
            decided.proposed = decided.wrong if name.endswith("wrong") else decided.right
            for batch in batches:
                found.append(run(setting, runner, pool, name, batch, designs))
                print(found[-1], flush=True)
        runner.shutdown()
        setting.model.taps = None
        del runner
        if setting.device.type == "cuda":
            torch.cuda.empty_cache()


def table(variant: str, found: Sequence[Measured]) -> str:
    none = {each.batch: each for each in found if each.name == "none"}
    columns = "c", "drafts", "tok/s (simulated)", "of none", "tokens a step", "verified", "asked", "TPOT, ms"
    of_step = "expected", "apart", "step, ms", "forward", "sampling", "drafting", "a draft, us"
    lines = ["| " + " | ".join(("model", *columns, *of_step)) + " |", "|" + "---|" * 16]
    ordered = sorted(found, key=lambda each: each.batch)
    return "\n".join((*lines, *(each.row(variant, none[each.batch]) for each in ordered)))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", required=True, help="E2B, E4B, 12B, 26B-A4B, 31B or tiny")
    parser.add_argument("--fixed", type=int, nargs="*", default=[], help="numbers of drafts beside auto")
    parser.add_argument("--block", choices=list(published_configs()), help="a drafter that proposes blocks, beside it")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--output", type=int, default=320)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--profile", choices=["fast", "exact"], default="fast")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda", 0))
    add_deadline(parser)
    options = parser.parse_args(argv)
    target = ModelArchitecture.from_config(read_config(options.variant))
    config, found = assistant_config(options.variant), list[Measured]()
    assistant = AssistantArchitecture.from_config(config)
    with within(options.deadline) as time_left, tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config))
        geometry = geometry_with(target, options.kv_cache_dtype)
        args = EngineArgs(model=directory, profile=options.profile)
        kernels = kernel_table(device_facts(options.device), target, geometry, args)
        operations = Operations(kernels, options.device)
        placement = Placement(options.device, torch.bfloat16, operations=operations)
        model = load_model(target, Path(directory), placement, load_format="dummy")
        setting = Setting(
            model, assistant, Path(directory), options.device, options.context, options.output, options.chunk,
            options.kv_cache_dtype, options.profile,
        )  # fmt: skip
        if options.block:
            setting.block = Path(directory) / "block"
            setting.block.mkdir()
            (setting.block / "config.json").write_text(json.dumps(published_configs()[options.block][0]))
        print(f"{options.variant} is loaded after {time_left.seconds:.1f} s", flush=True)
        measure(setting, found, fixed=options.fixed, batches=options.batch)
    where = torch.cuda.get_device_name() if options.device.type == "cuda" else "CPU"
    said = f"profile {options.profile}, context {options.context}, cache {options.kv_cache_dtype}"
    print(f"\n{where}, {said}, {options.output} tokens each\n")
    print(table(options.variant, found))
    return time_left.code()
