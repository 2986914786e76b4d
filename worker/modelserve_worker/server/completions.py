"""POST /v1/completions: the shapes of its answers."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from modelserve_worker.server.envelope import Envelope
from modelserve_worker.server.errors import ApiError
from modelserve_worker.server.logprobs import CompletionLogprobs
from modelserve_worker.server.preparation import SequenceSpec, completion_sequences
from modelserve_worker.server.protocol import CompletionRequest
from modelserve_worker.server.sequences import Reply, SequenceRunner, texts
from modelserve_worker.server.state import ServedModel
from modelserve_worker.server.streaming import DONE, event
from modelserve_worker.server.usage import usage
from modelserve_worker.text.detokenizer import decode
from modelserve_worker.text.reply import Channel, Part


class CompletionAnswer:
    """Answers one completion request, whole or as a stream. Raises ApiError when the request cannot be served."""

    stream_end = DONE

    def __init__(self, body: CompletionRequest, model: ServedModel, *, max_model_len: int) -> None:
        response_id = f"cmpl-{uuid.uuid4().hex}"
        self._specs = completion_sequences(body, model, response_id=response_id, max_model_len=max_model_len)
        self._echoes = [_echo(body, spec, model) for spec in self._specs]
        self._body = body.model_copy(update={"prompt": []})  # its text is not held while the answer is made
        self._envelope = Envelope(response_id, "text_completion", model.name, with_usage=body.include_usage)
        self._logprobs = [CompletionLogprobs(model.text.vocabulary, first_offset=len(echo)) for echo in self._echoes]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(spec.request.prompt_token_ids) for spec in self._specs[:: self._body.n])

    async def whole(self, runner: SequenceRunner) -> dict[str, Any]:
        replies = await runner.collect(self._specs)
        choices = [
            {
                "index": index,
                "text": self._echoes[index] + reply.content,
                "logprobs": None if self._body.logprobs is None else self._logprobs[index].take(reply.take_logprobs()),
                "finish_reason": reply.finish_reason,
                "stop_reason": reply.stop_reason,
            }
            for index, reply in enumerate(replies)
        ]
        counts = [reply.num_tokens for reply in replies]
        return self._envelope.document(choices, usage(self._specs, counts, n=self._body.n))

    async def events(self, runner: SequenceRunner) -> AsyncGenerator[bytes, None]:
        """The events of one step, or of several where the client is slow, in one piece."""
        counts = [0] * len(self._specs)
        async with aclosing(runner.stream(self._specs)) as steps:
            async for step in steps:
                events = []
                for reply, parts in step:
                    choice = self._choice(reply, parts, first=counts[reply.index] == 0)
                    counts[reply.index] = reply.num_tokens
                    if choice is not None:
                        events.append(self._envelope.event(choice))
                if events:
                    yield b"".join(events)
        if self._body.include_usage:
            yield self._envelope.usage_event(usage(self._specs, counts, n=self._body.n))

    def failure(self, error: ApiError) -> bytes:
        """The event for a stream which cannot go on."""
        return event(error.body())

    def _choice(self, reply: Reply, parts: Sequence[Part], *, first: bool) -> dict[str, Any] | None:
        """The choice of an event; None for a token inside a character, which says nothing yet."""
        text = texts(parts, Channel.CONTENT)
        logprobs = reply.take_logprobs()
        if not (first or text or logprobs or reply.finish_reason):
            return None
        return {
            "index": reply.index,
            "text": self._echoes[reply.index] + text if first else text,
            "logprobs": self._logprobs[reply.index].take(logprobs) if logprobs else None,
            "finish_reason": reply.finish_reason,
            "stop_reason": reply.stop_reason,
        }


def _echo(body: CompletionRequest, spec: SequenceSpec, model: ServedModel) -> str:
    if not body.echo:
        return ""
    prompt = body.prompt[spec.index // body.n]
    return prompt if isinstance(prompt, str) else decode(prompt, model.text.vocabulary)
