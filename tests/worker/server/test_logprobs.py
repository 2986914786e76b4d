"""Log probabilities of completions: of tokens that share a text, and where in the text each token stands."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from modelserve_worker.request import PromptLogprobs, TokenLogprobs
from modelserve_worker.server.logprobs import CompletionLogprobs
from modelserve_worker.text.vocabulary import Vocabulary

VOCABULARY = Vocabulary((b"a", b"\xf0", b"\xf1", b"\xf2"), frozenset(), {})
A, F0, F1, F2 = range(4)
LIKELY, POSSIBLE, RARE = math.log(0.6), math.log(0.3), math.log(0.1)


def _top(chosen: int, logprob: float, *alternatives: tuple[int, float]) -> dict[str, float]:
    told = CompletionLogprobs(VOCABULARY, echo="").take([(chosen, TokenLogprobs(logprob, 1, alternatives))])
    assert told["token_logprobs"] == [logprob]
    return told["top_logprobs"][0]


def test_the_likeliest_of_tokens_with_one_text_is_listed() -> None:
    assert _top(A, RARE, (F0, LIKELY), (F1, POSSIBLE), (A, RARE)) == {"a": RARE, "\ufffd": LIKELY}


def test_the_chosen_token_keeps_its_own_log_probability() -> None:
    """Whoever looks for a greedy token compares it with the largest of the list."""
    assert _top(F0, LIKELY, (F0, LIKELY), (F1, POSSIBLE), (A, RARE)) == {"\ufffd": LIKELY, "a": RARE}
    assert _top(F2, RARE, (A, LIKELY), (F1, POSSIBLE)) == {"\ufffd": RARE, "a": LIKELY}


SCORED = TokenLogprobs(RARE, 1, ())


def _offsets(server: Any, echo: str, prompt: list[int], answer: list[int], **fields: Any) -> list[int]:
    """Offsets of an echoed prompt and the first tokens of its answer, which come in two calls."""
    told = CompletionLogprobs(server.state.model.text.vocabulary, echo=echo, **fields)
    count = len(prompt) - 1
    scores = PromptLogprobs(
        np.zeros(count, np.float32),
        np.ones(count, np.int32),
        np.zeros((count, 0), np.int32),
        np.zeros((count, 0), np.float32),
    )
    first = told.take([(answer[0], SCORED)], prompt=prompt, prompt_logprobs=scores)
    rest = told.take([(token, SCORED) for token in answer[1:]])
    return first["text_offset"] + rest["text_offset"]


@pytest.mark.parametrize(("prompt", "begins"), [("né🙂", 1), ("<|turn>né", 1), ("né", 0)])
def test_an_offset_is_the_place_of_a_token_in_the_text(server: Any, prompt: str, begins: int) -> None:
    """The tokenizer's own first token is in no text, a marker that the prompt spells is; bytes share a character."""
    encoder = server.state.model.text.encoder
    ids = encoder.encode(prompt, add_special_tokens=bool(begins), most_tokens=100)
    answer = encoder.encode("aé<turn|>b", add_special_tokens=False, most_tokens=100)
    offsets = _offsets(server, prompt, list(ids), list(answer))
    vocabulary = server.state.model.text.vocabulary
    text = prompt + "aéb"
    for token, offset in zip([*ids, *answer], offsets, strict=True):
        said = vocabulary.bytes_of(token).decode(errors="replace")
        if said.isascii() and said not in ("<bos>", "<turn|>"):
            assert text[offset:].startswith(said), (said, offset)
        elif not said.isascii():
            assert text[offset] in "é🙂", (said, offset)


def test_special_tokens_that_are_shown_take_their_place(server: Any) -> None:
    encoder = server.state.model.text.encoder
    answer = encoder.encode("a<turn|>b", add_special_tokens=False, most_tokens=100)
    assert _offsets(server, "", [303, 304], list(answer), skip_special_tokens=False)[2:] == [0, 1, 8]


def test_a_prompt_of_ids_has_the_offsets_of_its_text(server: Any) -> None:
    ids = server.state.model.text.encoder.encode("<bos>ab<|turn>c", add_special_tokens=False, most_tokens=100)
    assert _offsets(server, "abc", list(ids), [ids[1]]) == [0, 0, 1, 2, 2, 3]
