"""Ranks whose copies to or from host memory fail on one of them alone, when and how the arguments say.

    PYTHONPATH=operator:worker:tests/soak python dead_lanes.py DEVICE RANKS RANK:DIRECTION:CALL:TEXT ...

The CALL-th time that this rank copies in this direction ("stores", "loads") raises RuntimeError(TEXT); the text
"assert" has a kernel on a GPU fail behind the copies. Sessions by turns go through a pool that holds one; every answer
is compared with the first to that prompt, which was all computed. Prints a line of JSON. Another rank is a child that
imports this file again, under another name.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from modelserve.engine_args import EngineArgs
from modelserve_worker.batch import HostCopy
from modelserve_worker.cache.host_memory import HostMemory
from modelserve_worker.engine_client import EngineDead
from modelserve_worker.request import Request, SamplingParams
from modelserve_worker.startup.replica import launch

MODEL = Path(__file__).parents[2] / "models" / "gemma4-tiny-ple"
LONGEST = 500


def fail_as_asked(rank: int) -> None:
    faults = {(int(each[0]), each[1], int(each[2])): each[3] for each in (arg.split(":", 3) for arg in sys.argv[3:])}
    honest, calls = HostMemory._copy, Counter[str]()

    def copy(memory: HostMemory, copies: Sequence[HostCopy], *, to_host: bool) -> None:
        direction = "stores" if to_host else "loads"
        calls[direction] += 1
        text = faults.get((rank, direction, calls[direction]))
        if text not in (None, "assert"):
            raise RuntimeError(text)
        honest(memory, copies, to_host=to_host)
        if text == "assert":
            torch._assert_async(torch.zeros(1, device=memory._cache.arena.device))

    HostMemory._copy = copy  # type: ignore[method-assign]


def main() -> None:
    from sessions import Client, Driver  # tests/soak

    logging.basicConfig(level=logging.ERROR)
    args = EngineArgs(
        model=str(MODEL), device=sys.argv[1], dtype="float32", cpu_memory_bytes=2 << 30, gpu_memory_utilization=0.1,
        max_num_batched_tokens=192, max_num_seqs=8, max_model_len=LONGEST, tensor_parallel_size=int(sys.argv[2]),
        host_cache_bytes=int(sys.argv[2]) * 32 << 20,
    )  # fmt: skip
    replica = launch(args)
    served = Driver(replica, requests=1.25, host_bytes=args.host_cache_bytes // args.tensor_parallel_size)
    while replica.runner.host_progress().pieces < 1:
        time.sleep(0.01)
    said: dict[str, object] = {"hits": [], "same": [], "died": None}
    firsts: dict[int, list[int]] = {}
    try:
        for number in (1, 2, 3, 1, 2, 3, 1, 2):
            client = Client(tuple((7 * number + 13 * i * i) % 190 + 5 for i in range(360)), 8)
            before = served.scheduler.stats().prompt_tokens_host_total
            began = time.monotonic()
            served.run([client])
            firsts.setdefault(number, client.tokens)
            said["same"].append(client.tokens == firsts[number])  # type: ignore[attr-defined]
            said["hits"].append(served.scheduler.stats().prompt_tokens_host_total - before)  # type: ignore[attr-defined]
        engine = served.engine
        engine.add(Request("bad", (1 << 20, 5), SamplingParams(seed=0, max_tokens=1)))  # fails alike on both ranks
        said["bad"] = [output.error for _ in range(3) for output in engine.step()]
        client = Client(tuple(range(5, 105)), 8)
        served.run([client])
        said["after"] = len(client.tokens)
    except EngineDead as error:
        said["died"], said["died_after_s"] = str(error), time.monotonic() - began
    stats = served.scheduler.stats()
    host = stats.tier("host")
    said |= {"loads_off": host.loads_off, "stores_off": host.stores_off, "failed": stats.failed_steps_total}
    with contextlib.suppress(RuntimeError):  # of a GPU that is gone
        replica.runner.shutdown()
    print(json.dumps(said), flush=True)
    os._exit(0)  # a GPU that is gone fails in Python's teardown


if __name__ == "__main__":
    fail_as_asked(0)
    main()
else:
    fail_as_asked(1)
