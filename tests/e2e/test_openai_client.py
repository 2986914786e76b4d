"""The stock openai client against the Service: every kind of request, many at once, one client killed mid-stream."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from localcluster.deployment import CHECKPOINT, Deployed
from localcluster.kubectl import wait_for
from localcluster.service_access import service_url

NAMESPACE = "modelserve-e2e"
REQUESTS = 64
MESSAGES: Any = [{"role": "user", "content": "What is a page table?"}]


@pytest.fixture
def url(tiny: Deployed) -> Iterator[str]:
    with service_url(tiny.target, NAMESPACE, "tiny") as found:
        yield found


def _held(url: str) -> float:
    """KV bytes and requests of the worker, from /metrics: 0.0 when it holds nothing."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    values = {sample.name: sample.value for family in families for sample in family.samples}
    return (
        values["modelserve_kv_held_bytes"] + values["vllm:num_requests_running"] + values["vllm:num_requests_waiting"]
    )


def test_completions_and_chat_streamed_and_not(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=60)
    assert [model.id for model in client.models.list()] == [CHECKPOINT.name]
    exact: Any = {"model": CHECKPOINT.name, "max_tokens": 12, "temperature": 0}

    text = client.completions.create(prompt="page", **exact)
    assert text.usage is not None
    assert text.usage.completion_tokens <= 12
    parts = client.completions.create(prompt="page", stream=True, **exact)
    assert "".join(part.choices[0].text for part in parts if part.choices) == text.choices[0].text

    chat = client.chat.completions.create(messages=MESSAGES, **exact)
    assert chat.choices[0].finish_reason in {"stop", "length"}
    chunks = list(
        client.chat.completions.create(messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **exact)
    )
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == chat.choices[0].message.content
    assert chunks[-1].usage == chat.usage


def test_an_unsupported_field_is_named_in_a_400(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=60)
    with pytest.raises(openai.BadRequestError, match="best_of_all"):
        client.completions.create(model=CHECKPOINT.name, prompt="page", extra_body={"best_of_all": 3})


KILLED_CLIENT = """
import sys, openai
client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", timeout=60)
stream = client.completions.create(
    model=sys.argv[2], prompt="page", max_tokens=16000, stream=True, extra_body={"ignore_eos": True}
)
for part in stream:
    print("token", flush=True)
"""


async def _ask(client: openai.AsyncOpenAI, number: int, begun: asyncio.Event) -> int:
    """One request of the mix; the number of completion tokens it was given. The first part of a stream sets `begun`."""
    length = 8 + number % 17
    exact: Any = {"model": CHECKPOINT.name, "max_tokens": length, "seed": number, "extra_body": {"ignore_eos": True}}
    if number % 4 == 0:
        answer: Any = await client.completions.create(prompt=f"page {number}", **exact)
    elif number % 4 == 1:
        answer = await client.chat.completions.create(messages=MESSAGES, **exact)
    else:
        streamed: Any = {"stream": True, "stream_options": {"include_usage": True}} | exact
        stream: AsyncIterator[Any]
        if number % 4 == 2:
            stream = await client.completions.create(prompt=f"page {number}", **streamed)
        else:
            stream = await client.chat.completions.create(messages=MESSAGES, **streamed)
        parts = []
        async for part in stream:
            begun.set()
            parts.append(part)
        answer = parts[-1]
    assert answer.usage.completion_tokens == length
    return length


async def _ask_all(url: str, begun: asyncio.Event) -> list[int]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=300, max_retries=0) as client:
        return await asyncio.gather(*(_ask(client, number, begun) for number in range(REQUESTS)))


def test_many_at_once_finish_while_one_client_is_killed_and_all_pages_return(url: str) -> None:
    killed = subprocess.Popen(
        [sys.executable, "-c", KILLED_CLIENT, url, CHECKPOINT.name],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert killed.stdout is not None
        assert killed.stdout.readline() == "token\n"
        assert _held(url) > 0

        async def scene() -> list[int]:
            begun = asyncio.Event()
            others = asyncio.create_task(_ask_all(url, begun))
            await begun.wait()
            assert killed.poll() is None, "it was still streaming"
            killed.kill()
            return await others

        lengths = asyncio.run(scene())
    finally:
        killed.kill()
        killed.communicate()
    assert lengths == [8 + number % 17 for number in range(REQUESTS)]
    wait_for("all pages returned", lambda: _held(url) == 0)
