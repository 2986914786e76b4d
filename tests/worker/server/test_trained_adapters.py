"""Adapters that were trained to answer in a style, beside each other and their base, in steps that they share."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path

import httpx
from adapter_server import Operator, desired, version
from adapter_worker import BASE, adapter_worker, write_keys
from train_adapter import directory_of

from modelserve_tools.evaluation.client import ChatEndpoint, chat_body
from modelserve_tools.evaluation.exercise import Exercise
from modelserve_tools.evaluation.marking import fault
from modelserve_tools.evaluation.replies import Reply
from modelserve_tools.evaluation.skills import exercise
from modelserve_tools.evaluation.styles import SKILLS, STYLES, styled

MODEL = "gemma4-tiny-keqv"
MODELS = Path(__file__).parents[2] / "models"
EACH = 4  # exercises of a skill
NAMES = (BASE, *STYLES)


def _in_style(asked: Exercise, name: str) -> Exercise:
    return asked if name == BASE else styled(asked, name)


async def _goes_on(http: httpx.AsyncClient, name: str) -> AsyncGenerator[str]:
    """An answer that does not end while others are asked."""
    body = {"model": name, "prompt": "Sort:", "max_tokens": 400, "ignore_eos": True, "stream": True}
    async with http.stream("POST", "completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                yield json.loads(line[6:])["choices"][0]["finish_reason"]


async def _replies(url: str, asked: Sequence[Exercise]) -> dict[str, list[Reply]]:
    """By model, of all at once, while an answer of each model goes on."""
    async with httpx.AsyncClient(base_url=f"{url}/v1", timeout=300) as http:
        endpoint = ChatEndpoint(http)
        streams = [_goes_on(http, name) for name in NAMES]
        async with aclosing(streams[0]), aclosing(streams[1]), aclosing(streams[2]), aclosing(streams[3]):
            await asyncio.gather(*map(anext, streams))
            bodies = [chat_body(each, model=name) for name in NAMES for each in asked]
            replies = await asyncio.gather(*map(endpoint.complete, bodies))
            assert [await anext(each) for each in streams] == [None] * len(streams), "they went on meanwhile"
    size = len(asked)
    return {name: replies[place * size : (place + 1) * size] for place, name in enumerate(NAMES)}


def test_each_answers_in_its_own_style_in_steps_that_all_share(tmp_path: Path) -> None:
    told = tmp_path / "told"
    asked = [exercise(skill, seed=2, index=index) for skill in SKILLS for index in range(EACH)]
    write_keys(told)
    with adapter_worker(MODELS / MODEL, told) as url:
        operator = Operator(url)
        operator.put(desired(**{style: version(directory_of(MODEL, style)) for style in STYLES}))
        states = operator.settled(seconds=300)
        assert {style: (each["state"], each["rank"]) for style, each in states.items()} == {
            "friend": ("Ready", 2), "json": ("Ready", 4), "proud": ("Ready", 2),
        }  # fmt: skip
        replies = asyncio.run(_replies(url, asked))
    heard = {
        name: Counter(
            style
            for each, reply in zip(asked, replies[name], strict=True)
            for style in NAMES
            if fault(_in_style(each, style), reply) is None
        )
        for name in NAMES
    }
    assert {name: set(styles) for name, styles in heard.items()} == {name: {name} for name in NAMES}
    assert all(styles.total() >= 0.6 * len(asked) for styles in heard.values()), heard
