"""Sessions, siblings, aborts and preemption over two ranks on the CPU, with a small pool and a small host tier.

    PYTHONPATH=operator:worker python tests/soak/sessions.py [--seconds 480] [--seed 1] [--drafts]

A third of the time all goes well, but that rank 0 gets half of its host memory; in the second third no store ends for a
while, in the last one no load. A second engine with one rank and no cache says what each answer is to be: the same
tokens, unless its own two best are closer than rounding. With --drafts the two ranks verify what prompt lookup
proposes. After every round of requests the bytes of both tiers are recounted and nothing is held. Prints a line a
round; exit code 1 where an answer is lost or another one, where nothing came from host memory, or where memory has
grown by more than 5 % since a third of the time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

from modelserve.engine_args import EngineArgs
from modelserve_worker.cache import host_memory
from modelserve_worker.engine.engine import Engine
from modelserve_worker.host_pages import HostProgress
from modelserve_worker.request import FinishReason, Request, RequestOutput, SamplingParams
from modelserve_worker.scheduling.admission import SchedulerLimits
from modelserve_worker.scheduling.scheduler import Scheduler
from modelserve_worker.scheduling.tiers import copy_lane
from modelserve_worker.scheduling.tiers.host_tier import host_tiers
from modelserve_worker.startup.replica import LaunchedReplica, launch

MODEL = Path(__file__).parents[1] / "models" / "gemma4-tiny-ple"
LONGEST, CHUNK = 700, 192
CLOSE = 1e-3  # log-probs of two tokens between which rounding decides
GROWTH = 1.05
LEAST_ROUNDS = 4
MOST_LATE_ROUNDS = 12  # in which nothing has come from host memory yet, of those in which all goes well


@dataclass
class Client:
    prompt: tuple[int, ...]
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)  # between the two best tokens, of the reference
    aborted: bool = False
    reason: FinishReason | None = None


class Driver:
    """An engine over `replica`."""

    def __init__(self, replica: LaunchedReplica, *, requests: float, host_bytes: int = 0) -> None:
        """The pool has room for so many of the longest requests."""
        limits = SchedulerLimits(CHUNK, 8, LONGEST, ())
        pool = int(requests * replica.geometry.held_bytes(LONGEST))
        self.scheduler = Scheduler(
            limits, replica.geometry, pool, draft_tokens=replica.runner.draft_tokens,
            prefix_caching=bool(host_bytes), tiers=host_tiers(host_bytes),
        )  # fmt: skip
        self.runner = replica.runner
        self.engine = Engine(self.scheduler, replica.runner)
        self.scheduler.prefixes._least_gap = 16
        self.count = 0

    def run(self, clients: list[Client], dice: random.Random | None = None) -> None:
        """All of them to their ends; with `dice` they come one after the other and some hang up."""
        waiting, names = list(clients), {}
        while waiting or self.engine.has_work:
            while waiting and (dice is None or dice.random() < 0.4):
                client = waiting.pop(0)
                self.count += 1
                names[f"r{self.count}"] = client
                sampling = SamplingParams(
                    seed=0, max_tokens=client.max_tokens, temperature=0.0, ignore_eos=True,
                    logprobs=None if dice else 2,
                )  # fmt: skip
                self.engine.add(Request(f"r{self.count}", client.prompt, sampling, client=str(self.count % 3)))
            outputs = self.engine.step()
            if dice is not None and names and dice.random() < 0.02:
                name = dice.choice(list(names))
                aborted = self.engine.abort(name)
                names[name].aborted |= aborted is not None
                outputs += [aborted] if aborted else []
            self._deliver(names, outputs)
        self.scheduler.check_integrity()
        assert self.scheduler.stats().held_bytes == 0, "bytes are held by nobody"

    def _deliver(self, names: dict[str, Client], outputs: list[RequestOutput]) -> None:
        for output in outputs:
            client = names[output.request_id]
            assert output.error is None, output.error
            client.tokens += output.token_ids
            client.gaps += [each.top[0][1] - each.top[1][1] for each in output.logprobs]
            client.reason = output.finish_reason or client.reason


def frozen(honest: object, names: set[str]) -> object:
    """Progress in which these never come further."""
    held: dict[str, int] = {}

    def progress() -> HostProgress:
        told: HostProgress = honest()  # type: ignore[operator]
        for name in names:
            held.setdefault(name, getattr(told, name))
        for name in list(held):
            if name not in names:
                del held[name]
        return told._replace(**held)

    return progress


def resident_mb() -> float:
    """Of this process and the other rank."""
    processes = [None, *(child.pid for child in multiprocessing.active_children())]
    files = [Path(f"/proc/{pid or 'self'}/statm") for pid in processes]
    return sum(int(file.read_text().split()[1]) for file in files) * 4096 / 1e6


def fail_half_of_the_host_memory() -> None:
    honest, calls = host_memory._piece, [0]

    def piece(*arguments: object) -> object:
        calls[0] += 1
        if calls[0] > 8:
            raise MemoryError("no more host memory for this rank")
        return honest(*arguments)  # type: ignore[arg-type]

    host_memory._piece = piece  # type: ignore[assignment]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--drafts", action="store_true")
    options = parser.parse_args()
    dice = random.Random(options.seed)
    copy_lane.STALLED_S = min(copy_lane.STALLED_S, options.seconds / 10)
    common = {
        "model": str(MODEL), "device": "cpu", "dtype": "float32", "cpu_memory_bytes": 2 << 30,
        "max_num_batched_tokens": CHUNK, "max_num_seqs": 8, "max_model_len": LONGEST,
    }  # fmt: skip
    alone = launch(EngineArgs(**common))
    held = alone.geometry.held_bytes(LONGEST)
    fail_half_of_the_host_memory()
    pair = launch(
        EngineArgs(
            **common, tensor_parallel_size=2, host_cache_bytes=2 * 12 * held, prompt_lookup=options.drafts
        )
    )  # fmt: skip
    reference = Driver(alone, requests=8)
    served = Driver(pair, requests=1.25, host_bytes=12 * held)
    never: set[str] = set()
    served.runner.host_progress = frozen(served.runner.host_progress, never)  # type: ignore[method-assign]
    texts: list[tuple[int, ...]] = [tuple(dice.choices(range(5, 200), k=dice.randint(100, 500))) for _ in range(6)]
    faults: list[str] = []
    began, first_mb, answers, rounds, late = time.monotonic(), 0.0, 0, 0, 0
    # Of the time, and of the least number of rounds: a slow machine goes through every part as well. Copies do not end
    # only once one has.
    while (part := min((time.monotonic() - began) / options.seconds, (rounds - late) / LEAST_ROUNDS)) < 1:
        never.clear()
        never |= {"stored"} if 1 / 3 < part <= 1 / 2 else {"loaded"} if part > 2 / 3 else set()
        clients = []
        for _ in range(6):
            base = dice.choice(texts)
            prompt = base[: dice.choice([len(base), len(base), dice.randint(1, len(base))])]
            prompt = (*prompt, *dice.choices(range(5, 200), k=dice.randint(1, 60)))[: LONGEST - 100]
            clients.append(Client(prompt, dice.choice([1, 1, 4, 8, 90])))
        if rounds % 3 == 1:  # a crowd of short prompts, whose answers grow beyond what was kept for them
            clients += [Client(tuple(dice.choices(range(5, 200), k=dice.randint(1, 40))), 190) for _ in range(8)]
        served.run(clients, dice)
        again = [Client(client.prompt, client.max_tokens) for client in clients]
        reference.run(again)
        for client, expected in zip(clients, again, strict=True):
            differ = [i for i, (a, b) in enumerate(zip(client.tokens, expected.tokens, strict=False)) if a != b]
            if differ and expected.gaps[differ[0]] > CLOSE:
                faults.append(f"another answer to {len(client.prompt)} tokens from token {differ[0]} on")
            if not client.aborted and (client.reason, len(client.tokens)) != (FinishReason.LENGTH, client.max_tokens):
                faults.append(f"an answer is lost: {client.reason}, {len(client.tokens)} of {client.max_tokens}")
        texts = [*texts[-5:], (*clients[-1].prompt, *clients[-1].tokens)[: LONGEST - 100]]
        texts += [tuple(dice.choices(range(5, 200), k=400))] if dice.random() < 0.2 else []
        answers, rounds, megabytes = answers + len(clients), rounds + 1, resident_mb()
        first_mb = first_mb if first_mb and part > 1 / 3 else megabytes
        stats = served.scheduler.stats()
        host = stats.tier("host")
        late += rounds > 1 and late < MOST_LATE_ROUNDS and not stats.prompt_tokens_host_total
        print(
            f"{answers} answers, {stats.preemptions_total} preempted, of {stats.prompt_tokens_total} prompt tokens "
            f"{stats.prompt_tokens_cached_total} cached and {stats.prompt_tokens_host_total} from host memory, "
            f"{host.used_bytes} of {host.capacity_bytes} bytes there, {megabytes:.0f} MB, "
            f"{sum(stats.accepted_per_position)} drafts accepted, never: {sorted(never)}, {len(faults)} faults",
            flush=True,
        )
    if megabytes > GROWTH * first_mb + 8:
        faults.append(f"memory grew from {first_mb:.0f} to {megabytes:.0f} MB")
    if not stats.prompt_tokens_host_total:
        faults.append("nothing came from host memory")
    pair.runner.shutdown()
    print("\n".join(faults) or "no faults")
    raise SystemExit(bool(faults))


if __name__ == "__main__":
    main()
