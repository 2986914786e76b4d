"""A session over the prefix cache and its host tier, in the engine without HTTP: published geometry, dummy weights.

    python tests/bench prefix_sessions --variant 31B

A prompt of --tokens, then --turn new ones: cold, from the pool, and from host memory after other prompts have pushed it
out of a pool that holds two; log-probs of the answers against an engine that computes everything, and how far that
engine is from itself with chunks of which the last has as many rows as the hit computed: the distance that rounding
makes. Many sessions, and chats behind a shared block, are what `sessions_over_http` has. 31B takes two minutes, E4B
half of one. A table comes last, also where --deadline or SIGTERM ends it before; the exit code is 1 where a hit says
something else, bytes are lost, or nothing came from where it should, 124 where time was up.
On the CPU: --variant tiny --device cpu --tokens 600 --turn 40 --host-gib 0.05 --least-gap 32
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.deadline import add_deadline, within
from bench.engine.replica import launch_random
from modelserve.engine_args import DEFAULT_MAX_NUM_MIXED_TOKENS
from modelserve.planning.speed.prompt_rows import rows_alone
from modelserve_worker.engine.engine import Engine
from modelserve_worker.request import Request, SamplingParams
from modelserve_worker.scheduling.admission import SchedulerLimits
from modelserve_worker.scheduling.scheduler import Scheduler
from modelserve_worker.scheduling.tiers.host_tier import host_tiers
from modelserve_worker.startup.replica import LaunchedReplica

GIB = 1 << 30
ANSWER = 16
TOKENS = {"31B": 65_000, "26B-A4B": 65_000, "12B": 65_000, "E4B": 32_000, "E2B": 32_000}


@dataclass
class Asked:
    """One request and what came of it; seconds are from its arrival."""

    request: Request
    arrived_s: float
    first_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def ttft_ms(self) -> float:
        return 1e3 * self.first_s


class Bench:
    """An engine over `replica`, with a pool of `pool_bytes`. Steps go on counting where the last engine ended, since
    the device says by their numbers which copies have ended."""

    steps = 0
    names = 0

    def __init__(
        self, replica: LaunchedReplica, options: argparse.Namespace, *, pool_bytes: int, caching: bool = True,
        chunk: int | None = None,
    ) -> None:  # fmt: skip
        batched = chunk or options.max_num_batched_tokens
        captured = () if chunk else replica.captured_rows  # chunks end where they should, not at a captured size
        limits = SchedulerLimits(batched, options.max_num_seqs, replica.max_model_len, (), captured_rows=captured)
        host = int(options.host_gib * GIB) // options.tensor_parallel_size if caching else 0
        self.scheduler = Scheduler(
            limits,
            replica.geometry,
            min(pool_bytes, replica.pool_bytes),
            prefix_caching=caching,
            tiers=host_tiers(host),
        )
        self.scheduler._step = Bench.steps
        if options.least_gap:
            self.scheduler.prefixes._least_gap = options.least_gap
        self.engine = Engine(self.scheduler, replica.runner)

    def alone(self, prompt: Sequence[int]) -> Asked:
        """A request to its end."""
        Bench.names += 1
        sampling = SamplingParams(seed=1, max_tokens=ANSWER, ignore_eos=True, temperature=0.0, logprobs=0)
        asked = Asked(Request(f"r{Bench.names}", tuple(prompt), sampling), time.perf_counter())
        self.engine.add(asked.request)
        while len(asked.tokens) < ANSWER:
            for output in (outputs := self.engine.step()):
                assert output.error is None, output.error
                asked.first_s = asked.first_s or time.perf_counter() - asked.arrived_s
                asked.tokens += output.token_ids
                asked.logprobs += [each.logprob for each in output.logprobs]
            if not outputs and not self.engine.has_work_in_flight:
                time.sleep(0.001)  # as the engine's loop does: copies from host memory are waited for
        return asked

    def close(self) -> None:
        """Nothing is lost, on either tier; what is on its way ends."""
        while self.engine.has_work:
            self.engine.step()
        time.sleep(0.2)
        if self.scheduler.prefixes.tiers:
            self.scheduler.prefixes.copied(self.engine.runner.host_progress())
        self.scheduler.check_integrity()
        assert self.scheduler.stats().held_bytes == 0
        Bench.steps = self.scheduler._step


class Words:
    """Fresh tokens."""

    def __init__(self, vocab: int) -> None:
        self._random, self._vocab = random.Random(7), vocab

    def __call__(self, count: int) -> list[int]:
        return [self._random.randrange(3, self._vocab) for _ in range(count)]


@dataclass
class Report:
    name: str
    rows: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def say(self, part: str, text: str) -> None:
        self.rows.append(f"{self.name:6} {part:8} {text}")
        print(self.rows[-1], flush=True)

    def check(self, what: str, holds: bool) -> None:
        if not holds:
            self.faults.append(what)


def distance(one: Asked, other: Asked) -> tuple[float, int]:
    """Largest difference of log-probs up to the first token that differs, that one included; equal tokens before it."""
    same = next((i for i, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=True)) if a != b), len(one.tokens))
    pairs = zip(one.logprobs[: same + 1], other.logprobs[: same + 1], strict=True)
    return max(abs(a - b) for a, b in pairs), same


def session(replica: LaunchedReplica, options: argparse.Namespace, words: Words, report: Report) -> None:
    held = replica.geometry.held_bytes(options.tokens + 2 * options.turn + 3 * ANSWER)
    pool = int(2.2 * held)
    bench = Bench(replica, options, pool_bytes=pool)
    history = words(options.tokens)
    cold = bench.alone(history)
    history = history + cold.tokens + words(options.turn)
    from_pool = bench.alone(history)
    history = history + from_pool.tokens + words(options.turn)
    for _ in range(3):
        bench.alone(words(options.tokens))
    before = bench.scheduler.stats()
    from_host = bench.alone(history)
    stats = bench.scheduler.stats()
    bench.close()
    report.say("session", f"cold {cold.ttft_ms:9.1f} ms for {options.tokens} tokens")
    for where, asked in (("pool", from_pool), ("host", from_host)):
        request = asked.request
        report.say(
            "session",
            f"{where} {asked.ttft_ms:9.1f} ms for {options.turn} new ones, {request.cached_tokens} cached, "
            f"{request.host_cached_tokens} of them from host memory",
        )
    host = stats.tier("host")
    restored = host.restored_bytes_total - before.tier("host").restored_bytes_total
    report.say("session", f"{restored / GIB:.3f} GiB came back, {host.stored_bytes_total / GIB:.3f} GiB were stored")
    report.check("the pool's turn was no hit", from_pool.request.cached_tokens >= options.tokens)
    report.check("the host's turn came from elsewhere", from_host.request.host_cached_tokens > options.tokens // 2)
    for where, asked in (("pool", from_pool), ("host", from_host)):
        prompt = asked.request.prompt_token_ids
        whole, like_the_hit = (
            computed(replica, options, prompt, chunk=chunk, pool=pool)
            for chunk in (None, chunk_that_leaves(asked, options.max_num_batched_tokens))
        )
        rounding, apart = distance(like_the_hit, whole)[0], distance(asked, whole)
        report.say(
            "session",
            f"{where} log-probs {apart[0]:.4f} from computed ones, which are {rounding:.4f} from those of other chunks "
            f"(the hit {distance(asked, like_the_hit)[0]:.4f}); {apart[1]} of {ANSWER} tokens the same",
        )
        report.check(f"the {where} hit says something else", apart[0] <= 2 * rounding + 0.02)


def computed(
    replica: LaunchedReplica, options: argparse.Namespace, prompt: Sequence[int], *, chunk: int | None, pool: int
) -> Asked:
    """The answer of an engine without a cache."""
    bench = Bench(replica, options, pool_bytes=pool, caching=False, chunk=chunk)
    asked = bench.alone(prompt)
    bench.close()
    return asked


def chunk_that_leaves(hit: Asked, most: int) -> int:
    """Tokens of a chunk with which the last one of the prompt has the rows that a hit computed: kernels round by how
    many rows they are given, and the logits are those of the last chunk."""
    before = hit.request.cached_tokens
    longest = rows_alone(
        before, max_num_batched_tokens=most, max_num_mixed_tokens=DEFAULT_MAX_NUM_MIXED_TOKENS
    )  # the scheduler gives a long prompt no more
    chunks = -(-before // longest)
    return -(-before // chunks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--tokens", type=int, help="of a session's first prompt; default by variant")
    parser.add_argument("--turn", type=int, default=512, help="new tokens of a turn")
    parser.add_argument("--host-gib", type=float, default=64.0)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    parser.add_argument("--cpu-memory-gib", type=float, default=3.0)
    parser.add_argument("--least-gap", type=int, default=0, help="tokens that a restore is worth; 0: the engine's")
    add_deadline(parser)
    options = parser.parse_args()
    options.tokens = options.tokens or TOKENS[options.variant]
    report = Report(f"{options.variant}")
    with within(options.deadline) as time_left:
        replica = started(options)
        try:
            report.say("start", f"ready after {time_left.seconds:.1f} s, pool {replica.pool_bytes / GIB:.2f} GiB")
            if options.host_gib:
                report.say("start", f"{pinned(replica)} pieces of host memory pinned {time_left.seconds:.1f} s after")
            words = Words(replica.architecture.vocab_size)
            Bench.steps = 1000
            warm = Bench(replica, options, pool_bytes=replica.pool_bytes, caching=False)
            warm.alone(words(min(1024, options.tokens)))
            warm.close()
            session(replica, options, words, report)
        finally:
            replica.runner.shutdown()
    print("\n" + "\n".join(report.rows))
    print("\n".join(f"FAULT: {fault}" for fault in report.faults) or "no faults")
    raise SystemExit(time_left.code(report.faults))


def started(options: argparse.Namespace) -> LaunchedReplica:
    cpu = {"cpu_memory_bytes": int(options.cpu_memory_gib * GIB)} if options.device == "cpu" else {}
    replica, _ = launch_random(
        options.variant, device=options.device, max_num_seqs=options.max_num_seqs,
        tensor_parallel_size=options.tensor_parallel_size, kv_cache_dtype=options.kv_cache_dtype,
        max_num_batched_tokens=options.max_num_batched_tokens, host_cache_bytes=int(options.host_gib * GIB),
        gpu_memory_utilization=options.gpu_memory_utilization, **cpu,
    )  # fmt: skip
    return replica


def pinned(replica: LaunchedReplica) -> int:
    """Pieces of host memory, once no more are pinned for a while."""
    pieces = -1
    while (now := replica.runner.host_progress().pieces) != pieces or not pieces:
        pieces = now
        time.sleep(1.0)
    return pieces
