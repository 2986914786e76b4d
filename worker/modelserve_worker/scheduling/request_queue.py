"""Requests that hold no slot: the queue, and beside it those whose rows are on their way from host memory."""

from __future__ import annotations

from collections import OrderedDict

from modelserve_worker.request import Request


class RequestQueue:
    """First come first served; who was preempted, and whose rows have come, is first again."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._fetching: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._fetching)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting or request_id in self._fetching

    @property
    def first(self) -> Request | None:
        return next(iter(self._waiting.values()), None)

    def add(self, request: Request) -> None:
        """Queue it behind all others."""
        self._waiting[request.request_id] = request

    def put_first(self, request: Request) -> None:
        """Queue it before all others."""
        self._fetching.pop(request.request_id, None)
        self._waiting[request.request_id] = request
        self._waiting.move_to_end(request.request_id, last=False)

    def put_aside(self, request: Request) -> None:
        """It waits for its rows, and nobody for it."""
        self._fetching[request.request_id] = self._waiting.pop(request.request_id)

    def fetched(self, request_ids: list[str]) -> None:
        """They wait for rows no longer, and are first, in this order."""
        for request_id in reversed(request_ids):
            self.put_first(self._fetching[request_id])

    def remove(self, request_id: str) -> bool:
        """Whether it was there."""
        waited = self._waiting.pop(request_id, None) or self._fetching.pop(request_id, None)
        return waited is not None
