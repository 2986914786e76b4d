"""Running sequences: engine outputs in, parts of answers out; an answer that ends early frees its pages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from modelserve_worker.engine_client import EngineClient, EngineDead
from modelserve_worker.metrics import WorkerMetrics
from modelserve_worker.request import FinishReason, Request, RequestOutput, SampledToken
from modelserve_worker.server.preparation import SequenceSpec
from modelserve_worker.text.reply import Channel, Part, ReplyParser, Text, join_texts
from modelserve_worker.text.tool_calls import ToolCall
from modelserve_worker.text.vocabulary import Vocabulary


class GenerationError(Exception):
    """The engine ended a sequence that its client still waits for."""


@dataclass(frozen=True)
class Chunk:
    """What one engine output added to a choice. `finish_reason` is "stop" or "length" on its last chunk."""

    index: int
    parts: tuple[Part, ...]
    tokens: tuple[SampledToken, ...]
    reasoning_tokens: int = 0  # how many of them are inside a thought
    finish_reason: str | None = None
    stop_reason: int | str | None = None  # the stop string, or the stop token other than EOS

    @property
    def content(self) -> str:
        return _text(self.parts, Channel.CONTENT)


@dataclass
class Choice:
    """A whole answer, put together from its chunks."""

    parts: list[Part] = field(default_factory=list)
    tokens: list[SampledToken] = field(default_factory=list)
    reasoning_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def content(self) -> str:
        return _text(self.parts, Channel.CONTENT)

    @property
    def reasoning(self) -> str:
        return _text(self.parts, Channel.REASONING)

    @property
    def tool_calls(self) -> list[ToolCall]:
        return [part for part in self.parts if isinstance(part, ToolCall)]

    def add(self, chunk: Chunk) -> None:
        self.parts += chunk.parts
        self.tokens += chunk.tokens
        self.reasoning_tokens += chunk.reasoning_tokens
        if chunk.finish_reason is not None:
            self.finish_reason, self.stop_reason = chunk.finish_reason, chunk.stop_reason


def _text(parts: Iterable[Part], channel: Channel) -> str:
    return "".join(part.text for part in parts if isinstance(part, Text) and part.channel is channel)


class SequenceRunner:
    """Runs the sequences of one HTTP request. Raises GenerationError and EngineDead from its generators."""

    def __init__(self, engine: EngineClient, vocabulary: Vocabulary, metrics: WorkerMetrics) -> None:
        self._engine = engine
        self._vocabulary = vocabulary
        self._metrics = metrics

    async def collect(self, response_id: str, specs: Sequence[SequenceSpec]) -> list[Choice]:
        """All answers, by index."""
        choices = [Choice() for _ in specs]
        async with aclosing(self.stream(response_id, specs)) as chunks:
            async for chunk in chunks:
                choices[chunk.index].add(chunk)
        return choices

    async def stream(self, response_id: str, specs: Sequence[SequenceSpec]) -> AsyncGenerator[Chunk, None]:
        """Chunks of all sequences as they come. Closing the generator aborts those that still run."""
        queue: asyncio.Queue[Chunk | Exception] = asyncio.Queue()

        async def pump(spec: SequenceSpec) -> None:
            try:
                async with aclosing(self._run(f"{response_id}-{spec.index}", spec)) as chunks:
                    async for chunk in chunks:
                        queue.put_nowait(chunk)
            except Exception as error:  # travels to the consumer, which closes the other sequences
                queue.put_nowait(error)

        tasks = [asyncio.create_task(pump(spec)) for spec in specs]
        try:
            running = len(tasks)
            while running:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                running -= item.finish_reason is not None
                yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, request_id: str, spec: SequenceSpec) -> AsyncGenerator[Chunk, None]:
        request = Request(request_id, spec.prompt_token_ids, spec.sampling)
        reply = ReplyParser(
            self._vocabulary,
            spec.reply_format,
            stop=spec.stop,
            include_stop=spec.include_stop,
            skip_special_tokens=spec.skip_special_tokens,
            min_tokens=spec.sampling.min_tokens,
        )
        timer = self._metrics.start_request(len(spec.prompt_token_ids), arrival_s=request.arrival_s)
        reason = FinishReason.ABORT
        try:
            async with aclosing(self._engine.generate(request)) as outputs:
                async for output in outputs:
                    if output.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
                        reason = output.finish_reason
                        raise GenerationError(output.error or "the server ended the request before it was complete")
                    chunk = _chunk(spec, output, reply)
                    timer.tokens(len(chunk.tokens))
                    if chunk.finish_reason is not None:
                        reason = FinishReason(chunk.finish_reason)
                    yield chunk
                    if chunk.finish_reason is not None:
                        return
        except EngineDead:
            reason = FinishReason.ERROR
            raise
        finally:
            timer.finish(reason)
        raise GenerationError("the engine ended the stream without a reason")


def _chunk(spec: SequenceSpec, output: RequestOutput, reply: ReplyParser) -> Chunk:
    parts: list[Part] = []
    earlier = reply.reasoning_tokens

    def chunk(tokens: tuple[SampledToken, ...], reason: str | None, stop: int | str | None) -> Chunk:
        return Chunk(spec.index, tuple(join_texts(parts)), tokens, reply.reasoning_tokens - earlier, reason, stop)

    for position, token in enumerate(output.tokens):
        ends = output.stop_token_id is not None and position == len(output.tokens) - 1
        if ends and not spec.include_stop:
            break  # the token that ended the answer is not part of its text
        parts += reply.push(token.token_id)
        if reply.ended:
            return chunk(output.tokens[: position + 1], "stop", reply.stop_string)
    if output.finish_reason is None:
        return chunk(output.tokens, None, None)
    parts += reply.finish()
    if reply.ended:
        return chunk(output.tokens, "stop", reply.stop_string)
    named = output.stop_token_id if output.stop_token_id in spec.sampling.stop_token_ids else None
    return chunk(output.tokens, output.finish_reason.value, named)
