"""Where the time of a step goes on a GPU: kernels of one prefill, of decode steps and of mixed ones, longest first.

    python tests/bench step_profile --variant 31B [--context 8192] [--batch 1] [--mixed 2048] [--weights int4_g32]

Random weights at the published geometry. Prints microseconds per step and launches per step of every kernel. A kernel
that starts while the one before it runs counts from that one's end. --mixed: the steps in which a prompt of so many
tokens is computed beside decodes.
"""

from __future__ import annotations

import argparse
import re
import time
from collections import defaultdict

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.engine.replica import Bench, launch_random
from modelserve.planning.wishes import DEFAULT_MAX_NUM_SEQS


def short(name: str) -> str:
    """A kernel's name without its template arguments."""
    name = re.sub(r"^void ", "", name)
    return re.sub(r"[<(].*", "", name)[:60]


def table(title: str, run, *, steps: int) -> None:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
        run()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.end)
    times, counts, ended = defaultdict(float), defaultdict(int), events[0].time_range.start
    for event in events:
        times[short(event.name)] += event.time_range.end - max(ended, event.time_range.start)
        counts[short(event.name)] += 1
        ended = event.time_range.end
    total = sum(times.values()) / steps
    print(f"{title}: {total:.0f} us a step with something on the device, {sum(counts.values()) / steps:.0f} launches")
    for name, spent in sorted(times.items(), key=lambda item: -item[1])[:24]:
        print(f"  {name:60} {spent / steps:10.1f} us  {counts[name] / steps:7.1f} x {spent / counts[name]:8.2f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", required=True)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--mixed", type=int, help="tokens of a prompt beside the decodes")
    parser.add_argument("--weights", help="quantised random weights, such as int4_g32; else bfloat16")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--max-num-mixed-tokens", type=int, default=512)
    parser.add_argument("--profile", choices=["fast", "exact"], default="fast")
    options = parser.parse_args()
    longest = max(options.context, options.mixed or 0) + 2048
    replica, args = launch_random(
        options.variant, options.weights, device="cuda", max_model_len=longest, kv_cache_dtype=options.kv_cache_dtype,
        max_num_batched_tokens=options.max_num_batched_tokens, max_num_mixed_tokens=options.max_num_mixed_tokens,
        max_num_seqs=max(DEFAULT_MAX_NUM_SEQS, options.batch), profile=options.profile,
    )  # fmt: skip
    bench = Bench(replica, args)
    name = f"{options.variant} {options.weights or ''} {replica.geometry.dtype.value}"

    def prefill() -> None:
        bench.scheduler.add(bench.request(options.context, 1))
        while bench.engine.has_work:
            bench.engine.step()

    prefill()
    torch.cuda.synchronize()
    began = time.perf_counter()
    bench.scheduler.add(bench.request(options.context, 4))
    marks = []
    while bench.engine.has_work:
        found = bench.engine.step()
        marks.append(f"{1e3 * (time.perf_counter() - began):.1f}{'*' * len(found)}")
    print(f"{name} prefill of {options.context} and 3 tokens more, ms at the end of each step: {' '.join(marks)}")
    table(f"{name} prefill of {options.context}", prefill, steps=1)
    bench.first_tokens([bench.request(options.context, 2000) for _ in range(options.batch)])

    def decode() -> None:
        for _ in range(options.steps):
            bench.engine.step()

    decode()
    torch.cuda.synchronize()
    began = time.perf_counter()
    decode()
    torch.cuda.synchronize()
    wall = (time.perf_counter() - began) / options.steps
    table(f"{name} decode, batch {options.batch}, wall {1e3 * wall:.2f} ms a step", decode, steps=options.steps)
    if options.mixed is None:
        return

    def mixed() -> int:
        return bench.first_tokens([bench.request(options.mixed, 2)])

    table(f"{name} {options.batch} decodes beside a prompt of {options.mixed}", mixed, steps=mixed())
