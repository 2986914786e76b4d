"""Tensor parallel on real GPUs: memory, TTFT and TPOT of one request, and whether all ranks sample the same tokens.

    python tests/bench ranks_on_gpu --variant 31B [--weights int4_g32] [--ranks 2] [--tokens 100000] [--pool-gib 11.54]

Every step's tokens are compared over ranks by their checksum, as in
service; --tokens decodes so many at batch 64 of greedy, unfiltered and filtered rows and says of how many steps all
ranks' checksums were seen. --pool-gib gives the cache exactly so much on each GPU, and fills it with requests of
--max-model-len. Exit status 1 when ranks came to other tokens.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

from bench.engine.engine_on_gpu import driver_line, memory_lines
from bench.engine.replica import Bench, launch_random
from bench.engine.step_profile import table
from modelserve.engine_args import EngineArgs
from modelserve_worker.engine.plan_report import plan_report
from modelserve_worker.startup.replica import LaunchedReplica, MultiRankRunner, WorkerRanks

BATCH = 64
KINDS: tuple[dict[str, float], ...] = (
    {"temperature": 0.0}, {}, {"top_k": 64, "top_p": 0.95}, {"top_k": 5, "min_p": 0.05, "temperature": 0.7},
    {"temperature": 1.5}, {"top_p": 0.9}, {"top_k": 20, "repetition_penalty": 1.3},
)  # fmt: skip


class Compared:
    """Counts the steps of which every rank's checksum was held against rank 0's."""

    def __init__(self, workers: WorkerRanks, ranks: int) -> None:
        self.steps = self.unseen = 0
        self._workers, self._others, self._compare = workers, ranks - 1, workers.compare
        vars(workers)["compare"] = self.compare

    def compare(self, step: int, checksum: int) -> None:
        waiting = {*self._workers._own, step}
        self._compare(step, checksum)  # raises where they differ
        for done in waiting - {*self._workers._own}:
            seen = all(self._workers._ring.noted(reader, done) is not None for reader in range(self._others))
            self.steps += seen
            self.unseen += not seen


def latency(name: str, bench: Bench, prompt: int, output: int) -> None:
    for _ in range(2):
        (times,) = bench.run([bench.request(prompt, output)])[0].values()
    tpot = (times[-1] - times[0]) / (len(times) - 1)
    print(f"{name} {prompt}/{output} c=1: TTFT {1e3 * times[0]:.0f} ms, TPOT {1e3 * tpot:.2f} ms", flush=True)


def profiled(name: str, bench: Bench, prompt: int) -> None:
    """Kernels of rank 0 in one prefill and in decode steps of one request; what waits for rank 1 counts as its own."""

    def prefill() -> None:
        bench.run([bench.request(prompt, 1)])

    table(f"{name} prefill of {prompt}", prefill, steps=1)
    bench.scheduler.add(bench.request(prompt, 60))
    for _ in range(20):
        bench.engine.step()

    def decode() -> None:
        for _ in range(16):
            bench.engine.step()

    table(f"{name} decode at {prompt}", decode, steps=16)
    while bench.engine.has_work:
        bench.engine.step()


def same_tokens(name: str, bench: Bench, replica: LaunchedReplica, tokens: int, ranks: int) -> None:
    assert isinstance(replica.runner, MultiRankRunner)
    compared = Compared(replica.runner._workers, ranks)
    each = -(-tokens // BATCH)
    requests = [bench.request(64, each, **KINDS[row % len(KINDS)]) for row in range(BATCH)]
    began = time.perf_counter()
    arrivals, _ = bench.run(requests)
    seconds = time.perf_counter() - began
    count = sum(len(times) for times in arrivals.values())
    print(
        f"{name} {count} tokens at batch {BATCH} in {seconds:.1f} s ({count / seconds:.0f} tok/s): ranks equal in "
        f"{compared.steps} steps, {compared.unseen} not seen in time", flush=True,
    )  # fmt: skip


def fill(name: str, replica: LaunchedReplica, args: EngineArgs, pool_bytes: int) -> None:
    """Run as many requests of the longest context at once as the pool holds, over `pool_bytes` of it alone."""
    bench, geometry = Bench(replace(replica, pool_bytes=pool_bytes), args), replica.geometry
    longest = replica.max_model_len
    fits = geometry.requests(pool_bytes, longest - 1)
    print(
        f"{name} pool {pool_bytes / 2**30:.2f} GiB a GPU: {geometry.concurrency(pool_bytes, longest)} requests of "
        f"{longest} tokens, longest request {geometry.longest_request(pool_bytes)} tokens", flush=True,
    )  # fmt: skip
    began = time.perf_counter()
    arrivals, preemptions = bench.run([bench.request(longest - 4, 4) for _ in range(fits)])
    assert all(len(times) == 4 for times in arrivals.values())
    print(f"{name} {fits} of them ran together, {preemptions} preemptions, {time.perf_counter() - began:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", required=True)
    parser.add_argument("--weights", help="quantised random weights, such as int4_g32 or fp8_channel; else bfloat16")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--max-model-len", type=int, default=16384)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=0)
    parser.add_argument("--pool-gib", type=float)
    parser.add_argument("--profile", action="store_true", help="kernels of a prefill and of decode steps, by time")
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--output", type=int, default=100)
    options = parser.parse_args()
    name = f"{options.variant} {options.weights or 'bfloat16'} TP{options.ranks}"
    began = time.perf_counter()
    replica, args = launch_random(
        options.variant, options.weights, device="cuda", tensor_parallel_size=options.ranks,
        max_model_len=options.max_model_len, max_num_batched_tokens=options.max_num_batched_tokens, max_num_seqs=BATCH,
    )  # fmt: skip
    print(f"{name} ready after {time.perf_counter() - began:.1f} s, pool {replica.pool_bytes / 2**30:.2f} GiB")
    try:
        report = plan_report(args, replica.architecture, replica.memory, replica.table)
        memory_lines(name, report, replica.memory.total_bytes)
        for term in report["terms"]:
            print(f"{name} term {term}")
        bench = Bench(replica, args)
        bench.run([bench.request(64, 4)])
        latency(name, bench, options.prompt, options.output)
        latency(name, bench, 128, options.output)
        if options.profile:
            profiled(name, bench, options.prompt)
        if options.tokens:
            same_tokens(name, bench, replica, options.tokens, options.ranks)
        driver_line(name, bench, replica, args, report)
        if options.pool_gib is not None:
            fill(name, replica, args, int(options.pool_gib * 2**30))
    finally:
        replica.runner.shutdown()
    print(f"{name} ended in order", flush=True)
