"""What a prefix cache finds on named traces.

    python tests/bench prefix_policy

Each trace (tests/worker/scheduling/prefix_traces.py) runs through the real scheduler, without a device, over the pages
of a published model: once over a pool that never runs out, once over the stated budget. Prints the prompt tokens of
each, the share of them that an oracle with unlimited memory finds, the shares that were found, and the last one of the
oracle's. With --sequences N the oracle of the tests watches N random requests
besides, token for token (100,000 take some minutes).
"""

from __future__ import annotations

import argparse

import pytest
from prefix_oracle import sequence
from prefix_traces import TRACES, found, known

from modelserve.published import published_model
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout, cache_geometry

PER_SEQUENCE = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="hf://google/gemma-4-31B-it")
    parser.add_argument("--pool-gib", type=float, default=64.0, help="the budget (default 64: the 31B on one H200)")
    parser.add_argument("--traces", nargs="*", choices=list(TRACES), default=list(TRACES))
    parser.add_argument("--sequences", type=int, default=0, help="random requests that the oracle watches")
    flags = parser.parse_args()
    facts = published_model(flags.model)
    assert facts is not None, f"{flags.model} is not published"
    layout = KVCacheLayout.least(facts.architecture)
    geometry = cache_geometry(facts.architecture, dtype=KVCacheDtype.BFLOAT16, layout=layout, tensor_parallel_size=1)
    budget = int(flags.pool_gib * (1 << 30))
    print(f"{'trace':10} {'tokens':>10} {'oracle':>8} {'no limit':>9} {flags.pool_gib:6g} GiB {'of the oracle':>14}")
    for name in flags.traces:
        trace = TRACES[name]
        tokens, best = known(trace())
        _, most = found(trace(), geometry, 1 << 44)
        _, hits = found(trace(), geometry, budget)
        shares = f"{best / tokens:8.1%} {most / tokens:9.1%} {hits / tokens:10.1%} {hits / best:14.1%}"
        print(f"{name:10} {tokens:10} {shares}")
    asked = 0
    for seed in range(-(-flags.sequences // PER_SEQUENCE)):
        with pytest.MonkeyPatch.context() as patch:
            asked += sequence(10_000 + seed, patch, requests=PER_SEQUENCE, roomy=bool(seed % 2)).asked
    if asked:
        print(f"{asked} look-ups of {flags.sequences} requests were the oracle's")
