"""The text of a recording, whole or as it is heard: its sounds are answered side by side, and told in order."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from modelserve_worker.media.audio_reader import DecodedSound
from modelserve_worker.server.answers.preparation import SequenceSpec, chat_sequences
from modelserve_worker.server.answers.sequences import Reply, SequenceRunner, texts
from modelserve_worker.server.answers.usage import usage
from modelserve_worker.server.bodies.protocol import ChatCompletionRequest
from modelserve_worker.server.errors.errors import ApiError
from modelserve_worker.server.http.streaming import DONE, event
from modelserve_worker.server.json_text import to_json
from modelserve_worker.server.state import ServedModel
from modelserve_worker.server.transcriptions.request import JoinedText, TranscriptionRequest
from modelserve_worker.text.reply import Channel

MOST_TOKENS = 1024
"""Of the text of one sound: some three words a second have 200."""


class TranscriptionAnswer:
    """Answers one request for a recording's `sounds`. Raises ApiError where it cannot be served."""

    stream_end = DONE

    def __init__(
        self, body: TranscriptionRequest, sounds: Sequence[DecodedSound], model: ServedModel, *, max_model_len: int
    ) -> None:
        self._as_text = body.response_format == "text"
        self.media_type = "text/plain; charset=utf-8" if self._as_text else "application/json"
        name = f"transcription-{uuid.uuid4().hex}"
        self.specs = [
            _spec(body, sound, model, number=number, response_id=f"{name}-{number}", max_model_len=max_model_len)
            for number, sound in enumerate(sounds)
        ]
        self._replies: dict[int, Reply] = {}  # that have begun, in a stream
        self._told = 0  # sounds whose text is complete
        self._joined = JoinedText()

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(spec.request.prompt_token_ids) for spec in self.specs)

    async def whole(self, runner: SequenceRunner) -> bytes:
        replies = await runner.collect(self.specs)
        for reply in replies:
            self._joined.push(reply.content)
            self._joined.next_sound()
        if self._as_text:
            return f"{self._joined.text}\n".encode()
        return to_json({"text": self._joined.text, "usage": self._usage(replies)})

    async def events(self, replies: Sequence[Reply]) -> bytes:
        """What is new of the sound that is told at the moment, and of those behind it once it is complete."""
        self._replies |= {reply.index: reply for reply in replies}
        said = ""
        while (reply := self._replies.get(self._told)) is not None:
            said += self._joined.push(texts(reply.take_parts(), Channel.CONTENT))
            if reply.finish_reason is None:
                break
            self._told += 1
            self._joined.next_sound()
        return event({"type": "transcript.text.delta", "delta": said}) if said else b""

    def last_events(self) -> bytes:
        counts = self._usage(list(self._replies.values()))
        return event({"type": "transcript.text.done", "text": self._joined.text, "usage": counts})

    def failure(self, error: ApiError) -> bytes:
        """The event of a stream that cannot go on."""
        return event(error.body())

    def _usage(self, replies: Sequence[Reply]) -> dict[str, Any]:
        counts = usage(self.specs, replies, n=1)
        heard = counts["prompt_tokens_details"].get("audio_tokens", 0)
        return {
            "type": "tokens",
            "input_tokens": counts["prompt_tokens"],
            "input_token_details": {"text_tokens": counts["prompt_tokens"] - heard, "audio_tokens": heard},
            "output_tokens": counts["completion_tokens"],
            "total_tokens": counts["total_tokens"],
        }


def _spec(
    body: TranscriptionRequest,
    sound: DecodedSound,
    model: ServedModel,
    *,
    number: int,
    response_id: str,
    max_model_len: int,
) -> SequenceSpec:
    """The answer to one sound, as a chat with a message of the instruction and the sound."""
    parts = [{"type": "text", "text": body.instruction}, {"type": "audio_url", "audio_url": {"url": ""}}]
    chat = ChatCompletionRequest.model_validate(
        {
            "model": body.model,
            "messages": [{"role": "user", "content": parts}],
            "temperature": body.temperature,
            "max_tokens": min(MOST_TOKENS, max(1, max_model_len // 2)),
            "reasoning_effort": "none",
            **({} if body.seed is None else {"seed": body.seed}),
        }
    )
    (spec,) = chat_sequences(chat, model, response_id=response_id, max_model_len=max_model_len, media=[("file", sound)])
    return replace(spec, index=number)
