"""The engine on real GPUs, published geometry, random weights: memory predicted and measured, then requests through it.

    python tests/bench engine_on_gpu --variant E4B [--tensor-parallel-size 2] [--max-model-len 32768] [--fill]

Prints one line per memory term, the time to ready, TTFT and TPOT of one request, and (--fill) how many requests of
maxModelLen ran together without preemption. Lines start with the variant, so that several runs can be read together.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from bench.engine.replica import Bench, launch_random
from modelserve.engine_args import EngineArgs
from modelserve_worker.engine.plan_report import plan_report
from modelserve_worker.startup.replica import LaunchedReplica

MIB = 1 << 20


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
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
        if options.fill:
            planned = replica.geometry.requests(report["perGpu"]["kvPoolBytes"], replica.max_model_len - 1)
            fits = replica.geometry.requests(replica.pool_bytes, replica.max_model_len - 1)
            requests = [bench.request(replica.max_model_len - 4, 4) for _ in range(fits)]
            began = time.perf_counter()
            arrivals, preemptions = bench.run(requests)
            assert all(len(times) == 4 for times in arrivals.values())
            print(
                f"{name} {fits} requests of {replica.max_model_len} tokens at once ({planned} planned): "
                f"{preemptions} preemptions, "
                f"{time.perf_counter() - began:.1f} s"
            )
    finally:
        replica.runner.shutdown()
