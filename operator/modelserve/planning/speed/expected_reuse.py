"""What a prefix cache is expected to find of a workload of sessions, and when a next turn has its first token.

A session's first prompt has I tokens, S of which all sessions begin with; each further one has the prompt before it,
its answer of O tokens and n new ones. c requests are in progress, so M = sessions - c wait for their users. What a
waiting session needs is its rows of global layers and one window (prefix_bytes, window_bytes): b bytes of a rank on
average. There is room for R = C / b of them, C what the pool has beside c requests and the shared prefix, host memory
besides.

The next to ask is any of the waiting ones, so k others have asked since with k of mean M. They left states of sessions
that wait, one each, and of sessions that have ended, which stay until they are the oldest (T turns a session):

    states since then    d(k) = 1 + (M - 1) (1 - exp(-k / M)) + k / T
    found                1 - exp(-k / M) for the k with d(k) = R

which is R / M for sessions without end, the hit rate of a least-recently-used cache under random requests. Whoever is
not found resumes behind the shared prefix. What thoughts leave, which no history has, is not counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from modelserve.model.architecture import ModelArchitecture
from modelserve.planning.evaluation import Fit
from modelserve.planning.speed.engine_rates import engine_rates
from modelserve.planning.speed.expected_speed import rank_speed
from modelserve.planning.speed.prompt_rows import PromptCost
from modelserve.planning.speed.step_time import PromptRows, RankSpeed
from modelserve.planning.wishes import Wishes
from modelserve.sizing.pages import CacheGeometry
from modelserve.sizing.prefixes import prefix_bytes, window_bytes


@dataclass(frozen=True)
class SessionLoad:
    """Sessions of `turns` requests each, `sessions` of them at a time, `requests` in progress. Lengths are tokens."""

    requests: int
    sessions: int
    turns: int
    shared_tokens: int
    input_tokens: int
    turn_tokens: int
    output_tokens: int

    def prompt(self, turn: int) -> int:
        """Tokens of the prompt of turn 1, 2, ..."""
        return self.input_tokens + (turn - 1) * (self.output_tokens + self.turn_tokens)

    def known(self, turn: int) -> int:
        """Tokens of it whose rows the turn before computed: its last token was sampled and is not in the cache."""
        return self.prompt(turn - 1) + self.output_tokens - 1

    @property
    def waiting(self) -> int:
        """Sessions whose users think."""
        return max(0, self.sessions - self.requests)

    @property
    def mean_turn(self) -> int:
        """The one in the middle of those behind the first; 2 where there are none."""
        return 2 + max(0, self.turns - 2) // 2


@dataclass(frozen=True)
class Reuse:
    """Shares of all prompt tokens, 0 to 1, and seconds to the first token of a next turn that nothing else delays."""

    load: SessionLoad
    from_gpu: float
    from_host: float
    session_bytes: int  # of a rank, while its user thinks
    sessions_on_gpu: float
    sessions_in_host: float
    next_turn_s: float
    next_turn_from_host_s: float
    next_turn_computed_s: float


def session_load(wishes: Wishes, *, longest: int) -> SessionLoad | None:
    """None where the spec says nothing about sessions. Turns that `longest` tokens do not hold are left out."""
    if wishes.prefix_caching is False or not (wishes.turns or wishes.shared_tokens or wishes.sessions):
        return None
    requests = wishes.concurrency or 1
    prompt = max(1, min(wishes.input_tokens, longest - wishes.output_tokens))
    apart = wishes.output_tokens + wishes.turn_tokens
    most = 1 + max(0, longest - wishes.output_tokens - prompt) // apart
    return SessionLoad(
        requests=requests,
        sessions=max(wishes.sessions or requests, 1),
        turns=min(wishes.turns or 1, most),
        shared_tokens=min(wishes.shared_tokens, prompt - 1),
        input_tokens=prompt,
        turn_tokens=wishes.turn_tokens,
        output_tokens=wishes.output_tokens,
    )


def expected_reuse(fit: Fit, architecture: ModelArchitecture, wishes: Wishes) -> Reuse | None:
    """The formulas above for a candidate; None where the spec says nothing about sessions."""
    load = session_load(wishes, longest=fit.max_model_len)
    if load is None:
        return None
    host = wishes.host_cache_bytes(fit.accelerator) // fit.tensor_parallel
    found = found_shares(load, fit.geometry, pool_bytes=fit.memory.kv_pool_bytes, host_bytes=host)
    rank = rank_speed(fit, architecture, wishes)
    chunk = wishes.chunk(fit.accelerator)
    turn = load.mean_turn
    prompt, known = load.prompt(turn), load.known(turn)
    moved = prefix_bytes(fit.geometry, known) + window_bytes(fit.geometry)
    resumed = _first_token(rank, known, prompt, chunk)
    return Reuse(
        load=load,
        from_gpu=found.gpu,
        from_host=found.host,
        session_bytes=found.session_bytes,
        sessions_on_gpu=found.sessions_on_gpu,
        sessions_in_host=found.sessions_in_host,
        next_turn_s=resumed,
        next_turn_from_host_s=resumed + moved / engine_rates(fit.accelerator.compute_capability).host_copy,
        next_turn_computed_s=_first_token(rank, 0, prompt, chunk),
    )


@dataclass(frozen=True)
class FoundShares:
    """Of all prompt tokens; and what a waiting session takes, and how many of them there is room for."""

    gpu: float
    host: float
    session_bytes: int
    sessions_on_gpu: float
    sessions_in_host: float


def found_shares(load: SessionLoad, geometry: CacheGeometry, *, pool_bytes: int, host_bytes: int = 0) -> FoundShares:
    """The first part of the formulas above. Bytes are of a rank."""
    turns = range(1, load.turns + 1)
    tokens = sum(load.prompt(turn) for turn in turns)
    running = geometry.held_bytes(tokens // load.turns + load.output_tokens) * min(load.requests, load.sessions)
    room = max(0, pool_bytes - running)
    shared = load.shared_tokens if load.shared_tokens >= geometry.global_page.page_tokens else 0
    shared_bytes = prefix_bytes(geometry, shared) + window_bytes(geometry) if shared else 0
    if shared_bytes > room + host_bytes:
        shared = shared_bytes = 0
    lasting = turns[:-1] or turns  # behind the last turn nobody comes
    kept = [load.prompt(turn) + load.output_tokens - shared for turn in lasting]
    session = sum(prefix_bytes(geometry, each) + window_bytes(geometry, each) for each in kept) // len(kept)
    on_gpu = max(0, room - shared_bytes) / session
    in_host = host_bytes / session
    gpu = _found(on_gpu, load)
    both = _found(on_gpu + in_host, load)
    known = sum(load.known(turn) for turn in turns[1:])
    behind_shared = shared * (1 + (1 - both) * (load.turns - 1))
    shared_on_gpu = shared_bytes <= room
    return FoundShares(
        gpu=(gpu * known + behind_shared * shared_on_gpu) / tokens,
        host=((both - gpu) * known + behind_shared * (not shared_on_gpu)) / tokens,
        session_bytes=session,
        sessions_on_gpu=on_gpu,
        sessions_in_host=in_host,
    )


def _found(states: float, load: SessionLoad) -> float:
    """Share of next turns whose session's state is among the last so many."""
    waiting = load.waiting
    if not waiting:
        return 1.0  # the next turn comes while nobody else has asked

    def since(asked: float) -> float:
        return 1 + (waiting - 1) * -math.expm1(-asked / waiting) + asked / load.turns

    low, high = 0.0, 50.0 * waiting
    if since(low) > states:
        return 0.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if since(middle) <= states else (low, middle)
    return -math.expm1(-low / waiting)


def _first_token(rank: RankSpeed, start: int, end: int, chunk: int) -> float:
    """Seconds for the rows [start, end) of a prompt alone."""
    prompt = PromptRows.chunk(start, end - start, window=rank.window, ends=True)
    prices = PromptCost.of_steps(rank.doubling_context, chunk)
    cost = prices.cost(start, end - start)
    steps = max(1, math.ceil(cost / prices.allowed(chunk)), math.ceil((end - start) / chunk))
    return rank.step(prompts=prompt.of_mean(prompt.rows / steps)).times(steps).seconds
