"""POST /v1/responses: the shapes of its answers."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from modelserve_worker.server.answers.sequences import Reply, SequenceRunner
from modelserve_worker.server.answers.translation import only_sequence
from modelserve_worker.server.answers.usage import chat_usage
from modelserve_worker.server.errors.errors import ApiError
from modelserve_worker.server.http.streaming import named_event
from modelserve_worker.server.json_text import to_json
from modelserve_worker.server.responses.output_items import OutputItems
from modelserve_worker.server.responses.request import ResponsesRequest
from modelserve_worker.server.state import ServedModel
from modelserve_worker.text.reply import join_parts


class ResponsesAnswer:
    """Answers one request, whole or as a stream. Raises ApiError when the request cannot be served."""

    stream_end = b""

    def __init__(self, body: ResponsesRequest, model: ServedModel, *, max_model_len: int) -> None:
        self._id = f"resp_{uuid.uuid4().hex}"
        spec = only_sequence(
            body.chat(), model, response_id=self._id, max_model_len=max_model_len, format_field="text.format",
            length_fields={"messages": "input", "max_completion_tokens": "max_output_tokens"},
        )  # fmt: skip
        self.specs = [spec]
        self._head = {
            "id": self._id, "object": "response", "created_at": int(time.time()), "model": model.name,
            "background": False, **body.echoed(),
        }  # fmt: skip
        try:
            to_json(self._head)
        except UnicodeEncodeError as error:  # in a field that is no part of the prompt, and only repeated
            raise ApiError(
                "the body holds half of a surrogate pair; send valid Unicode", code="invalid_value"
            ) from error
        self._items = OutputItems()
        self._num_events = 0

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.specs[0].request.prompt_token_ids)

    async def whole(self, runner: SequenceRunner) -> bytes:
        (reply,) = await runner.collect(self.specs)
        self._items.push(join_parts(reply.parts))
        self._items.finish(complete=reply.finish_reason == "stop")
        return to_json(self._ended(reply))

    async def events(self, replies: Sequence[Reply]) -> bytes:
        """OpenAI's events: created, in progress, those of each output item in turn, and the end with all of it."""
        (reply,) = replies
        said = b""
        if self._num_events == 0:
            begun = self._response("in_progress")
            said += self._event({"type": "response.created", "response": begun})
            said += self._event({"type": "response.in_progress", "response": begun})
        said += b"".join(map(self._event, self._items.push(reply.take_parts())))
        if reply.finish_reason is not None:
            complete = reply.finish_reason == "stop"
            said += b"".join(map(self._event, self._items.finish(complete=complete)))
            kind = "response.completed" if complete else "response.incomplete"
            said += self._event({"type": kind, "response": self._ended(reply)})
        return said

    def last_events(self) -> bytes:
        return b""

    def failure(self, error: ApiError) -> bytes:
        """The event that ends a stream which cannot go on."""
        response = self._response("failed") | {"error": {"code": "server_error", "message": error.message}}
        return self._event({"type": "response.failed", "response": response})

    def _ended(self, reply: Reply) -> dict[str, Any]:
        counts = chat_usage(self.specs, [reply], n=1)
        usage = {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {**counts["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": counts["completion_tokens_details"]["reasoning_tokens"]},
            "total_tokens": counts["total_tokens"],
        }
        if reply.finish_reason == "stop":
            return self._response("completed") | {"usage": usage, "completed_at": int(time.time())}
        cut = {"incomplete_details": {"reason": "max_output_tokens"}}
        return self._response("incomplete") | cut | {"usage": usage}

    def _response(self, status: str) -> dict[str, Any]:
        what = {"status": status, "output": self._items.items, "error": None, "incomplete_details": None, "usage": None}
        return self._head | what

    def _event(self, fields: dict[str, Any]) -> bytes:
        self._num_events += 1
        return named_event(fields["type"], {**fields, "sequence_number": self._num_events - 1})
