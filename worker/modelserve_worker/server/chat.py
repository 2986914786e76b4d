"""POST /v1/chat/completions: the shapes of its answers."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from modelserve_worker.server.logprobs import chat_logprobs
from modelserve_worker.server.preparation import chat_sequences
from modelserve_worker.server.protocol import ChatCompletionRequest
from modelserve_worker.server.sequences import SequenceRunner
from modelserve_worker.server.state import ServedModel
from modelserve_worker.server.streaming import event
from modelserve_worker.server.usage import usage


class ChatAnswer:
    """Answers one chat request, whole or as a stream. Raises ApiError when the request cannot be served."""

    def __init__(self, body: ChatCompletionRequest, model: ServedModel, *, max_model_len: int) -> None:
        self._body = body
        self._model = model
        self._specs = chat_sequences(body, model, max_model_len=max_model_len)
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())

    def _envelope(self, kind: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model.name,
            "choices": list(choices),
        }

    async def whole(self, runner: SequenceRunner) -> dict[str, Any]:
        answers = await runner.collect(self._id, self._specs)
        vocabulary = self._model.text.vocabulary
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": answer.text},
                "logprobs": chat_logprobs(answer.tokens, vocabulary) if self._body.logprobs else None,
                "finish_reason": answer.finish_reason,
                "stop_reason": answer.stop_reason,
            }
            for index, answer in enumerate(answers)
        ]
        counts = [len(answer.tokens) for answer in answers]
        return self._envelope("chat.completion", choices) | {"usage": usage(self._specs, counts, n=self._body.n)}

    async def events(self, runner: SequenceRunner) -> AsyncGenerator[bytes, None]:
        """Per choice: the role with the first token, the text, and at its end the finish reason."""
        counts = [0] * len(self._specs)
        vocabulary = self._model.text.vocabulary
        async with aclosing(runner.stream(self._id, self._specs)) as chunks:
            async for chunk in chunks:
                if counts[chunk.index] == 0:
                    yield self._event(chunk.index, {"role": "assistant", "content": ""})
                counts[chunk.index] += len(chunk.tokens)
                logprobs = chat_logprobs(chunk.tokens, vocabulary) if self._body.logprobs and chunk.tokens else None
                if chunk.text or logprobs:
                    yield self._event(chunk.index, {"content": chunk.text}, logprobs=logprobs)
                if chunk.finish_reason is not None:
                    end = {"finish_reason": chunk.finish_reason, "stop_reason": chunk.stop_reason}
                    yield self._event(chunk.index, {}, **end)
        if self._body.include_usage:
            totals = {"usage": usage(self._specs, counts, n=self._body.n)}
            yield event(self._envelope("chat.completion.chunk", []) | totals)

    def _event(self, index: int, delta: dict[str, Any], **fields: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} | fields
        body = self._envelope("chat.completion.chunk", [choice])
        return event(body | {"usage": None} if self._body.include_usage else body)
