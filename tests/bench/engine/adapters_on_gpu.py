"""On a GPU: requests with adapters beside requests without, in the engine without HTTP, by how many there are.

    python tests/bench adapters_on_gpu --variant 31B --adapters 16 --loaded 64 --rank 16
    python tests/bench adapters_on_gpu --variant E4B --adapters 16 --loaded 64 --rank 16
    python tests/bench adapters_on_gpu --variant 26B-A4B --experts --adapters 4 --loaded 4 --requests 1 32 --answer 48

Random weights at the published geometry, random adapters on every linear layer that may be adapted, of experts where
they are asked for. Base and adapters
take turns (base, adapters, adapters, base); requests of one adapter do not lie side by side. Prints tokens per second
of steps that decode, the ratio, and what it takes to bring an adapter from host memory into a slot.
"""

from __future__ import annotations

import argparse
import statistics
import time
from concurrent.futures import Future

import torch

from bench.deadline import add_deadline, within
from bench.engine.replica import Bench, launch_random
from modelserve.sizing.adapters import ADAPTABLE, DEFAULT_TARGETS
from modelserve_worker.adapters.slots import HostAdapter
from modelserve_worker.adapters.store import AdapterStore

PROMPT = 512


def random_adapters(store: AdapterStore, count: int) -> list[str]:
    """In host memory, by digest: the factors' sizes are those of trained ones."""
    slots, names = store.slots, []
    for number in range(count):
        factors = torch.empty(slots.elements, dtype=slots.dtype, device="cuda").normal_(std=0.01)
        pinned = torch.empty(slots.elements, dtype=slots.dtype, pin_memory=True)
        pinned.copy_(factors)
        ready: Future[HostAdapter] = Future()
        ready.set_result(HostAdapter(pinned, torch.ones(slots.scale_rows, slots.most_parts).pin_memory()))
        names.append(f"adapter-{number}")
        store._host[names[-1]] = ready
    return names


def rate(bench: Bench, requests: int, answer: int, names: list[str]) -> float:
    """Tokens per second once all prompts are computed."""
    asked = [bench.request(PROMPT, answer) for _ in range(requests)]
    for number, request in enumerate(asked):
        request.adapter = names[number % len(names)] if names else ""
        bench.scheduler.add(request)
    counts = dict.fromkeys((request.request_id for request in asked), 0)
    while not all(counts.values()):
        for output in bench.engine.step():
            counts[output.request_id] += len(output.token_ids)
    began, before = time.perf_counter(), sum(counts.values())
    while bench.engine.has_work:
        for output in bench.engine.step():
            counts[output.request_id] += len(output.token_ids)
    return (sum(counts.values()) - before) / (time.perf_counter() - began)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", required=True)
    parser.add_argument("--weights")
    parser.add_argument("--adapters", type=int, default=16)
    parser.add_argument("--loaded", type=int, default=64)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--experts", action="store_true", help="on experts, too")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--answer", type=int, default=96)
    add_deadline(parser)
    options = parser.parse_args()
    with within(options.deadline) as time_left:
        replica, args = launch_random(
            options.variant, options.weights, device="cuda", max_model_len=4096, max_num_batched_tokens=2048,
            max_num_seqs=max(options.requests), max_loras=options.adapters, max_cpu_loras=options.loaded,
            max_lora_rank=options.rank, lora_targets=ADAPTABLE if options.experts else DEFAULT_TARGETS,
        )  # fmt: skip
        store = replica.adapters
        assert store is not None
        bench = Bench(replica, args)
        names = random_adapters(store, options.loaded)
        for name in names:
            bench.scheduler.adapters.add(name, "")
        memory = replica.memory
        print(
            f"{options.variant} ready after {time_left.seconds:.1f} s: slots {store.slots.nbytes / 2**30:.3f} GiB, "
            f"weights with them {memory.weights_bytes / 2**30:.3f}, graphs {memory.overhead['graphs'] / 2**30:.3f}",
            flush=True,
        )
        host = store._host[names[0]].result()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for number in range(8):
            store.slots.place(number % options.adapters, host)
        torch.cuda.synchronize()
        taken = (time.perf_counter() - began) / 8
        print(f"host to slot: {1e3 * taken:.2f} ms, {host.factors.nbytes / taken / 1e9:.1f} GB/s", flush=True)
        rate(bench, 2, 8, names[: options.adapters])
        rows = []
        for requests in options.requests:
            several = names[: options.adapters]
            found = {False: [], True: []}
            for adapted in (False, True, True, False):
                found[adapted].append(rate(bench, requests, options.answer, several if adapted else []))
            base, with_adapters = (statistics.mean(found[each]) for each in (False, True))
            rows.append(
                f"{options.variant} {options.weights or 'bf16'} c={requests}, {min(requests, len(several))} adapters, "
                f"rank {options.rank}: base {base:.1f} tok/s, adapters {with_adapters:.1f}, "
                f"ratio {with_adapters / base:.3f} (spread {found})"
            )
            print(rows[-1], f"({time_left.seconds:.0f} s)", flush=True)
        crowd = names if len(names) > options.adapters else []
        if crowd:
            print(f"all {len(crowd)} by turns, c=32: {rate(bench, 32, options.answer, crowd):.1f} tok/s", flush=True)
    return time_left.code()
