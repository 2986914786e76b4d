"""POST /v1/completions: the shapes of its answers."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from modelserve_worker.server.logprobs import CompletionLogprobs
from modelserve_worker.server.preparation import SequenceSpec, completion_sequences
from modelserve_worker.server.protocol import CompletionRequest
from modelserve_worker.server.sequences import SequenceRunner
from modelserve_worker.server.state import ServedModel
from modelserve_worker.server.streaming import event
from modelserve_worker.server.usage import usage
from modelserve_worker.text.detokenizer import IncrementalDetokenizer
from modelserve_worker.text.vocabulary import Vocabulary


class CompletionAnswer:
    """Answers one completion request, whole or as a stream. Raises ApiError when the request cannot be served."""

    def __init__(self, body: CompletionRequest, model: ServedModel, *, max_model_len: int) -> None:
        self._body = body
        self._model = model
        self._specs = completion_sequences(body, model, max_model_len=max_model_len)
        self._echoes = [self._echo(spec) for spec in self._specs]
        self._head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time())}
        self._logprobs = [CompletionLogprobs(model.text.vocabulary, first_offset=len(echo)) for echo in self._echoes]

    def _echo(self, spec: SequenceSpec) -> str:
        if not self._body.echo:
            return ""
        prompt = self._body.prompt[spec.index // self._body.n]
        return prompt if isinstance(prompt, str) else _decode(prompt, self._model.text.vocabulary)

    def _envelope(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "model": self._model.name, "choices": list(choices)}

    async def whole(self, runner: SequenceRunner) -> dict[str, Any]:
        answers = await runner.collect(str(self._head["id"]), self._specs)
        choices = [
            {
                "index": index,
                "text": self._echoes[index] + answer.content,
                "logprobs": None if self._body.logprobs is None else self._logprobs[index].take(answer.tokens),
                "finish_reason": answer.finish_reason,
                "stop_reason": answer.stop_reason,
            }
            for index, answer in enumerate(answers)
        ]
        counts = [len(answer.tokens) for answer in answers]
        return self._envelope(choices) | {"usage": usage(self._specs, counts, n=self._body.n)}

    async def events(self, runner: SequenceRunner) -> AsyncGenerator[bytes, None]:
        counts = [0] * len(self._specs)
        no_usage = {"usage": None} if self._body.include_usage else {}
        async with aclosing(runner.stream(str(self._head["id"]), self._specs)) as chunks:
            async for chunk in chunks:
                first = counts[chunk.index] == 0
                counts[chunk.index] += len(chunk.tokens)
                with_logprobs = self._body.logprobs is not None and chunk.tokens
                if not (first or chunk.content or with_logprobs or chunk.finish_reason):
                    continue  # a token inside a character says nothing yet
                choice = {
                    "index": chunk.index,
                    "text": (self._echoes[chunk.index] if first else "") + chunk.content,
                    "logprobs": self._logprobs[chunk.index].take(chunk.tokens) if with_logprobs else None,
                    "finish_reason": chunk.finish_reason,
                    "stop_reason": chunk.stop_reason,
                }
                yield event(self._envelope([choice]) | no_usage)
        if self._body.include_usage:
            yield event(self._envelope([]) | {"usage": usage(self._specs, counts, n=self._body.n)})


def _decode(token_ids: Sequence[int], vocabulary: Vocabulary) -> str:
    detokenizer = IncrementalDetokenizer(vocabulary)
    return "".join([*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.finish()])
