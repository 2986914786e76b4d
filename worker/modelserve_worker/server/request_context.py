"""What is known of one HTTP request beside its body: who asks, under which id, and what it has cost so far."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from starlette.types import Scope

from modelserve_worker.server.body_limits import BodyAccount

_KEY = "modelserve.request"


@dataclass
class RequestContext:
    """Made by the outermost middleware, written by whoever knows more, told by the access log at the end.

    Times are of time.monotonic(), in seconds.
    """

    request_id: str
    client: str  # the API key's name where there are keys, else the peer's address
    account: BodyAccount
    arrival_s: float = field(default_factory=time.monotonic)
    body_bytes: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_token_s: float | None = None

    @classmethod
    def of(cls, scope: Scope) -> RequestContext:
        context: RequestContext = scope[_KEY]
        return context

    def attach(self, scope: Scope) -> None:
        scope[_KEY] = self
