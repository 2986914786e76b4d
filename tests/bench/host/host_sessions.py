"""Sessions by turns over a pool and host memory, in expected time, one H200, without a device.

    python tests/bench host_sessions [--host-gib 41]

The engine's own scheduler over the pages of a published model on one H200. Steps take what the speed model expects,
copies what a link of --link GB/s takes, and pieces of host memory come at --pin GiB/s from the first prompt on. As in
`sessions_over_http` half of the sessions are chats, whose answers are in their histories as other tokens
behind what a template opens an answer with; the others leave their answers out. Each turn says where it resumed; the
last line is what was lost, and the exit status 1 where anything was.
"""

from __future__ import annotations

import argparse
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from replay import Replay

from modelserve_worker.batch import SampledTokens, ScheduledBatch
from modelserve_worker.host_pages import HostProgress
from modelserve_worker.request import Request, SamplingParams
from modelserve_worker.scheduling.scheduler import Scheduler
from modelserve_worker.scheduling.tiers.host_tier import host_tiers

GIB = 1 << 30
ANSWER, OPENED, RETOKENISED = 16, 4, 24
IDLE_S = 0.001


@dataclass
class Lane:
    """Copies one way, one step's after the other's."""

    ends: deque[tuple[float, int]] = field(default_factory=deque)
    busy_until: float = 0.0
    told: int = 0

    def take(self, now: float, step: int, seconds: float) -> None:
        if seconds:
            self.busy_until = max(self.busy_until, now) + seconds
            self.ends.append((self.busy_until, step))

    def ended(self, now: float) -> int:
        while self.ends and self.ends[0][0] <= now:
            self.told = self.ends.popleft()[1]
        return self.told


class HostReplay(Replay):
    """One request at a time; its time is `now`."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options.variant, max_num_mixed_tokens=512)
        self.options, self.geometry = options, self._scheduler._geometry
        self._scheduler = Scheduler(
            self.limits, self.geometry, int(options.pool_gib * GIB), prefix_caching=True,
            tiers=host_tiers(int(options.host_gib * GIB)),
        )  # fmt: skip
        (self.tier,) = self._scheduler.prefixes.tiers
        self.tier._clock = lambda: self.now
        self.stores, self.loads = Lane(), Lane()
        self.words = np.random.default_rng(1)
        self.asked = 0

    def new(self, count: int) -> list[int]:
        return [int(token) for token in self.words.integers(10, 200_000, count)]

    def ask(self, prompt: list[int], checkpoints: tuple[int, ...]) -> tuple[Request, float]:
        """The request, and seconds to its first token."""
        self.asked += 1
        sampling = SamplingParams(seed=0, max_tokens=ANSWER, ignore_eos=True)
        request = Request(f"r{self.asked}", tuple(prompt), sampling, checkpoints=checkpoints)
        began, first = self.now, 0.0
        self._scheduler.add(request)
        while self._scheduler.has_requests:
            self._turn()
            if not first and request.output_token_ids:
                first = self.now - began
        return request, first

    def _turn(self) -> int:
        oldest, self._in_flight = self._in_flight, None
        if oldest is not None and self.limits.answers_first(oldest):
            return self._take(oldest)
        layout = self.tier.pool.layout
        pieces = min(layout.num_pieces, int(self.options.pin * GIB * self.now / layout.piece_bytes))
        self._scheduler.prefixes.copied(HostProgress(pieces, self.stores.ended(self.now), self.loads.ended(self.now)))
        batch = self._in_flight = self._scheduler.schedule()
        if batch is not None:
            for lane, copies in ((self.stores, batch.stores), (self.loads, batch.loads)):
                size = sum(self.geometry.page(copy.kind).page_bytes for copy in copies)
                lane.take(self.now, batch.step, size / (1e9 * self.options.link))
        elif oldest is None:
            self.now += IDLE_S
        return 0 if oldest is None else self._take(oldest)

    def _take(self, step: ScheduledBatch) -> int:
        self.now += self._seconds(step) if len(step.lengths) else IDLE_S
        tokens = np.array(self.new(int(step.drawn.sum())), dtype=np.int32)
        return len(self._scheduler.update(SampledTokens(step.step, tokens, {})))


@dataclass
class Session:
    number: int
    history: list[int] = field(default_factory=list)

    def turn(self, replay: HostReplay, tokens: int) -> bool:
        """So many new ones. Whether it was lost."""
        chat, known = self.number % 2 == 1, len(self.history)
        self.history += (replay.new(RETOKENISED) if chat and known else []) + replay.new(tokens)
        checkpoints = (len(self.history),) if chat else ()
        request, ttft = replay.ask(self.history + [5] * (OPENED if chat else 0), checkpoints)
        pool = replay.tier.pool
        print(
            f"{replay.now:7.1f} s session {self.number:2}: {request.cached_tokens} of {len(request.prompt_token_ids)} "
            f"found, {request.host_cached_tokens} in host memory; first token after {1e3 * ttft:.0f} ms; "
            f"{pool.used_bytes / GIB:.2f} of {pool.capacity_bytes / GIB:.2f} GiB used",
            flush=True,
        )
        return request.cached_tokens < known


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", default="31B")
    parser.add_argument("--pool-gib", type=float, default=24.03)
    parser.add_argument("--host-gib", type=float, default=48.0)
    parser.add_argument("--sessions", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=65_000)
    parser.add_argument("--turn", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--link", type=float, default=50.0, help="GB/s each way (default 50)")
    parser.add_argument("--pin", type=float, default=2.0, help="GiB/s of host memory (default 2)")
    replay = HostReplay(parser.parse_args())
    options = replay.options
    sessions = [Session(number) for number in range(options.sessions)]
    for one in sessions:
        one.turn(replay, options.tokens)
    lost = [(turn, one.number) for turn in range(options.rounds) for one in sessions if one.turn(replay, options.turn)]
    replay._scheduler.check_integrity()
    print(f"lost of {options.rounds * options.sessions} turns: {lost or 'none'}")
    return 1 if lost else 0
