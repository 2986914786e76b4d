"""What a prefix cache finds on named traces: PYTHONPATH=operator:worker python tests/benchmarks/prefix_policy.py

Each trace runs through the real scheduler, without a device, over the pages of a published model: once over a pool
that never runs out, once over the stated budget. Prints the prompt tokens of each, the share of them that was found,
and what that is of the share without a limit. With --sequences N the oracle of the tests watches N random requests
besides, token for token (100,000 take some minutes).
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from modelserve.published import published_model
from modelserve.sizing.pages import CacheGeometry, KVCacheDtype, KVCacheLayout, cache_geometry

sys.path.insert(0, str(Path(__file__).parents[1] / "worker" / "scheduling"))
from prefix_oracle import sequence
from prefix_sessions import Sessions

Tokens = list[int]
PER_SEQUENCE = 40


@dataclass
class Turn:
    """A prompt, its answer, and where the prompt's histories part."""

    prompt: Tokens
    answer: Tokens
    checkpoints: tuple[int, ...] = ()


class Words:
    """Fresh tokens."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def __call__(self, count: int) -> Tokens:
        return self._random.choices(range(10, 250_000), k=count)


def chat(words: Words, *, system: Tokens, first: int, turn: int, answer: int, turns: int) -> Iterator[Turn]:
    history = system + words(first)
    for _ in range(turns):
        said = words(answer)
        yield Turn(history, said, (len(system),) if system else ())
        history = history + said + words(turn)


def agent(words: Words, *, system: Tokens, turns: int, calls: int) -> Iterator[Turn]:
    """Each question is answered after some calls, with thoughts that leave the history when the next one is asked."""
    history = system + words(300)
    for _ in range(turns):
        kept, prompt = history, history
        for _ in range(calls):
            thought, call, result = words(400), words(60), words(900)
            yield Turn(prompt, thought + call, (len(system), len(history)))
            kept, prompt = kept + call + result, prompt + thought + call + result
        said = words(300)
        yield Turn(prompt, said, (len(system), len(history)))
        history = kept + said + words(200)


def interleaved(sessions: list[Iterator[Turn]], seed: int) -> Iterator[Turn]:
    order = random.Random(seed)
    while sessions:
        session = order.choice(sessions)
        turn = next(session, None)
        if turn is None:
            sessions.remove(session)
        else:
            yield turn


def chats() -> Iterator[Turn]:
    words = Words(1)
    system = words(1500)
    made = [chat(words, system=system, first=300, turn=200, answer=300, turns=6) for _ in range(40)]
    return interleaved(list(made), 1)


def agents() -> Iterator[Turn]:
    words = Words(2)
    system = words(6000)
    return interleaved([agent(words, system=system, turns=3, calls=4) for _ in range(10)], 2)


def siblings() -> Iterator[Turn]:
    words = Words(3)
    system = words(3000)
    return interleaved([chat(words, system=system, first=500, turn=0, answer=200, turns=1) for _ in range(100)], 3)


def long_sessions() -> Iterator[Turn]:
    words = Words(4)
    made = [chat(words, system=[], first=65_000, turn=512, answer=150, turns=5) for _ in range(4)]
    return interleaved(list(made), 4)


TRACES: dict[str, Callable[[], Iterator[Turn]]] = {
    "chats": chats, "agents": agents, "siblings": siblings, "long": long_sessions,
}  # fmt: skip


def found(trace: Iterator[Turn], geometry: CacheGeometry, pool_bytes: int) -> tuple[int, int]:
    """Prompt tokens, and those that were found."""
    sessions = Sessions(geometry, chunk=8192, longest=80_000, pool_bytes=pool_bytes, slots=4, stamped=False)
    tokens = 0
    for turn in trace:
        tokens += len(turn.prompt)
        sessions.ask(turn.prompt, turn.answer, checkpoints=turn.checkpoints)
    return tokens, sessions.reuse.hits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="hf://google/gemma-4-31B-it")
    parser.add_argument("--pool-gib", type=float, default=64.0, help="the budget (default 64: the 31B on one H200)")
    parser.add_argument("--traces", nargs="*", choices=list(TRACES), default=list(TRACES))
    parser.add_argument("--sequences", type=int, default=0, help="random requests that the oracle watches")
    flags = parser.parse_args()
    facts = published_model(flags.model)
    assert facts is not None, f"{flags.model} is not published"
    layout = KVCacheLayout.V_ONLY if facts.architecture.attention_k_eq_v else KVCacheLayout.KV
    geometry = cache_geometry(facts.architecture, dtype=KVCacheDtype.BFLOAT16, layout=layout, tensor_parallel_size=1)
    budget = int(flags.pool_gib * (1 << 30))
    print(f"{'trace':10} {'tokens':>10} {'no limit':>9} {flags.pool_gib:6g} GiB {'of it':>7}")
    for name in flags.traces:
        trace = TRACES[name]
        tokens, most = found(trace(), geometry, 1 << 44)
        _, hits = found(trace(), geometry, budget)
        print(f"{name:10} {tokens:10} {most / tokens:9.1%} {hits / tokens:10.1%} {hits / most:7.1%}")
    asked = 0
    for seed in range(-(-flags.sequences // PER_SEQUENCE)):
        with pytest.MonkeyPatch.context() as patch:
            asked += sequence(10_000 + seed, patch, requests=PER_SEQUENCE, roomy=bool(seed % 2)).asked
    if asked:
        print(f"{asked} look-ups of {flags.sequences} requests were the oracle's")


if __name__ == "__main__":
    main()
