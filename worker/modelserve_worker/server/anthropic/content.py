"""The parts of an answer as content blocks of Anthropic's API, and the events that tell them while they arrive."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from modelserve_worker.text.reply import CallArguments, CallBegun, Channel, Part, Text, join_parts
from modelserve_worker.text.tool_calls import ToolCall


def content_blocks(parts: Sequence[Text | ToolCall]) -> list[dict[str, Any]]:
    """The blocks of a whole answer."""
    blocks = []
    for part in join_parts(parts):
        if isinstance(part, ToolCall):
            blocks.append(_tool_use(part.name) | {"input": part.arguments})
        elif isinstance(part, Text):
            blocks.append(_empty(part.channel) | {_FIELDS[part.channel]: part.text})
    return blocks


class ContentStream:
    """The blocks of a stream, of which one at most is open. A call that is cut ends with input that is no JSON."""

    def __init__(self) -> None:
        self._index = -1
        self._open: Channel | type[ToolCall] | None = None
        self._events: list[dict[str, Any]] = []

    def push(self, parts: Sequence[Part]) -> list[dict[str, Any]]:
        """Events of these parts."""
        for part in parts:
            if isinstance(part, Text):
                if self._open is not part.channel:
                    self._begin(part.channel, _empty(part.channel))
                name = _FIELDS[part.channel]
                self._delta({"type": f"{name}_delta", name: part.text})
            elif isinstance(part, CallBegun):
                self._begin(ToolCall, _tool_use(part.name))
            elif isinstance(part, CallArguments):
                self._delta({"type": "input_json_delta", "partial_json": part.json})
        return self._take()

    def finish(self) -> list[dict[str, Any]]:
        self._close()
        return self._take()

    def _begin(self, what: Channel | type[ToolCall], block: dict[str, Any]) -> None:
        self._close()
        self._index += 1
        self._open = what
        self._events.append({"type": "content_block_start", "index": self._index, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> None:
        self._events.append({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close(self) -> None:
        if self._open is not None:
            self._events.append({"type": "content_block_stop", "index": self._index})
        self._open = None

    def _take(self) -> list[dict[str, Any]]:
        taken, self._events = self._events, []
        return taken


_FIELDS = {Channel.CONTENT: "text", Channel.REASONING: "thinking"}


def _empty(channel: Channel) -> dict[str, Any]:
    if channel is Channel.REASONING:
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _tool_use(name: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex}", "name": name, "input": {}}
