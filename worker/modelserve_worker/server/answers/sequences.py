"""Running sequences: engine outputs in, parts of answers out; an answer that ends early frees its pages.

All sequences of one HTTP request come through one iterator of the engine, so a step wakes its handler once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing

from modelserve.errors import InvalidInput
from modelserve.sizing.host.front_end import HELD_BYTES_PER_LOGPROB
from modelserve_worker.engine_client import EngineBusy, EngineClient, EngineDead
from modelserve_worker.metrics import WorkerMetrics
from modelserve_worker.request import GRAMMAR_FIELD, FinishReason, PromptLogprobs, RequestOutput, TokenLogprobs
from modelserve_worker.server.answers.preparation import SequenceSpec
from modelserve_worker.server.http.request_context import RequestContext
from modelserve_worker.text.repetition import LOOP_WINDOW, RepetitionDetector, ends_in_a_loop
from modelserve_worker.text.reply import Channel, Part, ReplyParser, Text, join_parts
from modelserve_worker.text.tool_calls import ToolCall
from modelserve_worker.text.vocabulary import Vocabulary

REPETITION_DETECTED = "repetition_detected"  # vLLM's word
_UNFINISHED = (FinishReason.ABORT, FinishReason.ERROR)


class GenerationError(Exception):
    """The engine ended a sequence that its client still waits for."""


class Reply:
    """One sequence's answer while it arrives: what was read and nobody has taken, and how it ended.

    `finish_reason` is "stop" or "length" once it is complete; `stop_reason` is the stop string, or the stop token other
    than EOS, that ended it, or REPETITION_DETECTED.
    """

    def __init__(self, spec: SequenceSpec, vocabulary: Vocabulary, metrics: WorkerMetrics) -> None:
        request = spec.request
        self.index = spec.index
        self.num_tokens = 0  # of the answer, the one that ended it included
        self.cached_tokens = 0  # of the prompt, those that were not computed
        self._parts: list[Part] = []
        self._logprobs: list[tuple[int, TokenLogprobs]] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.prompt_token_ids = request.prompt_token_ids
        self.prompt_logprobs: PromptLogprobs | None = None  # with the first token, where they were asked for
        self._spec = spec
        self._parser = ReplyParser(
            vocabulary,
            spec.reply_format,
            stop=spec.stop,
            include_stop=spec.include_stop,
            skip_special_tokens=spec.skip_special_tokens,
            min_tokens=request.sampling.min_tokens,
        )
        self._repetition = None if spec.repetition is None else RepetitionDetector(spec.repetition)
        self._last_tokens: deque[int] = deque(maxlen=LOOP_WINDOW)
        self.accepted_drafts = self.rejected_drafts = 0  # tokens that were proposed and verified
        self._metrics = metrics
        self._timer = metrics.start_request(len(request.prompt_token_ids), arrival_s=request.arrival_s)

    def take_parts(self) -> Sequence[Part]:
        """What came since the last call. Neighbours of a kind are joined."""
        taken, self._parts = self._parts, []
        return join_parts(taken)

    @property
    def parts(self) -> list[Text | ToolCall]:
        """What nobody has taken, a call as its ToolCall alone."""
        return [part for part in self._parts if isinstance(part, Text | ToolCall)]

    @property
    def content(self) -> str:
        return texts(self._parts, Channel.CONTENT)

    @property
    def reasoning(self) -> str:
        return texts(self._parts, Channel.REASONING)

    @property
    def tool_calls(self) -> list[ToolCall]:
        return [part for part in self._parts if isinstance(part, ToolCall)]

    @property
    def reasoning_tokens(self) -> int:
        """Tokens inside thoughts."""
        return self._parser.reasoning_tokens

    @property
    def num_calls(self) -> int:
        """Calls that are complete."""
        return self._parser.num_calls

    def read(self, output: RequestOutput) -> int:
        """Take what a step produced; how many of its tokens belong to the answer. Raises GenerationError when the
        engine gave it up, and InvalidInput when what the client asked for is why.
        """
        if output.finish_reason is not None and output.finish_reason in _UNFINISHED:
            if output.error is not None and output.error_field is not None:
                raise InvalidInput(output.error, field=output.error_field)
            raise GenerationError(output.error or "the server ended the request before it was complete")
        if output.admitted_s is not None:
            self.cached_tokens = output.cached_tokens
            self._timer.admitted(output.admitted_s)
        if output.prompt_logprobs:  # of a prompt of one token there are none
            self.prompt_logprobs = output.prompt_logprobs
        num_read = self._read_tokens(output)
        self.num_tokens += num_read
        if output.drafts:
            accepted = min(num_read, len(output.token_ids) - 1)  # the last one was drawn
            self.accepted_drafts += accepted
            self.rejected_drafts += output.drafts - accepted
        if output.logprobs:
            self._logprobs += zip(output.token_ids[:num_read], output.logprobs[:num_read], strict=True)
        self._timer.tokens(num_read)
        if self.finish_reason is not None:
            self._timer.finish(FinishReason(self.finish_reason))
            if self.stop_reason == REPETITION_DETECTED or (
                self.finish_reason == FinishReason.LENGTH and ends_in_a_loop(self._last_tokens)
            ):
                self._metrics.count_loop(stopped=self.stop_reason == REPETITION_DETECTED)
        return num_read

    def take_logprobs(self) -> list[tuple[int, TokenLogprobs]]:
        """Token ids with their log probabilities, those that came since the last call; none unless asked for."""
        taken, self._logprobs = self._logprobs, []
        return taken

    @property
    def scored(self) -> bool:
        """Whether log probabilities were asked for, of its tokens or of its prompt's."""
        sampling = self._spec.request.sampling
        return sampling.logprobs is not None or sampling.prompt_logprobs is not None

    @property
    def held_bytes(self) -> int:
        """Bytes of host memory that scores take until they are sent: the prompt's, and those of `take_logprobs`."""
        prompt = 0 if self.prompt_logprobs is None else self.prompt_logprobs.nbytes
        entries = len(self._logprobs) * (1 + (self._spec.request.sampling.logprobs or 0))
        return prompt + entries * HELD_BYTES_PER_LOGPROB

    def give_up(self, reason: FinishReason) -> None:
        """Count an answer that nobody completes; without effect on a complete one."""
        if self.finish_reason is None:
            self._timer.finish(reason)

    def _read_tokens(self, output: RequestOutput) -> int:
        """Add the parts that the output made certain; how many of its tokens belong to the answer."""
        parser, token_ids = self._parser, output.token_ids
        if self._spec.prompt_only:
            self.finish_reason = "length"
            return 0
        self._last_tokens += token_ids
        if output.stop_token_id is not None and not self._spec.include_stop:
            token_ids = token_ids[:-1]  # the token that ended the answer is not part of its text
        for position, token_id in enumerate(token_ids):
            self._parts += parser.push(token_id)
            if parser.ended:
                self.finish_reason, self.stop_reason = "stop", parser.stop_string
                return position + 1
            if self._repetition is not None:
                self._repetition.push(token_id)
                if self._repetition.found:
                    self.finish_reason, self.stop_reason = "length", REPETITION_DETECTED
                    self._parts += parser.finish()
                    return position + 1
        if output.finish_reason is not None:
            self._parts += parser.finish()
            if parser.ended:
                self.finish_reason, self.stop_reason = "stop", parser.stop_string
            else:
                named = output.stop_token_id in self._spec.request.sampling.stop_token_ids
                self.finish_reason = output.finish_reason.value
                self.stop_reason = output.stop_token_id if named else None
        return len(output.token_ids)


