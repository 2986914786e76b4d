"""A streamed answer as it comes: which events bring tokens, when they came, and what the server counted."""

from __future__ import annotations

import json
from typing import Any

from modelserve_tools.evaluation.replies import SHOWN_CHARACTERS

_TEXT_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls")


class BadStream(Exception):  # noqa: N818 - reads as the reason it states
    """The stream holds something else than an answer; `kind` is short and the text says what came."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Answer:
    """Fed with the bytes of a server-sent event stream and the time at which they were read, in seconds.

    `times` has an entry per event that brings tokens: an event with a choice, whatever its text (a token may have
    none), except a chat's opening event, which names the role only. Events that are read at once have one time.
    """

    def __init__(self) -> None:
        self.times: list[float] = []
        self.finish_reason: str | None = None
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None  # of the prompt, where the server tells
        self.text: list[str] = []  # what it says, thoughts left out
        self.completion_tokens: int | None = None
        self.done = False
        self._rest = b""
        self._textless_end = False

    def feed(self, data: bytes, at: float) -> None:
        """Raises BadStream."""
        # Only whole events are looked at; a line may end with CR LF.
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), at)

    def close(self) -> None:
        """At the end of the stream. Raises BadStream when the answer was not complete."""
        if not self.done and self.finish_reason is None:
            raise BadStream("ended early", f"the stream ended after {len(self.times)} events and no finish_reason")
        if self._textless_end and self.completion_tokens is not None and len(self.times) > self.completion_tokens:
            self.times.pop()  # it brought the finish_reason only: every token came before it

    def _event(self, data: bytes, at: float) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        try:
            document = json.loads(data)
            if document.get("error"):
                raise BadStream("error in the stream", _message(document["error"]))
            if usage := document.get("usage"):
                self.prompt_tokens, self.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
                self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            for choice in document.get("choices") or ():
                self._choice(choice, at)
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            shown = data[:SHOWN_CHARACTERS].decode(errors="replace")
            raise BadStream("no completion event", f"the stream has {shown!r}") from error

    def _choice(self, choice: dict[str, Any], at: float) -> None:
        delta = choice.get("delta")
        has_text = bool(choice["text"]) if delta is None else any(delta.get(name) for name in _TEXT_FIELDS)
        finish_reason = choice.get("finish_reason")
        self.text.append((choice["text"] if delta is None else delta.get("content")) or "")
        if has_text or delta is None or finish_reason is not None:
            self.times.append(at)
        if finish_reason is not None:
            self.finish_reason = finish_reason
            self._textless_end = not has_text


def _message(error: Any) -> str:
    text = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(text).split())[:SHOWN_CHARACTERS]
