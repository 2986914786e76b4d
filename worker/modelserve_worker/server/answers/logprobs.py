"""Log probabilities in the two shapes of the API."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import Any

from modelserve_worker.request import PromptLogprobs, TokenLogprobs
from modelserve_worker.text.detokenizer import IncrementalDetokenizer
from modelserve_worker.text.vocabulary import Vocabulary

_LEAST = -9999.0  # stands for minus infinity, which JSON cannot say


def _token(token_id: int, vocabulary: Vocabulary, *, by_id: bool) -> str:
    """What stands for a token: its text, or, as vLLM writes it, its id."""
    return f"token_id:{token_id}" if by_id else vocabulary.bytes_of(token_id).decode(errors="replace")


def _entry(token_id: int, logprob: float, vocabulary: Vocabulary, *, by_id: bool) -> dict[str, Any]:
    token = _token(token_id, vocabulary, by_id=by_id)
    return {"token": token, "logprob": max(logprob, _LEAST), "bytes": list(vocabulary.bytes_of(token_id))}


def prompt_logprobs_list(
    prompt: Sequence[int], scores: PromptLogprobs | None, vocabulary: Vocabulary, *, alternatives: int
) -> Iterator[dict[str, Any] | None] | None:
    """vLLM's shape, made as it is read: null for the first token, then {token id: {logprob, rank, decoded_token}} of
    the `alternatives` likeliest tokens and of the prompt's own."""
    return None if scores is None else _prompt_entries(prompt, scores, vocabulary, alternatives=alternatives)


def _prompt_entries(
    prompt: Sequence[int], scores: PromptLogprobs, vocabulary: Vocabulary, *, alternatives: int
) -> Iterator[dict[str, Any] | None]:
    yield None
    for token_id, row in zip(prompt[1:], scores.rows(), strict=True):
        ranked = [(other, rank, logprob) for rank, (other, logprob) in enumerate(row.top[:alternatives], start=1)]
        entry = {}
        for other, rank, logprob in [(token_id, row.rank, row.logprob), *ranked]:
            text = vocabulary.bytes_of(other).decode(errors="replace")
            entry[str(other)] = {"logprob": max(logprob, _LEAST), "rank": rank, "decoded_token": text}
        yield entry


TokensWithLogprobs = Iterable[tuple[int, TokenLogprobs]]


def chat_logprobs(tokens: TokensWithLogprobs, vocabulary: Vocabulary, *, by_id: bool) -> dict[str, Any]:
    """{"content": [{token, logprob, bytes, top_logprobs}]}, made as they are read; `bytes` are exact where a token is
    part of a character. `by_id`: tokens are named by their ids."""
    return {"content": _chat_entries(tokens, vocabulary, by_id=by_id), "refusal": None}


def _chat_entries(tokens: TokensWithLogprobs, vocabulary: Vocabulary, *, by_id: bool) -> Iterator[dict[str, Any]]:
    for token_id, logprobs in tokens:
        top = [_entry(other, logprob, vocabulary, by_id=by_id) for other, logprob in logprobs.top]
        yield {**_entry(token_id, logprobs.logprob, vocabulary, by_id=by_id), "top_logprobs": top}


class CompletionLogprobs:
    """{"tokens", "token_logprobs", "top_logprobs", "text_offset"} of one choice; offsets go on from call to call.

    An offset is where in the choice's text, which begins with `echo`, a token begins, in characters: tokens that share
    a character begin with it, and one that is not shown stands where the next one does. `by_id`: tokens are named by
    their ids.
    """

    def __init__(
        self, vocabulary: Vocabulary, *, echo: str, skip_special_tokens: bool = True, by_id: bool = False
    ) -> None:
        self._vocabulary = vocabulary
        self._by_id = by_id
        self._echo = echo
        self._detokenizer = IncrementalDetokenizer(vocabulary, skip_special_tokens=skip_special_tokens)
        self._offset = len(echo)

    def take(
        self,
        tokens: Sequence[tuple[int, TokenLogprobs]],
        *,
        prompt: Sequence[int] = (),
        prompt_logprobs: PromptLogprobs | None = None,
        alternatives: int = 0,
    ) -> dict[str, Any]:
        """Of an answer's tokens, behind those of an echoed prompt: its first token has null, the others at most
        `alternatives` of the tokens that were likelier."""
        texts: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        scored: Iterable[tuple[int, TokenLogprobs | None]] = ()
        if prompt_logprobs is not None:
            scores = (TokenLogprobs(row.logprob, row.rank, row.top[:alternatives]) for row in prompt_logprobs.rows())
            scored = chain([(prompt[0], None)], zip(prompt[1:], scores, strict=True))
        for token_id, logprobs in chain(scored, tokens):
            text = self._text(token_id)
            texts.append(text)
            value = None if logprobs is None else max(logprobs.logprob, _LEAST)
            values.append(value)
            tops.append(None if logprobs is None or not logprobs.top else self._alternatives(token_id, logprobs))
        offsets = self._prompt_offsets(prompt) if prompt_logprobs is not None else []
        for token_id, _ in tokens:
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push(token_id))
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _prompt_offsets(self, prompt: Sequence[int]) -> list[int]:
        """Of a prompt of ids, whose echo leaves special tokens out, or of a text: that may spell some, and those that
        the tokenizer puts before it are not in it."""
        for skipped in (True, False):
            detokenizer = IncrementalDetokenizer(self._vocabulary, skip_special_tokens=skipped)
            ends = list(accumulate(len(detokenizer.push(token_id)) for token_id in prompt))
            before = ends[-1] + len(detokenizer.finish()) - len(self._echo)
            if not before:
                break
        return [max(0, begin - before) for begin in [0, *ends[:-1]]]

    def _alternatives(self, token_id: int, logprobs: TokenLogprobs) -> dict[str, float]:
        """The chosen token is always listed, as clients look it up by its text. Of others that share a text, as parts
        of characters do, the likeliest counts."""
        listed: dict[str, float] = {}
        for each, logprob in ((token_id, logprobs.logprob), *logprobs.top):
            listed.setdefault(self._text(each), max(logprob, _LEAST))
        return listed

    def _text(self, token_id: int) -> str:
        return _token(token_id, self._vocabulary, by_id=self._by_id)
