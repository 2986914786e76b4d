"""What stands around the choices of a response: written once per response, not once per token."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from modelserve_worker.server.json_text import to_json


class Envelope:
    """Id, kind, time and model of one response.

    The bytes before and behind the choices are the same in all of its events, so an event costs one small JSON object.
    With `with_usage`, every event has a `usage`, null in all but the last one, as OpenAI's streams do.
    """

    def __init__(self, response_id: str, kind: str, model_name: str, *, with_usage: bool) -> None:
        self._fields = {"id": response_id, "object": kind, "created": int(time.time()), "model": model_name}
        self._head = b"data: " + to_json(self._fields)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if with_usage else b"]}\n\n"

    def document(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """The whole response."""
        return {**self._fields, "choices": list(choices), "usage": usage}

    def event(self, choice: bytes) -> bytes:
        """One event of a stream, encoded, as its choice is."""
        return self._head + choice + self._tail

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        """The last event of a stream that reports usage: it has no choice."""
        return self._head + b'],"usage":' + to_json(usage) + b"}\n\n"
