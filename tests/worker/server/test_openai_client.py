"""The stock `openai` client gets what it expects: whole answers and streams, usage, choices, log probabilities."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest

HI = [{"role": "user", "content": "héllo 👩‍🚀"}]
ECHO = "user\nhéllo 👩‍🚀\nmodel\n"  # the byte tokens of the rendered prompt
PROMPT_TOKENS = len(ECHO.encode()) + 4  # <bos>, two openings and one end of turn


@pytest.fixture
def client(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(server: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.to_dict()["max_model_len"]) == ("tiny", "model", 512)
    assert client.models.retrieve("tiny").id == "tiny"


def test_a_chat_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=HI)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", ECHO, "stop")
    assert answer.object == "chat.completion"
    assert answer.usage is not None
    completion_tokens = len(ECHO.encode()) + 1  # and the end of turn
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (PROMPT_TOKENS, completion_tokens)
    assert answer.usage.total_tokens == PROMPT_TOKENS + completion_tokens


def test_a_chat_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=HI, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    *answer, last = chunks
    assert (answer[0].choices[0].delta.role, answer[0].choices[0].delta.content) == ("assistant", "")
    assert all(chunk.choices[0].delta.role is None for chunk in answer[1:])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in answer) == ECHO
    assert [chunk.choices[0].finish_reason for chunk in answer] == [None] * (len(answer) - 1) + ["stop"]
    assert all(chunk.usage is None for chunk in answer)
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (PROMPT_TOKENS, len(ECHO.encode()) + 1)
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_three_choices_differ_in_their_seed_only(server: Any, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=HI, n=3, seed=7, max_completion_tokens=5)
    assert [(c.index, c.message.content, c.finish_reason) for c in answer.choices] == [
        (index, "user\n", "length") for index in range(3)
    ]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (PROMPT_TOKENS, 15)
    assert sorted(request.sampling.seed for request in server.engine.requests) == [7, 8, 9]
    assert len({request.request_id for request in server.engine.requests}) == 3


def test_a_stream_of_three_choices(client: openai.OpenAI) -> None:
    texts, finished = ["", "", ""], []
    for chunk in client.chat.completions.create(model="tiny", messages=HI, n=3, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        if choice.finish_reason:
            finished.append(choice.index)
    assert texts == [ECHO] * 3
    assert sorted(finished) == [0, 1, 2]


def test_chat_log_probabilities(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=HI, logprobs=True, top_logprobs=2, max_tokens=7, temperature=0
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert [entry.token for entry in content] == ["u", "s", "e", "r", "\n", "h", "\ufffd"]
    assert content[6].bytes == [0xC3]
    assert all(math.isclose(entry.logprob, math.log(0.5)) and len(entry.top_logprobs) == 2 for entry in content)
    chunks = client.chat.completions.create(
        model="tiny", messages=HI, logprobs=True, max_tokens=7, temperature=0, stream=True
    )
    streamed = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content or []]
    assert [entry.bytes for entry in streamed] == [entry.bytes for entry in content]
    assert all(entry.top_logprobs == [] for entry in streamed)


def test_completions_of_every_kind_of_prompt(client: openai.OpenAI) -> None:
    def texts(prompt: Any, **options: Any) -> list[str]:
        return [choice.text for choice in client.completions.create(model="tiny", prompt=prompt, **options).choices]

    assert texts("hello") == ["hello"]
    assert texts(["one", "two"], n=2) == ["one", "one", "two", "two"]
    assert texts([238 + 65, 238 + 66]) == ["AB"]
    assert texts([[238 + 65], [238 + 66, 238 + 67]]) == ["A", "BC"]
    assert texts("hello", echo=True) == ["hellohello"]
    assert texts([238 + 65], echo=True) == ["AA"]
    assert texts("a long prompt of more tokens than sixteen") == ["a long prompt of"]


def test_completion_usage_counts_each_prompt_once(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=["one", "twos"], n=2, max_tokens=3)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4 + 5, 4 * 3)


def test_completion_log_probabilities(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="abc", logprobs=1, max_tokens=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert (logprobs.tokens, logprobs.text_offset) == (["a", "b", "c"], [0, 1, 2])
    assert logprobs.top_logprobs == [{letter: math.log(0.5)} for letter in "abc"]


def test_a_completion_stream(client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(
            model="tiny", prompt="abc", stream=True, echo=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "abcabc"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "stop"
    assert chunks[-1].usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (4, 4)


def test_stop_strings_cut_the_text_and_free_the_request(server: Any, client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="abcdefgh", stop=["zz", "def"])
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("abc", "stop")
    assert answer.choices[0].to_dict()["stop_reason"] == "def"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6
    assert len(server.engine.aborted) == 1
    kept = client.completions.create(
        model="tiny", prompt="abcdefgh", stop="def", extra_body={"include_stop_str_in_output": True}
    )
    assert kept.choices[0].text == "abcdef"
    streamed = client.completions.create(model="tiny", prompt="abcdefgh", stop="def", stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == "abc"


def test_sampling_fields_reach_the_engine(server: Any, client: openai.OpenAI) -> None:
    client.completions.create(
        model="tiny", prompt="a", seed=-1, temperature=0.5, top_p=0.7, presence_penalty=1, frequency_penalty=-1,
        logit_bias={"300": -100}, max_tokens=4, user="me",
        extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 2, "ignore_eos": True,
                    "stop_token_ids": [400], "skip_special_tokens": False},
    )  # fmt: skip
    sampling = server.engine.requests[0].sampling
    assert (sampling.seed, sampling.temperature, sampling.top_p, sampling.top_k) == (2**63 - 1, 0.5, 0.7, 5)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1.0, -1.0, 1.2)
    assert (sampling.min_p, sampling.min_tokens, sampling.max_tokens, sampling.ignore_eos) == (0.1, 2, 4, True)
    assert (sampling.logit_bias, sampling.stop_token_ids) == (((300, -100.0),), (400,))


async def test_concurrent_streams_do_not_mix(server: Any, async_client: openai.AsyncOpenAI) -> None:
    server.engine.step_seconds = 0.001

    async def ask(number: int) -> str:
        stream = await async_client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": f"number {number}"}], stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    answers = await asyncio.gather(*(ask(number) for number in range(64)))
    assert answers == [f"user\nnumber {number}\nmodel\n" for number in range(64)]
    await asyncio.to_thread(server.eventually, lambda: server.state.open_requests == 0, seconds=10)
    assert server.engine.aborted == []
