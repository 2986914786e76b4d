"""POST /v1/chat/completions: the shapes of its answers."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from modelserve_worker.server.logprobs import chat_logprobs
from modelserve_worker.server.preparation import chat_sequences
from modelserve_worker.server.protocol import ChatCompletionRequest
from modelserve_worker.server.sequences import Choice, Chunk, SequenceRunner
from modelserve_worker.server.state import ServedModel
from modelserve_worker.server.streaming import event
from modelserve_worker.server.usage import chat_usage
from modelserve_worker.text.reply import Part, Text
from modelserve_worker.text.tool_calls import ToolCall


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
                "message": _message(answer),
                "logprobs": chat_logprobs(answer.tokens, vocabulary) if self._body.logprobs else None,
                "finish_reason": _finish_reason(answer.finish_reason, called=bool(answer.tool_calls)),
                "stop_reason": answer.stop_reason,
            }
            for index, answer in enumerate(answers)
        ]
        counts = [len(answer.tokens) for answer in answers]
        thought = sum(answer.reasoning_tokens for answer in answers)
        return self._envelope("chat.completion", choices) | self._usage(counts, reasoning_tokens=thought)

    async def events(self, runner: SequenceRunner) -> AsyncGenerator[bytes, None]:
        """Per choice: the role with its first chunk, the parts of the answer, and at its end the finish reason.

        Reasoning and content come as the model writes them. A call comes when it is complete, its index, id and name
        first and then all of its arguments: only the end of a call shows that it is one.
        """
        opened: set[int] = set()
        counts, calls = [0] * len(self._specs), [0] * len(self._specs)
        thought = 0
        async with aclosing(runner.stream(self._id, self._specs)) as chunks:
            async for chunk in chunks:
                if chunk.index not in opened:
                    opened.add(chunk.index)
                    yield self._event(chunk.index, {"role": "assistant", "content": ""})
                counts[chunk.index] += len(chunk.tokens)
                thought += chunk.reasoning_tokens
                for delta, logprobs in self._deltas(chunk, first_call=calls[chunk.index]):
                    yield self._event(chunk.index, delta, logprobs=logprobs)
                calls[chunk.index] += sum(isinstance(part, ToolCall) for part in chunk.parts)
                if chunk.finish_reason is not None:
                    reason = _finish_reason(chunk.finish_reason, called=calls[chunk.index] > 0)
                    yield self._event(chunk.index, {}, finish_reason=reason, stop_reason=chunk.stop_reason)
        if self._body.include_usage:
            totals = self._usage(counts, reasoning_tokens=thought)
            yield event(self._envelope("chat.completion.chunk", []) | totals)

    def _deltas(self, chunk: Chunk, *, first_call: int) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
        """Deltas of a chunk; the log probabilities of all its tokens are with the first of them."""
        with_logprobs = self._body.logprobs and chunk.tokens
        logprobs = chat_logprobs(chunk.tokens, self._model.text.vocabulary) if with_logprobs else None
        deltas = list(_part_deltas(chunk.parts, first_call=first_call))
        if logprobs and not deltas:
            deltas = [{"content": ""}]  # a token inside a character, or one that is no text
        for position, delta in enumerate(deltas):
            yield delta, logprobs if position == 0 else None

    def _usage(self, counts: Sequence[int], *, reasoning_tokens: int) -> dict[str, Any]:
        return {"usage": chat_usage(self._specs, counts, n=self._body.n, reasoning_tokens=reasoning_tokens)}

    def _event(self, index: int, delta: dict[str, Any], **fields: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} | fields
        body = self._envelope("chat.completion.chunk", [choice])
        return event(body | {"usage": None} if self._body.include_usage else body)


def _message(answer: Choice) -> dict[str, Any]:
    """`content` is null where the answer consists of calls; `reasoning_content` is there when the model thought."""
    calls = answer.tool_calls
    message: dict[str, Any] = {"role": "assistant", "content": None if calls and not answer.content else answer.content}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if calls:
        message["tool_calls"] = [_call(call, arguments=call.arguments_json()) for call in calls]
    return message


def _call(call: ToolCall, *, arguments: str) -> dict[str, Any]:
    function = {"name": call.name, "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


def _part_deltas(parts: Iterable[Part], *, first_call: int) -> Iterator[dict[str, Any]]:
    index = first_call
    for part in parts:
        if isinstance(part, Text):
            yield {part.channel.value: part.text}
        else:
            yield {"tool_calls": [{"index": index, **_call(part, arguments="")}]}
            yield {"tool_calls": [{"index": index, "function": {"arguments": part.arguments_json()}}]}
            index += 1


def _finish_reason(reason: str | None, *, called: bool) -> str | None:
    """The engine's reason in OpenAI's words. An answer cut by its length says so, whatever calls it already made."""
    return "tool_calls" if called and reason == "stop" else reason
