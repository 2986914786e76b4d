"""POST /v1/chat/completions: the shapes of its answers."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any

from modelserve_worker.server.answers.envelope import Envelope
from modelserve_worker.server.answers.logprobs import TokensWithLogprobs, chat_logprobs, prompt_logprobs_list
from modelserve_worker.server.answers.preparation import chat_sequences
from modelserve_worker.server.answers.sequences import Reply, SequenceRunner
from modelserve_worker.server.answers.usage import chat_usage
from modelserve_worker.server.bodies.protocol import ChatCompletionRequest
from modelserve_worker.server.errors.errors import ApiError
from modelserve_worker.server.http.streaming import DONE, event
from modelserve_worker.server.json_text import to_json, to_json_in_pieces
from modelserve_worker.server.state import ServedModel
from modelserve_worker.text.reply import CallArguments, CallBegun, Channel, Part, Text


class ChatAnswer:
    """Answers one chat request, whole or as a stream. Raises ApiError when the request cannot be served."""

    stream_end = DONE

    def __init__(self, body: ChatCompletionRequest, model: ServedModel, *, max_model_len: int) -> None:
        self._body = body.model_copy(update={"messages": []})  # its text is not held while the answer is made
        self._vocabulary = model.text.vocabulary
        response_id = f"chatcmpl-{uuid.uuid4().hex}"
        self.specs = chat_sequences(body, model, response_id=response_id, max_model_len=max_model_len)
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        self._envelope = Envelope(response_id, kind, model.name, with_usage=body.include_usage)
        self._replies: dict[int, Reply] = {}  # that have begun, in a stream
        self._calls = [0] * len(self.specs)  # begun so far, in a stream

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(spec.request.prompt_token_ids) for spec in self.specs[:: self._body.n])

    async def whole(self, runner: SequenceRunner) -> bytes:
        replies = await runner.collect(self.specs)
        if not self._body.logprobs and self._body.prompt_logprobs is None:
            return to_json(self._document(replies))
        # An object per token and alternative, megabytes of them: not on the loop.
        return await asyncio.to_thread(lambda: to_json_in_pieces(self._document(replies)))

    def _document(self, replies: Sequence[Reply]) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": _message(reply),
                "logprobs": self._scores(reply.take_logprobs()) if self._body.logprobs else None,
                "finish_reason": _finish_reason(reply),
                "stop_reason": reply.stop_reason,
            }
            for index, reply in enumerate(replies)
        ]
        document = self._envelope.document(choices, self._usage(replies))
        if self._body.prompt_logprobs is not None:
            document["prompt_logprobs"] = prompt_logprobs_list(
                replies[0].prompt_token_ids,
                replies[0].prompt_logprobs,
                self._vocabulary,
                alternatives=self._body.prompt_logprobs,
            )
        return document

    async def events(self, replies: Sequence[Reply]) -> bytes:
        """Per choice: the role with its first event, the parts of the answer, and at its end the finish reason.

        Reasoning, content and the arguments of calls come as the model writes them; a call begins with its index, id
        and name.
        """
        events: list[bytes] = []
        for reply in replies:
            if reply.index not in self._replies:
                self._replies[reply.index] = reply
                events.append(self._event(reply.index, {"role": "assistant", "content": ""}))
            for delta, logprobs in self._deltas(reply):
                events.append(self._event(reply.index, delta, logprobs=logprobs))
            if reply.finish_reason is not None:
                end = {"finish_reason": _finish_reason(reply), "stop_reason": reply.stop_reason}
                events.append(self._event(reply.index, {}, **end))
        return b"".join(events)

    def last_events(self) -> bytes:
        if not self._body.include_usage:
            return b""
        return self._envelope.usage_event(self._usage(list(self._replies.values())))

    def failure(self, error: ApiError) -> bytes:
        """The event for a stream which cannot go on."""
        return event(error.body())

    def _deltas(self, reply: Reply) -> list[tuple[dict[str, Any], dict[str, Any] | None]]:
        """Deltas of a step, the log probabilities of all its tokens with the first of them.

        There is one at least while the answer goes on, an empty one for a token inside a character or one that is no
        text: its client sees that it came.
        """
        deltas = [delta for part in reply.take_parts() if (delta := self._delta(reply.index, part)) is not None]
        taken = reply.take_logprobs()
        if not deltas and reply.finish_reason is None:
            deltas = [{}]
        if not taken:
            return [(delta, None) for delta in deltas]
        logprobs = self._scores(taken)
        logprobs["content"] = list(logprobs["content"])
        first, *others = deltas if any(deltas) else [{"content": ""}]
        return [(first, logprobs), *((delta, None) for delta in others)]

    def _scores(self, tokens: TokensWithLogprobs) -> dict[str, Any]:
        return chat_logprobs(tokens, self._vocabulary, by_id=self._body.return_tokens_as_token_ids)

    def _delta(self, index: int, part: Part) -> dict[str, Any] | None:
        """None for the end of a call, which its stream does not tell."""
        if isinstance(part, Text):
            return _text_fields(part)
        if isinstance(part, CallBegun):
            self._calls[index] += 1
            return {"tool_calls": [{"index": self._calls[index] - 1, **_call(part.name, arguments="")}]}
        if isinstance(part, CallArguments):
            return {"tool_calls": [{"index": self._calls[index] - 1, "function": {"arguments": part.json}}]}
        return None

    def _usage(self, replies: Sequence[Reply]) -> dict[str, Any]:
        return chat_usage(self.specs, replies, n=self._body.n)

    def _event(self, index: int, delta: dict[str, Any], **fields: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} | fields
        return self._envelope.event(to_json(choice))


def _message(answer: Reply) -> dict[str, Any]:
    """`content` is null where the answer consists of calls; what the model thought stands under both of its names."""
    calls = answer.tool_calls
    message: dict[str, Any] = {"role": "assistant", "content": None if calls and not answer.content else answer.content}
    if answer.reasoning:
        message |= _text_fields(Text(Channel.REASONING, answer.reasoning))
    if calls:
        message["tool_calls"] = [_call(call.name, arguments=call.arguments_json()) for call in calls]
    return message


def _text_fields(part: Text) -> dict[str, Any]:
    """Some clients look for a thought under `reasoning_content`, the others under `reasoning`."""
    if part.channel is Channel.REASONING:
        return {"reasoning_content": part.text, "reasoning": part.text}
    return {"content": part.text}


def _call(name: str, *, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


def _finish_reason(reply: Reply) -> str | None:
    """The engine's reason in OpenAI's words. An answer cut by its length says so, whatever calls it already made."""
    return "tool_calls" if reply.finish_reason == "stop" and reply.num_calls else reply.finish_reason