def texts(parts: Sequence[Part], channel: Channel) -> str:
    """What they say there."""
    return "".join([part.text for part in parts if isinstance(part, Text) and part.channel is channel])


class SequenceRunner:
    """Runs the sequences of one HTTP request."""

    def __init__(
        self,
        engine: EngineClient,
        vocabulary: Vocabulary,
        metrics: WorkerMetrics,
        context: RequestContext | None = None,
    ) -> None:
        self._engine = engine
        self._context = context
        self._vocabulary = vocabulary
        self._metrics = metrics

    async def collect(self, specs: Sequence[SequenceSpec]) -> list[Reply]:
        """All answers, by index. Raises what `stream` does."""
        replies: dict[int, Reply] = {}
        async with aclosing(self.stream(specs)) as steps:
            async for step in steps:
                replies |= {reply.index: reply for reply in step}
        return [replies[spec.index] for spec in specs]

    async def stream(self, specs: Sequence[SequenceSpec]) -> AsyncGenerator[list[Reply], None]:
        """Replies that went on, each once, until all are complete.

        Several steps that came together are told as one. Closing the generator aborts the replies that go on.
        Raises InvalidInput when the engine refuses a sequence or its grammar exceeds its bounds, with the name of the
        field that asked for the grammar, EngineBusy, GenerationError, EngineDead, and ApiError 429 when scores that
        nobody has taken are more than clients may make this process hold.
        """
        client = ""
        if self._context is not None:
            client = self._context.client
            for spec in specs:
                spec.request.client, spec.request.tenant = client, self._context.tenant
        replies = {spec.request.request_id: Reply(spec, self._vocabulary, self._metrics) for spec in specs}
        scored, held = [reply for reply in replies.values() if reply.scored], 0
        incomplete = len(replies)
        reason: FinishReason | None = FinishReason.ABORT
        try:
            async with aclosing(self._engine.generate([spec.request for spec in specs], client=client)) as steps:
                async for outputs in steps:
                    step: dict[str, Reply] = {}
                    for output in outputs:
                        reply = replies[output.request_id]
                        if reply.finish_reason is None:  # a stop string ends an answer before the engine does
                            count = reply.read(output)
                            if self._context is not None:
                                self._context.note_tokens(count, admitted_s=output.admitted_s)
                            step[output.request_id] = reply
                            if reply.finish_reason is not None:
                                incomplete -= 1
                                if output.finish_reason is None and incomplete:
                                    self._engine.abort(output.request_id)
                    if step:
                        yield list(step.values())
                        if scored:
                            held = self._hold(scored, held)
                    if not incomplete:
                        return
        except EngineBusy:
            reason = None  # nothing began, so nothing ended
            raise
        except (EngineDead, GenerationError, InvalidInput) as error:
            reason = FinishReason.ERROR
            if isinstance(error, InvalidInput) and error.field == GRAMMAR_FIELD:
                field = specs[0].grammar_field
                raise InvalidInput(f"{field}: {error}", field=field) from error
            raise
        finally:
            if reason is not None:
                for reply in replies.values():
                    reply.give_up(reason)
        raise GenerationError("the engine ended the stream without a reason")

    def _hold(self, replies: Iterable[Reply], held: int) -> int:
        """Bytes that replies hold now, in the account of the request, where `held` were."""
        if self._context is None:
            return 0
        now = sum(reply.held_bytes for reply in replies)
        self._context.account.hold_more(now - held)
        return now
