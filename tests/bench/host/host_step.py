"""Times the host's part of a decode step.

    python tests/bench host_step --requests 64 --context 131072

Needs no GPU and holds no cache: packing goes to buffers on the CPU, and the scheduler decides over the pages of the 31B
model (V-only, bfloat16) in a pool that exists as a number. All requests are prefilled at once and then decode together,
one step ahead of the answers, as the engine runs them. Prints the milliseconds per step of each part, and last their
total; they are those of one core's work (CPU time of the thread, which never waits), so that other programs on the
machine do not count. With --ranks, each step is also sent to that many other ranks: processes that read and unpack it,
which say how long their unpacking took and how large a step was.

With --prompt TOKENS it times a prompt's only step instead, one prompt after the other: its request's bytes are unpacked
and queued, the step is scheduled and packed, and the first token's report is written. Each prompt has other ids.

With --host-gib there is host memory behind the prefix cache, whose copies end with the step that brought them. How many
prompts a pool has cached is what makes it slow where anything does: --prompt 512 --model E4B --pool-gib 100 --fill 6000
--host-gib 64 times prompts each of which pushes another one out of 5,000.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import statistics
import time
from array import array
from collections import defaultdict

import numpy as np
import torch

from modelserve.model.architecture import LayerKind
from modelserve.published import published_model
from modelserve.sizing.pages import CacheGeometry, KVCacheDtype, KVCacheLayout, cache_geometry
from modelserve_worker.batch import SampledTokens, ScheduledBatch
from modelserve_worker.engine.wire import FrameReader, StepReport, encode
from modelserve_worker.host_pages import HostProgress
from modelserve_worker.ranks.messages import decode_batch, encode_batch
from modelserve_worker.ranks.ring import RankRing
from modelserve_worker.request import Request, SamplingParams
from modelserve_worker.scheduling.admission import SchedulerLimits
from modelserve_worker.scheduling.scheduler import Scheduler
from modelserve_worker.scheduling.tiers.host_tier import host_tiers
from modelserve_worker.step.block_tables import BlockTables
from modelserve_worker.step.input_batch import StepPacker
from modelserve_worker.step.sampling_slots import SamplingSlots
from modelserve_worker.step.step_size import QueryBlocks

GIB = 1 << 30
VOCABULARY = 262_144
WARM_UP = 20  # steps before the clock starts
EOS = (1, 106)
PROMPT_PARTS = ("unpack", "add", "schedule", "pack", "update", "report")


class Host:
    """The host's side of an engine without a device: answers come from here."""

    def __init__(
        self,
        geometry: CacheGeometry,
        *,
        requests: int,
        step_tokens: int,
        packed_tokens: int,
        longest: int,
        options: argparse.Namespace,
    ) -> None:
        """`step_tokens` are scheduled in a step at most, of which `packed_tokens` are packed."""
        limits = SchedulerLimits(step_tokens, requests, longest, eos_token_ids=EOS)
        pool = int(options.pool_gib * GIB) or requests * geometry.held_bytes(longest)
        self.scheduler = Scheduler(
            limits, geometry, pool, prefix_caching=options.prefix_caching,
            tiers=host_tiers(int(options.host_gib * GIB)),
        )  # fmt: skip
        self.times: dict[str, list[float]] = defaultdict(list)  # seconds of one core per step
        cpu, entries = torch.device("cpu"), {"max_num_seqs": requests, "max_model_len": longest}
        self.tables = BlockTables(geometry, device=cpu, **entries)
        self.packer = StepPacker(
            geometry, max_num_batched_tokens=packed_tokens, vocab_size=VOCABULARY, device=cpu,
            blocks=QueryBlocks(8, 64, longest), **entries,
        )  # fmt: skip
        self.sampling = SamplingSlots(max_num_seqs=requests, vocab_size=VOCABULARY, device=cpu)
        self.pages = {kind: pool // geometry.page(kind).page_bytes for kind in LayerKind}

    def schedule(self) -> ScheduledBatch | None:
        """As the engine does it; what earlier steps have copied is there."""
        step = self.scheduler._step
        if self.scheduler.prefixes.tiers:
            self.scheduler.prefixes.copied(HostProgress(1 << 20, step, step))
        return self.scheduler.schedule()

    def pack(self, batch: ScheduledBatch) -> None:
        """As the runner does it: checks, table updates, and the step's arrays in their staging buffer."""
        self.update_tables(batch)
        self.packer.pack(batch)
        if batch.admitted:
            self.sampling.admit(batch.admitted)

    def update_tables(self, batch: ScheduledBatch) -> None:
        updates = {LayerKind.GLOBAL: batch.global_updates, LayerKind.SLIDING: batch.sliding_updates}
        for kind, entries in updates.items():
            self.tables.check(kind, entries, num_pages=self.pages[kind])
        self.tables.apply(updates)


class Decodes(Host):
    """The engine's steady state: all requests decode."""

    def __init__(
        self,
        geometry: CacheGeometry,
        requests: int,
        context: int,
        steps: int,
        ring: RankRing | None,
        *,
        options: argparse.Namespace,
    ) -> None:
        longest = context + steps + WARM_UP + 2
        super().__init__(
            geometry,
            requests=requests,
            step_tokens=requests * context,
            packed_tokens=requests,
            longest=longest,
            options=options,
        )
        self.ring = ring
        prompt = tuple(range(2, 2 + context))
        for i in range(requests):
            self.scheduler.add(Request(f"r{i}", prompt, SamplingParams(seed=i, max_tokens=longest - context)))
        self.launched = self.scheduler.schedule()
        assert self.launched is not None
        assert self.launched.num_tokens == requests * context, "every prompt is prefilled in the first step"
        self.update_tables(self.launched)  # and packed by nobody: only decodes are timed

    def step(self) -> None:
        """Schedule and pack a step, then take the answer of the one before it."""
        answered, clock = self.launched, time.thread_time
        assert answered is not None
        sampled = SampledTokens(answered.step, np.full(int(answered.drawn.sum()), 7, dtype=np.int32), {})
        started = clock()
        self.launched = self.schedule()
        scheduled = clock()
        assert self.launched is not None
        if self.ring is not None:
            self.ring.send(encode_batch(self.launched), check=lambda: None)
        sent = clock()
        self.pack(self.launched)
        packed = clock()
        outputs = self.scheduler.update(sampled)
        updated = clock()
        self.scheduler.stats()
        counted = clock()
        assert len(outputs) == answered.num_requests == self.launched.num_requests
        self.times["schedule"].append(scheduled - started)
        if self.ring is not None:
            self.times["send"].append(sent - scheduled)
        self.times["pack"].append(packed - sent)
        self.times["update"].append(updated - packed)
        self.times["stats"].append(counted - updated)


class Prompts(Host):
    """An idle engine that gets one prompt after the other, each for one token."""

    def __init__(self, geometry: CacheGeometry, tokens: int, *, options: argparse.Namespace) -> None:
        super().__init__(
            geometry, requests=64, step_tokens=tokens, packed_tokens=tokens, longest=tokens + 2, options=options
        )
        self.tokens = tokens
        self.number = 0

    def step(self) -> None:
        """From the bytes of a request to those of its only token."""
        self.number += 1
        ids = random.Random(self.number).choices(range(2, VOCABULARY), k=self.tokens)
        sampling = SamplingParams(seed=0, max_tokens=1, temperature=0.0, stop_token_ids=EOS)
        frame = encode(Request(f"r{self.number}", array("i", ids), sampling))
        marks = [time.thread_time()]

        def mark() -> None:
            marks.append(time.thread_time())

        (request,) = FrameReader().feed(frame)
        mark()
        self.scheduler.add(request)
        mark()
        batch = self.schedule()
        mark()
        assert batch is not None
        assert batch.num_tokens == self.tokens, "the prompt is one step"
        self.pack(batch)
        mark()
        outputs = self.scheduler.update(SampledTokens(batch.step, np.array([7], dtype=np.int32), {}))
        mark()
        encode(StepReport.of(self.number, self.scheduler.stats(), outputs, [], self.scheduler.take_events()))
        mark()
        for part, begin, end in zip(PROMPT_PARTS, marks, marks[1:], strict=False):
            self.times[part].append(end - begin)


def rank(name: str, ranks: int, reader: int) -> None:
    """Another rank's side of each step, without the step."""
    ring, times, sizes = RankRing(ranks, name=name), [], []
    while message := ring.receive(reader):
        began = time.thread_time()
        decode_batch(message)
        times.append(time.thread_time() - began)
        sizes.append(len(message))
    ring.close()
    line(f"rank {reader + 1}", times[WARM_UP:])
    print(f"rank {reader + 1} got {statistics.mean(sizes[WARM_UP:]):.0f} bytes a step, {max(sizes)} at most")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64, help="requests that decode together")
    parser.add_argument("--context", type=int, default=131072, help="prompt tokens of each")
    parser.add_argument("--steps", type=int, default=512, help="decode steps that are timed")
    parser.add_argument("--prompt", type=int, default=0, help="time prompts of so many tokens instead of decodes")
    parser.add_argument("--prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--model", default="31B", help="a published size, such as E4B")
    parser.add_argument("--pool-gib", type=float, default=0.0, help="0: room for the requests")
    parser.add_argument("--host-gib", type=float, default=0.0, help="host memory behind the prefix cache")
    parser.add_argument("--fill", type=int, default=0, help="prompts before those that are timed")
    parser.add_argument("--ranks", type=int, default=0, help="other ranks that every step is sent to")
    arguments = parser.parse_args()
    facts = published_model(f"hf://google/gemma-4-{arguments.model}-it")
    assert facts is not None, f"{arguments.model} is not published"
    layout = KVCacheLayout.least(facts.architecture)
    geometry = cache_geometry(facts.architecture, dtype=KVCacheDtype.BFLOAT16, layout=layout, tensor_parallel_size=1)
    if arguments.prompt:
        host = Prompts(geometry, arguments.prompt, options=arguments)
        for _ in range(arguments.fill):
            host.step()
        summarise(timed(host, arguments.steps))
        return
    ring = RankRing(arguments.ranks) if arguments.ranks else None
    context = multiprocessing.get_context("spawn")
    others = [
        context.Process(target=rank, args=(ring.name, arguments.ranks, reader))
        for reader in range(arguments.ranks)
        if ring is not None
    ]
    for other in others:
        other.start()
    decodes = Decodes(geometry, arguments.requests, arguments.context, arguments.steps, ring, options=arguments)
    times = timed(decodes, arguments.steps)
    if ring is not None:
        ring.send(b"", check=lambda: None)
        for other in others:
            other.join()
        ring.close()
    summarise(times)


def timed(host: Decodes | Prompts, steps: int) -> dict[str, list[float]]:
    """Seconds of each part of `steps` steps, the first ones left out."""
    for _ in range(WARM_UP):
        host.step()
    host.times.clear()
    for _ in range(steps):
        host.step()
    return host.times


def summarise(times: dict[str, list[float]]) -> None:
    totals = [sum(parts) for parts in zip(*times.values(), strict=True)]
    for part, seconds in (*times.items(), ("total", totals)):
        line(part, seconds)
    print(f"{statistics.mean(totals) * 1e3:.3f}")


def line(part: str, seconds: list[float]) -> None:
    milliseconds = sorted(value * 1e3 for value in seconds)
    print(
        f"{part:9} mean {statistics.mean(milliseconds):7.3f} ms  median {statistics.median(milliseconds):7.3f} ms  "
        f"p99 {milliseconds[int(0.99 * len(milliseconds))]:7.3f} ms  max {milliseconds[-1]:7.3f} ms"
    )
