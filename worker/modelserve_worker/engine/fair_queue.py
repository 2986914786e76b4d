"""Chooses the call that goes to the engine next: clients take turns, and so do the calls of a client. Torch-free.

The engine serves first come, first served, which is fair only among those that it knows. So it is given little more
than it can run, and everybody else waits here, where a call of 512 prompts is one of many calls and 500 calls of one
client are one client. A few places stay free of a call that holds at least as much as all others together, and, while
others are about, of a client that has its equal part: who asks for little never waits for the end of somebody's work.
How many prompt tokens are held back for the turns' sake is told to the engine, which makes its steps as long.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from modelserve.planning.speed.prompt_rows import PREFILLS_AHEAD
from modelserve_worker.engine_client import EngineBusy
from modelserve_worker.request import Request

_SHARE = 16  # of the places, one in so many stays free for other calls and clients
_ABOUT_S = 60.0  # a client is about for so long after its last call


@dataclass(frozen=True, slots=True)
class FairLimits:
    """`places`: requests that run at once; `step_tokens`: most tokens of a step; `max_waiting`: most requests here."""

    places: int = 64
    step_tokens: int = 2048
    max_waiting: int = 256

    @property
    def reserve(self) -> int:
        return max(1, self.places // _SHARE) if self.places > 1 else 0


@dataclass(slots=True)
class _Call:
    """One `generate` call of a client."""

    client: str
    waiting: deque[Request]
    num_sent: int = 0


@dataclass(slots=True)
class _Sent:
    call: _Call
    prompt_tokens: int
    started: bool = False


class FairQueue:
    """Requests that wait, and those the engine has. One thread calls it."""

    def __init__(self, limits: FairLimits, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._clients: OrderedDict[str, OrderedDict[int, _Call]] = OrderedDict()  # with something waiting, in turn
        self._waiting: dict[str, _Call] = {}  # by request id
        self._sent: dict[str, _Sent] = {}
        self._sent_by_client: dict[str, int] = {}
        self._seen: OrderedDict[str, float] = OrderedDict()  # when a client last called
        self._unstarted_tokens = self._num_unstarted = 0
        self._waiting_tokens = 0  # of each prompt at most a step's

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def held_back_tokens(self) -> int:
        """Prompt tokens of those that wait for their turn alone: as many requests as there are places free, each with
        the mean of all that wait, at most a step's. Who waits for a place waits for an answer to end, not for steps."""
        places = min(max(0, self._limits.places - len(self._sent)), len(self._waiting))
        return self._waiting_tokens * places // max(1, len(self._waiting))

    def add(self, client: str, requests: Sequence[Request]) -> None:
        """One call's requests, taken whole where there is room for the first. Raises EngineBusy when there is none.

        With the queue full, a client that has less than an equal part of it may still add.
        """
        now = self._clock()
        mine = sum(len(call.waiting) for call in self._clients.get(client, {}).values())
        if len(self._waiting) >= self._limits.max_waiting and mine * len(self._clients) >= self._limits.max_waiting:
            raise EngineBusy(
                f"{len(self._waiting)} requests are waiting already (the limit is {self._limits.max_waiting}); "
                "send this one again later"
            )
        self._seen[client] = now
        self._seen.move_to_end(client)
        while now - next(iter(self._seen.values())) > _ABOUT_S:
            self._seen.popitem(last=False)
        if not requests:
            return
        call = _Call(client, deque(requests))
        self._clients.setdefault(client, OrderedDict())[id(call)] = call
        self._waiting |= {request.request_id: call for request in requests}
        self._waiting_tokens += sum(map(self._step_share, requests))

    def take(self) -> list[Request]:
        """Requests that the engine is to have now."""
        taken: list[Request] = []
        while len(self._sent) < self._limits.places + self._limits.reserve:
            call = self._next_call()
            if call is None:
                break
            request = call.waiting.popleft()
            del self._waiting[request.request_id]
            self._waiting_tokens -= self._step_share(request)
            self._forget_if_empty(call)
            tokens = len(request.prompt_token_ids)
            self._sent[request.request_id] = _Sent(call, tokens)
            self._count(call, 1)
            self._unstarted_tokens += tokens
            self._num_unstarted += 1
            taken.append(request)
        return taken

    def started(self, request_id: str) -> None:
        """The engine has sampled a token of it."""
        sent = self._sent.get(request_id)
        if sent is not None and not sent.started:
            sent.started = True
            self._unstarted_tokens -= sent.prompt_tokens
            self._num_unstarted -= 1

    def ended(self, request_id: str) -> None:
        """The engine has it no more."""
        self.started(request_id)
        sent = self._sent.pop(request_id, None)
        if sent is not None:
            self._count(sent.call, -1)

    def remove(self, request_id: str) -> bool:
        """Whether it waited here; it does no more."""
        call = self._waiting.pop(request_id, None)
        if call is None:
            return False
        (left,) = (request for request in call.waiting if request.request_id == request_id)
        call.waiting.remove(left)
        self._waiting_tokens -= self._step_share(left)
        self._forget_if_empty(call)
        return True

    def _step_share(self, request: Request) -> int:
        return min(len(request.prompt_token_ids), self._limits.step_tokens)

    def _next_call(self) -> _Call | None:
        """The next client's next call that may go on, both moved to the end of their turns."""
        num_sent = len(self._sent)
        into_reserve = num_sent >= self._limits.places - self._limits.reserve
        crowded, part = len(self._seen) > 1, max(1, self._limits.places // max(1, len(self._seen)))
        for client in self._clients:
            if into_reserve and crowded and self._sent_by_client.get(client, 0) >= part:
                continue
            calls = self._clients[client].values()
            small = (call for call in calls if not into_reserve or call.num_sent * 2 < num_sent)
            call = next(filter(self._may_prefill, small), None)
            if call is not None:
                self._clients.move_to_end(client)
                self._clients[client].move_to_end(id(call))
                return call
        return None

    def _may_prefill(self, call: _Call) -> bool:
        """Two steps' worth of prompts, or a few long ones, are enough ahead; a client that has none may have one."""
        tokens = len(call.waiting[0].prompt_token_ids)
        return (
            self._unstarted_tokens + tokens <= 2 * self._limits.step_tokens
            or self._num_unstarted < PREFILLS_AHEAD
            or self._sent_by_client.get(call.client, 0) == 0
        )

    def _forget_if_empty(self, call: _Call) -> None:
        if not call.waiting:
            calls = self._clients[call.client]
            del calls[id(call)]
            if not calls:
                del self._clients[call.client]

    def _count(self, call: _Call, change: int) -> None:
        call.num_sent += change
        self._sent_by_client[call.client] = self._sent_by_client.get(call.client, 0) + change
        if not self._sent_by_client[call.client]:
            del self._sent_by_client[call.client]
