"""POST /v1/messages: the shapes of its answers and of its errors."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any

from modelserve_worker.server.anthropic.content import ContentStream, content_blocks
from modelserve_worker.server.anthropic.request import MessagesRequest
from modelserve_worker.server.errors import ApiError
from modelserve_worker.server.sequences import Reply, SequenceRunner
from modelserve_worker.server.state import ServedModel
from modelserve_worker.server.streaming import named_event
from modelserve_worker.server.translation import only_sequence

_ERROR_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


class MessagesAnswer:
    """Answers one request, whole or as a stream. Raises ApiError when the request cannot be served."""

    stream_end = b""

    def __init__(self, body: MessagesRequest, model: ServedModel, *, max_model_len: int) -> None:
        self._id = f"msg_{uuid.uuid4().hex}"
        self._model = model.name
        self._spec = only_sequence(body.chat(), model, response_id=self._id, max_model_len=max_model_len)

    async def whole(self, runner: SequenceRunner) -> dict[str, Any]:
        (reply,) = await runner.collect([self._spec])
        end = _end(reply)
        return self._message(content_blocks(reply.parts), output_tokens=reply.num_tokens) | end

    async def events(self, runner: SequenceRunner) -> AsyncGenerator[bytes, None]:
        """Anthropic's events: the message without content, its blocks one after another, and how it ended."""
        content = ContentStream()
        begun = False
        async with aclosing(runner.stream([self._spec])) as steps:
            async for ((reply, parts),) in steps:
                events: list[dict[str, Any]] = []
                if not begun:
                    begun = True
                    events.append({"type": "message_start", "message": self._message([], output_tokens=0)})
                events += content.push(parts)
                if reply.finish_reason is not None:
                    events += content.finish()
                    usage = self._usage(reply.num_tokens)
                    events += [{"type": "message_delta", "delta": _end(reply), "usage": usage}]
                    events += [{"type": "message_stop"}]
                if events:
                    yield _encoded(events)

    def failure(self, error: ApiError) -> bytes:
        """The event that ends a stream which cannot go on."""
        return _encoded([error_body(error)])

    def _message(self, content: list[dict[str, Any]], *, output_tokens: int) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(output_tokens),
        }

    def _usage(self, output_tokens: int) -> dict[str, int]:
        cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        input_tokens = len(self._spec.request.prompt_token_ids)
        return {"input_tokens": input_tokens, **cached, "output_tokens": output_tokens}


def error_body(error: ApiError) -> dict[str, Any]:
    """The error in Anthropic's shape, which has no field for the name of what was wrong: the text says it."""
    kind = _ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def _end(reply: Reply) -> dict[str, Any]:
    if reply.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(reply.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stop_reason}
    return {"stop_reason": "tool_use" if reply.tool_calls else "end_turn", "stop_sequence": None}


def _encoded(events: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(named_event(event["type"], event) for event in events)
