"""Log probabilities in the two shapes of the API."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from modelserve_worker.request import TokenLogprobs
from modelserve_worker.text.vocabulary import Vocabulary

_LEAST = -9999.0  # stands for minus infinity, which JSON cannot say


def _entry(token_id: int, logprob: float, vocabulary: Vocabulary) -> dict[str, Any]:
    data = vocabulary.bytes_of(token_id)
    return {"token": data.decode(errors="replace"), "logprob": max(logprob, _LEAST), "bytes": list(data)}


TokensWithLogprobs = Iterable[tuple[int, TokenLogprobs]]


def chat_logprobs(tokens: TokensWithLogprobs, vocabulary: Vocabulary) -> dict[str, Any]:
    """{"content": [{token, logprob, bytes, top_logprobs}]}; `bytes` are exact where a token is part of a character."""
    content = []
    for token_id, logprobs in tokens:
        top = [_entry(other, logprob, vocabulary) for other, logprob in logprobs.top]
        content.append({**_entry(token_id, logprobs.logprob, vocabulary), "top_logprobs": top})
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """{"tokens", "token_logprobs", "top_logprobs", "text_offset"} of one choice; offsets go on from call to call."""

    def __init__(self, vocabulary: Vocabulary, *, first_offset: int = 0) -> None:
        self._vocabulary = vocabulary
        self._offset = first_offset

    def take(self, tokens: TokensWithLogprobs) -> dict[str, Any]:
        texts, values, tops, offsets = [], [], [], []
        for token_id, logprobs in tokens:
            text = self._text(token_id)
            texts.append(text)
            value = max(logprobs.logprob, _LEAST)
            values.append(value)
            # The chosen token is always listed, as clients look it up by its text.
            top = {self._text(other): max(logprob, _LEAST) for other, logprob in logprobs.top}
            tops.append({text: value} | top if top else None)
            offsets.append(self._offset)
            self._offset += len(text)
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _text(self, token_id: int) -> str:
        return self._vocabulary.bytes_of(token_id).decode(errors="replace")
