"""POST /v1/completions: the shapes of its answers."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from modelserve_worker.request import PromptLogprobs
from modelserve_worker.server.answers.envelope import Envelope
from modelserve_worker.server.answers.logprobs import CompletionLogprobs, prompt_logprobs_list
from modelserve_worker.server.answers.preparation import SequenceSpec, completion_sequences
from modelserve_worker.server.answers.sequences import Reply, SequenceRunner, texts
from modelserve_worker.server.answers.usage import usage
from modelserve_worker.server.bodies.protocol import CompletionRequest
from modelserve_worker.server.errors.errors import ApiError
from modelserve_worker.server.http.streaming import DONE, event
from modelserve_worker.server.json_text import to_json, to_json_in_pieces
from modelserve_worker.server.state import ServedModel
from modelserve_worker.text.detokenizer import decode
from modelserve_worker.text.reply import Channel


class CompletionAnswer:
    """Answers one completion request, whole or as a stream. Raises ApiError when the request cannot be served."""

    stream_end = DONE

    def __init__(self, body: CompletionRequest, model: ServedModel, *, max_model_len: int) -> None:
        response_id = f"cmpl-{uuid.uuid4().hex}"
        self.specs = completion_sequences(body, model, response_id=response_id, max_model_len=max_model_len)
        self._echoes = [_echo(body, spec, model) for spec in self.specs]
        self._body = body.model_copy(update={"prompt": []})  # its text is not held while the answer is made
        self._envelope = Envelope(response_id, "text_completion", model.name, with_usage=body.include_usage)
        self._vocabulary = model.text.vocabulary
        self._logprobs = [
            CompletionLogprobs(
                self._vocabulary,
                echo=echo,
                skip_special_tokens=body.skip_special_tokens,
                by_id=body.return_tokens_as_token_ids,
            )
            for echo in self._echoes
        ]
        self._prompts_scored = body.scored_alternatives is not None
        self._replies: dict[int, Reply] = {}  # that have begun, in a stream
        self._untold: dict[int, Reply] = {}  # of these, those that went on since their last event
        self._told: set[int] = set()  # those that have had an event

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(spec.request.prompt_token_ids) for spec in self.specs[:: self._body.n])

    async def whole(self, runner: SequenceRunner) -> bytes:
        replies = await runner.collect(self.specs)
        if self._body.logprobs is None and self._body.prompt_logprobs is None:
            return to_json(self._document(replies))
        # An object per token and alternative, megabytes of them: not on the loop.
        return await asyncio.to_thread(lambda: to_json_in_pieces(self._document(replies)))

    def _document(self, replies: Sequence[Reply]) -> dict[str, Any]:
        return self._envelope.document(self._choices(replies), usage(self.specs, replies, n=self._body.n))

    def _choices(self, replies: Sequence[Reply]) -> list[dict[str, Any]]:
        choices = []
        for index, reply in enumerate(replies):
            prompt_logprobs = replies[self._scored_by(index)].prompt_logprobs
            choice = {
                "index": index,
                "text": self._echoes[index] + reply.content,
                "logprobs": self._scores(reply, prompt_logprobs),
                "finish_reason": reply.finish_reason,
                "stop_reason": reply.stop_reason,
            }
            if self._body.prompt_logprobs is not None:
                choice["prompt_logprobs"] = prompt_logprobs_list(
                    reply.prompt_token_ids,
                    prompt_logprobs,
                    self._vocabulary,
                    alternatives=self._body.prompt_logprobs,
                )
            choices.append(choice)
        return choices

    def _scored_by(self, index: int) -> int:
        """The choice whose reply has the scores of the prompt that this one answers: itself, where there are none."""
        return index - index % self._body.n if self._prompts_scored else index

    def _scores(self, reply: Reply, prompt_logprobs: PromptLogprobs | None) -> dict[str, Any] | None:
        """Those of the reply's new tokens, behind those of an echoed prompt."""
        if self._body.logprobs is None:
            return None
        return self._logprobs[reply.index].take(
            reply.take_logprobs(),
            prompt=reply.prompt_token_ids,
            prompt_logprobs=prompt_logprobs if self._body.echo else None,
            alternatives=self._body.logprobs,
        )

    async def events(self, replies: Sequence[Reply]) -> bytes:
        """An event of each reply, in one piece, or of none whose prompt's scores are still to come."""
        if self._prompts_scored:
            return await self._scored_events(replies)
        events = []
        for reply in replies:
            self._replies[reply.index] = reply
            events.append(self._event(reply, None, to_json))
        return b"".join(events)

    async def _scored_events(self, replies: Sequence[Reply]) -> bytes:
        """The first event of a reply waits for the scores of its prompt, which come with one of the others."""
        events = []
        for reply in replies:
            self._replies[reply.index] = self._untold[reply.index] = reply
        for index, reply in tuple(self._untold.items()):
            scored = self._replies.get(self._scored_by(index))
            if scored is None:
                continue
            del self._untold[index]
            if index in self._told or scored.prompt_logprobs is None:
                events.append(self._event(reply, None, to_json))
            else:  # as in a whole answer
                events.append(await asyncio.to_thread(self._event, reply, scored.prompt_logprobs, to_json_in_pieces))
        return b"".join(events)

    def last_events(self) -> bytes:
        if not self._body.include_usage:
            return b""
        return self._envelope.usage_event(usage(self.specs, self._replies.values(), n=self._body.n))

    def _event(self, reply: Reply, prompt_logprobs: PromptLogprobs | None, encode: Callable[[Any], bytes]) -> bytes:
        """A token that says nothing (yet) has one, too: its client sees that it goes on."""
        text = texts(reply.take_parts(), Channel.CONTENT)
        if reply.index not in self._told:
            self._told.add(reply.index)
            text = self._echoes[reply.index] + text
        scores = self._scores(reply, prompt_logprobs)
        choice = {
            "index": reply.index,
            "text": text,
            "logprobs": scores if scores is not None and scores["tokens"] else None,
            "finish_reason": reply.finish_reason,
            "stop_reason": reply.stop_reason,
        }
        return self._envelope.event(encode(choice))

    def failure(self, error: ApiError) -> bytes:
        """The event for a stream which cannot go on."""
        return event(error.body())


def _echo(body: CompletionRequest, spec: SequenceSpec, model: ServedModel) -> str:
    if not body.echo:
        return ""
    prompt = body.prompt[spec.index // body.n]
    return prompt if isinstance(prompt, str) else decode(prompt, model.text.vocabulary)
