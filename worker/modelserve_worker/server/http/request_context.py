"""What is known of one HTTP request beside its body: who asks, under which id, and what it has cost so far."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import NamedTuple

from starlette.types import Scope

from modelserve_worker.media.audio_reader import DecodedSound
from modelserve_worker.server.http.body_limits import BodyAccount
from modelserve_worker.server.state import AdapterUse

CLIENT_LEFT = 499  # the status of what nobody waited for
_KEY = "modelserve.request"


class MediaSpan(NamedTuple):
    """What was done for the images or sounds of a request together, from when to when: `images fetch`, or `sounds
    decode`. `items`: how many there were."""

    name: str
    items: int
    began_s: float
    ended_s: float


@dataclass
class RequestContext:
    """Made by the outermost middleware, written by whoever knows more, told by the access log at the end.

    Times are of time.monotonic(), in seconds.
    """

    request_id: str
    client: str  # the API key's name where there are keys, else the peer's address
    account: BodyAccount
    tenant: str = ""  # whose cached prefixes it may read
    arrival_s: float = field(default_factory=time.monotonic)
    body_bytes: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    admitted_s: float | None = None
    first_token_s: float | None = None
    manages: bool = False  # its key is one that sets of adapters are taken by
    fetched: dict[str, bytes] = field(default_factory=dict)  # images and sounds that it names, by address
    heard: dict[bytes, DecodedSound] = field(default_factory=dict)  # its sounds, by key
    media_spans: list[MediaSpan] = field(default_factory=list)
    broken: int | None = None  # the status of the error that ended a stream, whose head says 200

    _adapter: AdapterUse | None = None
    _ended: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @classmethod
    def of(cls, scope: Scope) -> RequestContext:
        context: RequestContext = scope[_KEY]
        return context

    def note_tokens(self, count: int, *, admitted_s: float | None) -> None:
        """`count` tokens of the answer came now; with the first of a sequence, when that left the queue."""
        if admitted_s is not None and self.admitted_s is None:
            self.admitted_s = admitted_s
            if self._adapter is not None:
                self._adapter.admitted()
        if count and self.first_token_s is None:
            self.first_token_s = time.monotonic()
        self.completion_tokens += count

    def keep(self, adapter: AdapterUse) -> None:
        """It is used until the request ends, which may have happened: bodies are checked in threads."""
        with self._lock:
            self._adapter = adapter
            ended = self._ended
        if ended:
            adapter.end()

    def end(self) -> None:
        """Nothing more is answered."""
        with self._lock:
            self._ended = True
        if self._adapter is not None:
            self._adapter.end()

    def figures(self) -> dict[str, str | int | float]:
        """For a line of a log: lengths in bytes and tokens, times in milliseconds since the arrival."""
        figures: dict[str, str | int | float] = {"request_id": self.request_id, "client": self.client}
        if self.body_bytes:
            figures |= {
                "body_bytes": self.body_bytes,
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": self.completion_tokens,
            }
        for name, at_s in (("queue_ms", self.admitted_s), ("first_token_ms", self.first_token_s)):
            if at_s is not None:
                figures[name] = self._ms(at_s)
        return {**figures, "total_ms": self._ms(time.monotonic())}

    def _ms(self, at_s: float) -> float:
        return round(max(0.0, at_s - self.arrival_s) * 1000, 1)

    def attach(self, scope: Scope) -> None:
        scope[_KEY] = self
