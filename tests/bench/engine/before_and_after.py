"""On one GPU: what a change of structure must leave as it is, which are bits of launches and of answers, and six steps.

    python tests/bench before_and_after --write before.json                # of the tree before; under 7 minutes
    python tests/bench before_and_after --write after.json --beside before.json

Random weights at the published geometry, the engine without HTTP, each model in a process of its own. A line of the
table: median milliseconds from result to result; the hash of answers, which are sampled tokens and the float32 bits of
log probabilities, computed twice; with --beside the milliseconds before, and whether the hash is the same. Last come
launches that are repeated bit by bit (`equal_bits.py`). Exit status: 1 where a hash differs from the one before or from
its repetition, or a launch from another; the times are for a reader. 31B with 32 decodes wants the memory of an H200.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import entries
from bench.deadline import add_deadline, within
from bench.engine.replica import Bench, launch_random

# By model, as variant and weights: decodes and the prompt behind each, and rows of a prompt beside them in a step.
STEPS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "31B": ((1, 8192, 0), (32, 1500, 0), (32, 1500, 512)),
    "31B int4_g32": ((1, 8192, 0),),
    "E4B": ((32, 1500, 0),),
    "26B-A4B": ((32, 1500, 0),),
}
TRIED = {"tiny": ((1, 96, 0), (4, 40, 0), (4, 40, 64))}  # --device cpu: whether the tool runs
CHUNK = 8192
TIMED = 48  # steps
ANSWERED = 6  # tokens of every answer that is hashed
FIRST = 3  # prompts of a mixed load, of so many steps each
LINE = "{:14} {:>7} {:>8} {:>6} {:>10} {:>10} {:>8}  {}"


def answers(bench: Bench, decodes: int, prompt: int, rows: int) -> str:
    """Hash of what these requests, and one of `rows` that comes when they decode, are answered."""
    bench.random.seed(decodes * prompt + rows)
    bench.count = 0
    waiting = [bench.request(rows, ANSWERED, logprobs=4)] if rows else []
    for request in (bench.request(prompt, ANSWERED, logprobs=4) for _ in range(decodes)):
        bench.scheduler.add(request)
    found: dict[str, list[Any]] = {}
    while bench.engine.has_work:
        for output in bench.engine.step():
            assert output.error is None, output.error
            said = [(each.logprob.hex(), each.rank, each.top) for each in output.logprobs]
            found.setdefault(output.request_id, []).extend(zip(output.token_ids, said, strict=True))
        if waiting and len(found) == decodes:
            bench.scheduler.add(waiting.pop())
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()[:12]


def milliseconds(bench: Bench, decodes: int, prompt: int, rows: int) -> float:
    """Median of a step in which all decode, beside `rows` of a prompt where there are any."""
    bench.first_tokens([bench.request(prompt, 100_000) for _ in range(decodes)])
    found: list[float] = []
    for _ in range(FIRST if rows else 1):
        long = bench.request(rows * TIMED // FIRST, 1) if rows else None
        if long is not None:
            bench.scheduler.add(long)
        for _ in range(TIMED // FIRST if rows else TIMED):
            began = time.perf_counter()
            bench.engine.step()
            found.append(1e3 * (time.perf_counter() - began))
    for number in range(bench.count + 1):
        bench.scheduler.abort(f"r{number}")
    while bench.engine.has_work:
        bench.engine.step()
    return statistics.median(found)


def one_model(name: str, device: str, seconds: float) -> None:
    """A line of JSON for each of the model's steps."""
    variant, _, weights = name.partition(" ")
    steps = STEPS.get(name) or TRIED[name]
    longest = max(max(prompt, rows * TIMED) + 4096 for _, prompt, rows in steps)
    with within(seconds):
        replica, args = launch_random(
            variant, weights or None, device=device, max_model_len=longest, max_num_batched_tokens=CHUNK,
            max_num_seqs=64, max_num_mixed_tokens=max(*(rows + decodes for decodes, _, rows in steps), 512),
            **({"cpu_memory_bytes": 1 << 30} if device == "cpu" else {}),
        )  # fmt: skip
        bench = Bench(replica, args)
        bench.scheduler.limits = replace(bench.scheduler.limits, captured_rows=replica.captured_rows)
        for decodes, prompt, rows in steps:
            hashes = [answers(bench, decodes, prompt, rows) for _ in range(2)]
            line = {"model": name, "decodes": decodes, "prompt": prompt, "rows": rows, "answers": hashes}
            line["ms"] = milliseconds(bench, decodes, prompt, rows)
            line["preempted"] = bench.scheduler.stats().preemptions_total > 0
            print(json.dumps(line), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="file for the figures")
    parser.add_argument("--beside", type=Path, help="figures from before")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a tiny model, to try the tool")
    parser.add_argument("--launches", type=int, default=1000, help="of every kernel that are compared bit by bit")
    parser.add_argument("--model", help=argparse.SUPPRESS)
    add_deadline(parser)
    options = parser.parse_args()
    if options.model is not None:
        one_model(options.model, options.device, options.deadline)
        return 0
    before = {} if options.beside is None else {key(each): each for each in json.loads(options.beside.read_text())}
    lines: list[dict[str, Any]] = []
    faults = 0
    with within(options.deadline) as spent:
        print(LINE.format("model", "decodes", "context", "rows", "ms", "before", "", "answers"))
        for name in STEPS if options.device == "cuda" else TRIED:
            command = entries.command(
                "before_and_after", "--model", name, "--device", options.device, "--deadline", "150"
            )
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
                assert child.stdout is not None
                for said in child.stdout:
                    if said.startswith("{"):
                        lines.append(json.loads(said))
                        faults += told(lines[-1], before.get(key(lines[-1])))
            if child.returncode or not any(line["model"] == name for line in lines):
                print(f"{name}: ended with {child.returncode}")
                faults += 1
        if options.write is not None:
            options.write.write_text(json.dumps(lines, indent=1))
        if options.device == "cuda":
            command = entries.command("equal_bits", "--launches", str(options.launches), "--seconds", "100")
            faults += subprocess.run(command, check=False).returncode != 0
    print(f"{faults} faults, {spent.seconds:.0f} s")
    return spent.code(bool(faults))


def key(line: dict[str, Any]) -> tuple[Any, ...]:
    return line["model"], line["decodes"], line["prompt"], line["rows"]


def told(line: dict[str, Any], before: dict[str, Any] | None) -> bool:
    """Print a line of the table; whether its answers are at fault."""
    first, again = line["answers"]
    said, fault = first, first != again
    if fault:
        said = f"{first} and then {again}: answers do not repeat"
    elif before is not None:
        fault = first != before["answers"][0]
        said += f", was {before['answers'][0]}" if fault else ", as before"
    if line["preempted"]:
        said += "; requests were preempted: this GPU has no room for them, and the times are of fewer"
    then, change = "", ""
    if before is not None:
        then, change = f"{before['ms']:.3f}", f"{100 * (line['ms'] / before['ms'] - 1):+.2f} %"
    print(LINE.format(*key(line), f"{line['ms']:.3f}", then, change, said), flush=True)
    return fault
