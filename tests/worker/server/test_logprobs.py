"""Log probabilities in answers: of tokens that share a text, where in the text each token stands, and that an answer
which is full of them holds nobody up."""

from __future__ import annotations

import json
import math
import threading
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelserve.sizing.host.front_end import HELD_BYTES_PER_LOGPROB
from modelserve_worker.request import PromptLogprobs, TokenLogprobs
from modelserve_worker.server import json_text
from modelserve_worker.server.answers import chat, completions
from modelserve_worker.server.answers.logprobs import CompletionLogprobs, prompt_logprobs_list
from modelserve_worker.server.json_text import to_json, to_json_in_pieces
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


_TEXT = st.text('aé🙂"')
_LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _TEXT


@given(st.recursive(_LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text('ab"'), inner)))
def test_a_document_in_pieces_is_the_document(document: Any) -> None:
    assert to_json_in_pieces(document) == to_json(document)


@pytest.mark.parametrize("count", [0, 1, 64, 65, 2000])
def test_long_lists_and_iterators_in_pieces_are_whole(count: int) -> None:
    rows = [{"a": [number, None]} for number in range(count)]
    assert json.loads(to_json_in_pieces({"rows": rows, "made": iter(rows)})) == {"rows": rows, "made": rows}


def test_the_scores_of_a_long_prompt_are_made_and_encoded_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is held while a piece is encoded: everybody else's tokens and /health wait for its end."""
    count, top = 20_000, 20
    shape = (count, top)
    scores = PromptLogprobs(
        np.zeros(count, np.float32), np.ones(count, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    )
    prompt = [0] * (count + 1)
    listed = prompt_logprobs_list(prompt, scores, VOCABULARY, alternatives=top)
    told = CompletionLogprobs(VOCABULARY, echo="").take([], prompt=prompt, prompt_logprobs=scores, alternatives=top)
    pieces: list[int] = []
    encode = json_text.to_json

    def measured(value: Any) -> bytes:
        pieces.append(len(text := encode(value)))
        return text

    monkeypatch.setattr(json_text, "to_json", measured)
    document = json.loads(to_json_in_pieces({"choices": [{"prompt_logprobs": listed, "logprobs": told}]}))
    (choice,) = document["choices"]
    assert len(choice["prompt_logprobs"]) == len(choice["logprobs"]["tokens"]) == count + 1
    assert max(pieces) < 200_000


@pytest.mark.parametrize(
    ("route", "fields", "module"),
    [
        ("completions", {"prompt": "hi", "logprobs": 2}, completions),
        ("completions", {"prompt": "hi", "prompt_logprobs": 2}, completions),
        ("chat/completions", {"messages": [{"role": "user", "content": "hi"}], "logprobs": True}, chat),
        ("chat/completions", {"messages": [{"role": "user", "content": "hi"}], "prompt_logprobs": 0}, chat),
    ],
)
def test_an_answer_with_log_probabilities_is_encoded_off_the_loop(
    server: Any, monkeypatch: pytest.MonkeyPatch, route: str, fields: dict[str, Any], module: Any
) -> None:
    threads: list[str] = []

    def encode(document: Any) -> bytes:
        threads.append(threading.current_thread().name)
        return to_json_in_pieces(document)

    monkeypatch.setattr(module, "to_json_in_pieces", encode)
    answer = httpx.post(f"{server.url}/v1/{route}", json={"model": "tiny", "max_tokens": 2} | fields)
    assert answer.json()["usage"]["completion_tokens"] == 2
    assert [name.startswith("asyncio_") for name in threads] == [True]


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 3}


def test_scores_that_are_kept_for_a_whole_answer_are_bounded_for_all_clients_together(server: Any) -> None:
    """They are counted as they come, so a request that ends early is not refused for what it might have asked."""
    bodies = server.app.state.bodies.open_bodies
    bodies.limit_bytes = 200 * 4 * HELD_BYTES_PER_LOGPROB
    url, ids = f"{server.url}/v1/chat/completions", {"ignore_eos": True}
    short = httpx.post(url, json=CHAT | {"max_tokens": 400})  # it says "hi" and ends
    assert len(short.json()["choices"][0]["logprobs"]["content"]) < 100
    server.engine.step_seconds = 0.001
    with httpx.stream("POST", url, json=CHAT | ids | {"max_tokens": 300, "stream": True}) as bystander:
        lines = bystander.iter_lines()
        next(lines)
        refused = httpx.post(url, json=CHAT | ids | {"max_tokens": 300, "n": 2}, timeout=30)
        said = [line for line in lines if line.startswith("data: {")]
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "server_busy"
    assert f"the limit is {bodies.limit_bytes}" in refused.json()["error"]["message"]
    assert len(server.engine.aborted) == 2, "its sequences, and nobody else's"
    scored = [json.loads(line[6:])["choices"][0]["logprobs"] for line in said if '"content":[' in line]
    assert sum(len(each["content"]) for each in scored) >= 298, "a stream gives its scores away as they come"
    server.eventually(lambda: bodies.held_bytes == 0, seconds=10)
    assert httpx.post(url, json=CHAT | {"max_tokens": 2}).status_code == 200
