"""What a request costs the host behind a prefix that thousands share.

    python tests/bench many_prefixes

One request after the other through the real scheduler, without a device, over pages of 64 and 32 tokens and a window of
512. All have 3,010 tokens in common, then some of their own. Prints the median host time of 50 requests around the
50th and the last, and the operations of one of each, counted: in a pool that never runs out, in one that holds less
than half of what they leave, and with host memory that holds as much again behind it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial

from operations import counted
from prefix_sessions import MODEL, Sessions, text

SHARED = text(1, 3_010)
GEOMETRY = MODEL.geometry(window=512, global_tokens=64, sliding_tokens=32, global_row=1, sliding_row=1)
AROUND = 25


def sessions(requests: int, own: int, memory: str) -> Sessions:
    longest = len(SHARED) + own + 64
    prefix = GEOMETRY.held_bytes(512 + 64 + own) + own + 64
    held = 4 * GEOMETRY.held_bytes(longest)
    pool = held + (2 * prefix * requests if memory == "roomy" else prefix * requests // 10)
    host = prefix * requests // 5 if memory == "host" else 0
    return Sessions(GEOMETRY, stamped=False, slots=4, longest=longest, pool_bytes=pool, host_bytes=host)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--own", type=int, nargs="*", default=[10, 63, 300])
    parser.add_argument("--memory", nargs="*", choices=["roomy", "short", "host"], default=["roomy", "short", "host"])
    flags = parser.parse_args()
    early, late = 2 * AROUND, flags.requests - AROUND
    print(
        f"{'own':>4} {'memory':>6} {'kept':>6} {'gone':>6} {'ms then':>8} {'ms now':>7} {'ops then':>9} {'ops now':>8}"
    )
    for own in flags.own:
        for memory in flags.memory:
            asked, seconds, operations = sessions(flags.requests, own, memory), [], []
            for number in range(flags.requests):
                prompt = SHARED + text(2 + number, own)
                if number in (early, late):
                    operations.append(counted(partial(asked.ask, prompt, text(5, 3))))
                    continue
                began = time.perf_counter()
                asked.ask(prompt, text(5, 3))
                seconds.append(time.perf_counter() - began)
                asked.requests.clear()
                asked.texts.clear()
            then, now = (statistics.median(seconds[at - AROUND : at + AROUND]) * 1e3 for at in (early, late))
            cache = asked.reuse.cache
            print(
                f"{own:4} {memory:>6} {len(cache._prefixes):6} {cache.evictions:6} {then:8.2f} {now:7.2f} "
                f"{operations[0]:9} {operations[1]:8}", flush=True,
            )  # fmt: skip
