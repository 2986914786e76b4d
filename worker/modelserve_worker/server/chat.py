"""POST /v1/chat/completions: the shapes of its answers."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from modelserve_worker.server.envelope import Envelope
from modelserve_worker.server.logprobs import chat_logprobs, prompt_logprobs_list
from modelserve_worker.server.preparation import chat_sequences
from modelserve_worker.server.protocol import ChatCompletionRequest
from modelserve_worker.server.sequences import Reply, SequenceRunner
from modelserve_worker.server.state import ServedModel
from modelserve_worker.server.usage import chat_usage
from modelserve_worker.text.reply import Part, Text
from modelserve_worker.text.tool_calls import ToolCall


class ChatAnswer:
    """Answers one chat request, whole or as a stream. Raises ApiError when the request cannot be served."""

    def __init__(self, body: ChatCompletionRequest, model: ServedModel, *, max_model_len: int) -> None:
        self._body = body
        self._vocabulary = model.text.vocabulary
        response_id = f"chatcmpl-{uuid.uuid4().hex}"
        self._specs = chat_sequences(body, model, response_id=response_id, max_model_len=max_model_len)
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        self._envelope = Envelope(response_id, kind, model.name, with_usage=body.include_usage)

    async def whole(self, runner: SequenceRunner) -> dict[str, Any]:
        replies = await runner.collect(self._specs)
        choices = [
            {
                "index": index,
                "message": _message(reply),
                "logprobs": chat_logprobs(reply.take_logprobs(), self._vocabulary) if self._body.logprobs else None,
                "finish_reason": _finish_reason(reply),
                "stop_reason": reply.stop_reason,
            }
            for index, reply in enumerate(replies)
        ]
        document = self._envelope.document(choices, self._usage(replies))
        if self._body.prompt_logprobs is not None:
            document["prompt_logprobs"] = await asyncio.to_thread(
                prompt_logprobs_list,
                replies[0].prompt_token_ids,
                replies[0].prompt_logprobs,
                self._vocabulary,
                alternatives=self._body.prompt_logprobs,
            )
        return document

    async def events(self, runner: SequenceRunner) -> AsyncGenerator[bytes, None]:
        """Per choice: the role with its first event, the parts of the answer, and at its end the finish reason.

        Reasoning and content come as the model writes them. A call comes when it is complete, its index, id and name
        first and then all of its arguments: only the end of a call shows that it is one. What one step says (or
        several, where the client is slow) is one piece.
        """
        replies: dict[int, Reply] = {}
        calls = [0] * len(self._specs)
        async with aclosing(runner.stream(self._specs)) as steps:
            async for step in steps:
                events: list[bytes] = []
                for reply, parts in step:
                    if reply.index not in replies:
                        replies[reply.index] = reply
                        events.append(self._event(reply.index, {"role": "assistant", "content": ""}))
                    for delta, logprobs in self._deltas(reply, parts, first_call=calls[reply.index]):
                        events.append(self._event(reply.index, delta, logprobs=logprobs))
                    calls[reply.index] += sum(isinstance(part, ToolCall) for part in parts)
                    if reply.finish_reason is not None:
                        end = {"finish_reason": _finish_reason(reply), "stop_reason": reply.stop_reason}
                        events.append(self._event(reply.index, {}, **end))
                if events:
                    yield b"".join(events)
        if self._body.include_usage:
            yield self._envelope.usage_event(self._usage(list(replies.values())))

    def _deltas(
        self, reply: Reply, parts: Sequence[Part], *, first_call: int
    ) -> list[tuple[dict[str, Any], dict[str, Any] | None]]:
        """Deltas of a step; the log probabilities of all its tokens are with the first of them."""
        deltas = list(_part_deltas(parts, first_call=first_call))
        taken = reply.take_logprobs()
        if not taken:
            return [(delta, None) for delta in deltas]
        logprobs = chat_logprobs(taken, self._vocabulary)
        first, *others = deltas or [{"content": ""}]  # a token inside a character, or one that is no text
        return [(first, logprobs), *((delta, None) for delta in others)]

    def _usage(self, replies: Sequence[Reply]) -> dict[str, Any]:
        counts = [reply.num_tokens for reply in replies]
        thought = sum(reply.reasoning_tokens for reply in replies)
        return chat_usage(self._specs, counts, n=self._body.n, reasoning_tokens=thought)

    def _event(self, index: int, delta: dict[str, Any], **fields: Any) -> bytes:
        return self._envelope.event({"index": index, "delta": delta, "logprobs": None, "finish_reason": None} | fields)


def _message(answer: Reply) -> dict[str, Any]:
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


def _finish_reason(reply: Reply) -> str | None:
    """The engine's reason in OpenAI's words. An answer cut by its length says so, whatever calls it already made."""
    return "tool_calls" if reply.finish_reason == "stop" and reply.tool_calls else reply.finish_reason
