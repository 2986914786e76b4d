"""Times the host's part of a decode step: python tests/benchmarks/host_step.py --requests 64 --context 131072

Needs no GPU and holds no cache: packing goes to buffers on the CPU, and the scheduler decides over the pages of the 31B
model (V-only, bfloat16) in a pool that exists as a number. All requests are prefilled at once and then decode together,
one step ahead of the answers, as the engine runs them. Prints the milliseconds per step of each part, and last their
total; they are those of one core's work (CPU time of the thread, which never waits), so that other programs on the
machine do not count. With --ranks, each step is also sent to that many other ranks: processes that read and unpack it,
which say how long their unpacking took and how large a step was.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections import defaultdict

import numpy as np
import torch

from modelserve.architecture import LayerKind
from modelserve.published import published_model
from modelserve.sizing.pages import CacheGeometry, KVCacheDtype, KVCacheLayout, cache_geometry
from modelserve_worker.batch import SampledTokens, ScheduledBatch
from modelserve_worker.execution.block_tables import BlockTables
from modelserve_worker.execution.input_batch import QueryBlocks, StepPacker
from modelserve_worker.execution.rank_messages import decode_batch, encode_batch
from modelserve_worker.execution.rank_ring import RankRing
from modelserve_worker.request import Request, SamplingParams
from modelserve_worker.scheduling.admission import SchedulerLimits
from modelserve_worker.scheduling.scheduler import Scheduler

MODEL = "hf://google/gemma-4-31B-it"
VOCABULARY = 262_144
WARM_UP = 20  # steps before the clock starts


class Host:
    """The engine's steady state without a device: answers come from here."""

    def __init__(self, geometry: CacheGeometry, requests: int, context: int, steps: int, ring: RankRing | None) -> None:
        self.ring = ring
        longest = context + steps + WARM_UP + 2
        limits = SchedulerLimits(requests * context, requests, longest, eos_token_ids=(1, 106))
        self.scheduler = Scheduler(limits, geometry, requests * geometry.held_bytes(longest))
        self.times: dict[str, list[float]] = defaultdict(list)  # seconds of one core per step
        cpu, entries = torch.device("cpu"), {"max_num_seqs": requests, "max_model_len": longest}
        self.tables = BlockTables(geometry, device=cpu, **entries)
        self.packer = StepPacker(
            geometry, max_num_batched_tokens=requests, vocab_size=VOCABULARY, blocks=QueryBlocks(8, 64, longest),
            narrows=False, device=cpu, **entries,
        )  # fmt: skip
        pool = requests * geometry.held_bytes(longest)
        self.pages = {kind: pool // geometry.page(kind).page_bytes for kind in LayerKind}
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
        sampled = SampledTokens(answered.step, np.full(int(answered.samples.sum()), 7, dtype=np.int32), {})
        started = clock()
        self.launched = self.scheduler.schedule()
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

    def pack(self, batch: ScheduledBatch) -> None:
        """As the runner does it: checks, table updates, and the step's arrays in their staging buffer."""
        self.update_tables(batch)
        self.packer.pack(batch)

    def update_tables(self, batch: ScheduledBatch) -> None:
        for kind, updates in ((LayerKind.GLOBAL, batch.global_updates), (LayerKind.SLIDING, batch.sliding_updates)):
            self.tables.check(kind, updates, num_pages=self.pages[kind])
            self.tables.apply(kind, updates)


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
    parser.add_argument("--ranks", type=int, default=0, help="other ranks that every step is sent to")
    arguments = parser.parse_args()
    facts = published_model(MODEL)
    assert facts is not None, f"{MODEL} is not published"
    geometry = cache_geometry(
        facts.architecture, dtype=KVCacheDtype.BFLOAT16, layout=KVCacheLayout.V_ONLY, tensor_parallel_size=1
    )
    ring = RankRing(arguments.ranks) if arguments.ranks else None
    context = multiprocessing.get_context("spawn")
    others = [
        context.Process(target=rank, args=(ring.name, arguments.ranks, reader))
        for reader in range(arguments.ranks)
        if ring is not None
    ]
    for other in others:
        other.start()
    host = Host(geometry, arguments.requests, arguments.context, arguments.steps, ring)
    for _ in range(WARM_UP):
        host.step()
    host.times.clear()
    for _ in range(arguments.steps):
        host.step()
    if ring is not None:
        ring.send(b"", check=lambda: None)
        for other in others:
            other.join()
        ring.close()
    totals = [sum(parts) for parts in zip(*host.times.values(), strict=True)]
    for part, seconds in (*host.times.items(), ("total", totals)):
        line(part, seconds)
    print(f"{statistics.mean(totals) * 1e3:.3f}")


def line(part: str, seconds: list[float]) -> None:
    milliseconds = sorted(value * 1e3 for value in seconds)
    print(
        f"{part:9} mean {statistics.mean(milliseconds):7.3f} ms  median {statistics.median(milliseconds):7.3f} ms  "
        f"p99 {milliseconds[int(0.99 * len(milliseconds))]:7.3f} ms  max {milliseconds[-1]:7.3f} ms"
    )


if __name__ == "__main__":
    main()
