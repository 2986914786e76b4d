"""The engine on real GPUs, published geometry, random weights: memory predicted and measured, then requests through it.

    python tests/bench engine_on_gpu --variant E4B [--max-model-len 32768] [--fill]
    python tests/bench engine_on_gpu --variant 31B --tensor-parallel-size 2 [--tokens 100000] [--fill --pool-gib 11.54]

Prints one line per memory term, the time to ready, TTFT and TPOT of one request, and (--fill) how many requests of
maxModelLen ran together without preemption, with --pool-gib in exactly so much on each GPU. Every step's tokens are
compared over ranks by their checksum, as in service; --tokens decodes so many at batch 64 of greedy, unfiltered and
filtered rows and says of how many steps all ranks' checksums were seen. Lines start with the variant, so that several
runs can be read together.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

import torch

from bench.engine.replica import Bench, launch_random
from modelserve.engine_args import EngineArgs
from modelserve_worker.engine.plan_report import plan_report
from modelserve_worker.startup.replica import LaunchedReplica, MultiRankRunner, WorkerRanks

MIB = 1 << 20
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


def driver_line(name: str, bench: Bench, replica: LaunchedReplica, args: EngineArgs, report: dict[str, Any]) -> None:
    """The pool the plan promised against utilisation x total less what the driver says that everything else took.

    The allocator gives nothing back to the driver, so what the driver calls used after the heaviest steps is the peak:
    full chunks behind a long context, then every sequence sampled with every filter on.
    """
    filters = {"top_k": 50, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1, "logprobs": 20}
    chunk = args.max_num_batched_tokens
    bench.run([bench.request(min(2 * chunk, replica.max_model_len - 4), 2)])
    bench.run([bench.request(16, 4, **filters) for _ in range(args.max_num_seqs)])
    free, total = torch.cuda.mem_get_info(0)
    rest = total - free - replica.pool_bytes
    left = int(args.gpu_memory_utilization * total) - rest
    promised = report["perGpu"]["kvPoolBytes"]
    print(
        f"{name} memory driver: everything but the pool {rest / MIB:.0f} MiB, so {left / MIB:.0f} MiB of pool were "
        f"possible, {promised / MIB:.0f} promised: {100 * (promised - left) / total:+.2f} % of the GPU"
    )


def memory_lines(name: str, report: dict[str, Any], total: int) -> None:
    for term, predicted in report["perGpu"].items():
        measured = report["allocated"][term]
        error = 100 * (predicted - measured) / total
        print(
            f"{name} memory {term:16} predicted {predicted / MIB:10.0f} MiB measured {measured / MIB:10.0f} MiB "
            f"difference {error:+.2f} % of the GPU"
        )
    print(f"{name} concurrency predicted {report['concurrency']} allocated {report['allocatedConcurrency']}")


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


def fill(name: str, replica: LaunchedReplica, args: EngineArgs, planned_bytes: int, pool_bytes: int) -> None:
    """Run as many requests of the longest context at once as a pool of `pool_bytes` holds."""
    bench, geometry, longest = (
        Bench(replace(replica, pool_bytes=pool_bytes), args),
        replica.geometry,
        replica.max_model_len,
    )
    planned, fits = (geometry.requests(size, longest - 1) for size in (planned_bytes, pool_bytes))
    print(
        f"{name} pool {pool_bytes / 2**30:.2f} GiB a GPU: {geometry.concurrency(pool_bytes, longest)} requests of "
        f"{longest} tokens, longest request {geometry.longest_request(pool_bytes)} tokens", flush=True,
    )  # fmt: skip
    began = time.perf_counter()
    arrivals, preemptions = bench.run([bench.request(longest - 4, 4) for _ in range(fits)])
    assert all(len(times) == 4 for times in arrivals.values())
    print(
        f"{name} {fits} requests of {longest} tokens at once ({planned} planned): {preemptions} preemptions, "
        f"{time.perf_counter() - began:.1f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", required=True)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--max-model-len", type=int, default=32768)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--weights", help="quantised random weights, such as int4_g32")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--output", type=int, default=32)
    parser.add_argument("--drafter", action="store_true", help="with an assistant of the published shape")
    parser.add_argument("--memory-only", action="store_true", help="stop after the memory lines")
    parser.add_argument("--tokens", type=int, default=0, help="of several ranks, which are compared")
    parser.add_argument("--pool-gib", type=float, help="of --fill, on each GPU")
    parser.add_argument("--fill", action="store_true", help="run the planned concurrency at --max-model-len")
    options = parser.parse_args()
    began = time.perf_counter()
    replica, args = launch_random(
        options.variant, options.weights, assistant=options.drafter, device="cuda",
        tensor_parallel_size=options.tensor_parallel_size, max_model_len=options.max_model_len,
        max_num_batched_tokens=options.max_num_batched_tokens, max_num_seqs=options.max_num_seqs,
        kv_cache_dtype=options.kv_cache_dtype, gpu_memory_utilization=options.gpu_memory_utilization,
    )  # fmt: skip
    weights = f" {options.weights}" if options.weights else ""
    weights += " and an assistant" if options.drafter else ""
    name = f"{options.variant}{weights} TP{options.tensor_parallel_size} {replica.geometry.dtype.value}"
    print(f"{name} ready after {time.perf_counter() - began:.1f} s, pool {replica.pool_bytes / 2**30:.2f} GiB")
    report = plan_report(args, replica.architecture, replica.memory, replica.table)
    try:
        memory_lines(name, report, replica.memory.total_bytes)
        bench = Bench(replica, args)
        bench.run([bench.request(64, 4)])
        driver_line(name, bench, replica, args, report)
        if options.memory_only:
            return
        ((times,), _) = bench.run([bench.request(options.prompt, options.output)])[0].values(), None
        tpot = (times[-1] - times[0]) / (len(times) - 1)
        print(f"{name} {options.prompt}/{options.output} c=1: TTFT {1e3 * times[0]:.0f} ms, TPOT {1e3 * tpot:.2f} ms")
        if options.tokens:
            same_tokens(name, bench, replica, options.tokens, options.tensor_parallel_size)
        if options.fill:
            pool = int(options.pool_gib * 2**30) if options.pool_gib else replica.pool_bytes
            fill(name, replica, args, report["perGpu"]["kvPoolBytes"], pool)
    finally:
        replica.runner.shutdown()
