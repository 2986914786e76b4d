"""POST /v1/messages: the shapes of its answers."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from modelserve_worker.server.answers.sequences import Reply, SequenceRunner
from modelserve_worker.server.answers.translation import only_sequence
from modelserve_worker.server.anthropic.content import ContentStream, content_blocks
from modelserve_worker.server.anthropic.request import MessagesRequest
from modelserve_worker.server.errors.anthropic_errors import error_body
from modelserve_worker.server.errors.errors import ApiError
from modelserve_worker.server.http.streaming import named_event
from modelserve_worker.server.json_text import to_json
from modelserve_worker.server.state import ServedModel


class MessagesAnswer:
    """Answers one request, whole or as a stream. Raises ApiError when the request cannot be served."""

    stream_end = b""

    def __init__(self, body: MessagesRequest, model: ServedModel, *, max_model_len: int) -> None:
        self._id = f"msg_{uuid.uuid4().hex}"
        self._model = model.name
        spec = only_sequence(
            body.chat(), model, response_id=self._id, max_model_len=max_model_len,
            format_field="output_config.format", length_fields={},
        )  # fmt: skip
        self.specs = [spec]
        self._content: ContentStream | None = None  # of a stream that has begun

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.specs[0].request.prompt_token_ids)

    async def whole(self, runner: SequenceRunner) -> bytes:
        (reply,) = await runner.collect(self.specs)
        end = _end(reply)
        usage = self._usage(reply, output_tokens=reply.num_tokens)
        return to_json(self._message(content_blocks(reply.parts), usage) | end)

    async def events(self, replies: Sequence[Reply]) -> bytes:
        """Anthropic's events: the message without content, its blocks one after another, and how it ended."""
        (reply,) = replies
        events: list[dict[str, Any]] = []
        if self._content is None:
            self._content = ContentStream()
            message = self._message([], self._usage(reply, output_tokens=0))
            events.append({"type": "message_start", "message": message})
        events += self._content.push(reply.take_parts())
        if reply.finish_reason is not None:
            events += self._content.finish()
            usage = self._usage(reply, output_tokens=reply.num_tokens)
            events += [{"type": "message_delta", "delta": _end(reply), "usage": usage}]
            events += [{"type": "message_stop"}]
        return _encoded(events)

    def last_events(self) -> bytes:
        return b""

    def failure(self, error: ApiError) -> bytes:
        """The event that ends a stream which cannot go on."""
        return _encoded([error_body(error)])

    def _message(self, content: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _usage(self, reply: Reply, *, output_tokens: int) -> dict[str, int]:
        """As Anthropic counts: `input_tokens` are those that were not read from the cache."""
        return {
            "input_tokens": self.num_prompt_tokens - reply.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": reply.cached_tokens,
            "output_tokens": output_tokens,
        }


def _end(reply: Reply) -> dict[str, Any]:
    if reply.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(reply.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stop_reason}
    return {"stop_reason": "tool_use" if reply.num_calls else "end_turn", "stop_sequence": None}


def _encoded(events: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(named_event(event["type"], event) for event in events)
