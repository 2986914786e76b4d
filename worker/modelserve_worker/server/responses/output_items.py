"""The parts of an answer as output items of the Responses API, and the events that tell them while they arrive."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from modelserve_worker.text.reply import CallArguments, CallBegun, Channel, Part, Text

_DELTAS = {
    "message": "response.output_text.delta",
    "reasoning": "response.reasoning_text.delta",
    "function_call": "response.function_call_arguments.delta",
}
_KINDS = {Channel.CONTENT: "message", Channel.REASONING: "reasoning"}


class OutputItems:
    """Items so far; the last may be open. Events come without their sequence numbers.

    A call that is cut or malformed ends as incomplete, its arguments no JSON.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._said: list[str] = []  # text or arguments of the open item
        self._events: list[dict[str, Any]] = []

    def push(self, parts: Sequence[Part]) -> list[dict[str, Any]]:
        """Add the parts of a stream, or those of a whole answer, in which a call is its ToolCall alone."""
        for part in parts:
            if isinstance(part, Text):
                self._say(_KINDS[part.channel], part.text)
            elif isinstance(part, CallBegun):
                self._begin_call(part.name)
            elif isinstance(part, CallArguments):
                self._delta(part.json)
            else:
                if self._open is None or self._open["type"] != "function_call":
                    self._begin_call(part.name)
                    self._delta(part.arguments_json())
                self._close("completed")
        return self._take()

    def finish(self, *, complete: bool) -> list[dict[str, Any]]:
        """The end of the answer. One that says nothing has an empty message, which clients look for."""
        if not self.items and complete:
            self._say("message", "")
        self._close_other(None, "completed" if complete else "incomplete")
        return self._take()

    def _say(self, kind: str, text: str) -> None:
        if self._open is None or self._open["type"] != kind:
            self._close_other(kind, "completed")
            if kind == "message":
                item = {"id": f"msg_{uuid.uuid4().hex}", "type": kind, "role": "assistant", "content": []}
            else:
                item = {"id": f"rs_{uuid.uuid4().hex}", "type": kind, "summary": [], "content": []}
            self._begin(item)
            self._tell("response.content_part.added", content_index=0, part=_text_part(kind, ""))
        self._delta(text)

    def _begin_call(self, name: str) -> None:
        self._close_other(None, "completed")
        ids = {"id": f"fc_{uuid.uuid4().hex}", "call_id": f"call_{uuid.uuid4().hex}"}
        self._begin({**ids, "type": "function_call", "name": name, "arguments": ""})

    def _begin(self, item: dict[str, Any]) -> None:
        self._open, self._said = item | {"status": "in_progress"}, []
        self.items.append(self._open)
        self._tell("response.output_item.added", item=dict(self._open))

    def _delta(self, text: str) -> None:
        assert self._open is not None
        self._said.append(text)
        kind = self._open["type"]
        more: dict[str, Any] = {} if kind == "function_call" else {"content_index": 0}
        if kind == "message":
            more["logprobs"] = []
        if text:
            self._tell(_DELTAS[kind], delta=text, **more)

    def _close_other(self, kind: str | None, status: str) -> None:
        """Close what is open unless it is of `kind`; a call that something else follows was none."""
        if self._open is not None and self._open["type"] != kind:
            self._close("incomplete" if self._open["type"] == "function_call" else status)

    def _close(self, status: str) -> None:
        assert self._open is not None
        item, said = self._open, "".join(self._said)
        if item["type"] == "function_call":
            item["arguments"] = said
            self._tell("response.function_call_arguments.done", arguments=said, name=item["name"])
        else:
            part = _text_part(item["type"], said)
            item["content"] = [part]
            more: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
            self._tell(_DELTAS[item["type"]].replace(".delta", ".done"), content_index=0, text=said, **more)
            self._tell("response.content_part.done", content_index=0, part=part)
        item["status"] = status
        self._tell("response.output_item.done", item=item)
        self._open = None

    def _tell(self, kind: str, **fields: Any) -> None:
        assert self._open is not None
        if "item" not in fields:
            fields["item_id"] = self._open["id"]
        self._events.append({"type": kind, "output_index": len(self.items) - 1, **fields})

    def _take(self) -> list[dict[str, Any]]:
        taken, self._events = self._events, []
        return taken


def _text_part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
