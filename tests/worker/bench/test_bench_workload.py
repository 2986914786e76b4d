"""Prompts, bodies and arrivals are what their seed says; loops keep to their concurrency."""

from __future__ import annotations

import asyncio
import json
import random
from statistics import fmean, median
from typing import Any

import pytest

from modelserve_tools.bench.driver import Load, run_load
from modelserve_tools.bench.prompts import LOG_UNIFORM, UNIFORM, Lengths, PromptSource
from modelserve_tools.bench.record import Record
from modelserve_tools.bench.workload import Ask, AskOptions, arrivals, asks
from modelserve_tools.evaluation.publishing import BadInput

OPTIONS = AskOptions(
    model="m", chat=False, output_tokens=9, temperature=0.0, ignore_eos=True, min_tokens=False
)  # fmt: skip


def _source(seed: int = 0, *, tokens: int = 64, ids: range | None = range(10, 50), shared: int = 0) -> PromptSource:
    return PromptSource(seed, Lengths(tokens, tokens), ids, shared)


def _contents(source: PromptSource, count: int = 8) -> list[list[int] | str]:
    return [source.prompt(number).content for number in range(count)]


def test_prompts_follow_their_seed_and_differ() -> None:
    first = _contents(_source())
    assert first == _contents(_source())
    assert all(a != b for a, b in zip(first, _contents(_source(seed=1)), strict=True))
    assert len({tuple(ids) for ids in first}) == 8
    assert {len(ids) for ids in first} == {64}
    assert {token for ids in first for token in ids} == set(range(10, 50))
    assert len({ids[0] for ids in first}) > 1  # nothing is shared unasked


def test_short_prompts_differ_until_none_is_left() -> None:
    source = _source(tokens=1, ids=range(5, 8))
    assert sorted(ids[0] for ids in _contents(source, 3)) == [5, 6, 7]
    with pytest.raises(BadInput, match=r"prompts of 1 to 1 tokens, 0 of them shared: after 3 prompts no new one"):
        source.prompt(3)


def test_a_shared_prefix_is_shared_and_no_more() -> None:
    prompts = _contents(_source(shared=40))
    assert len({tuple(ids[:40]) for ids in prompts}) == 1
    assert len({tuple(ids[40:]) for ids in prompts}) == 8
    assert {len(ids) for ids in prompts} == {64}


def test_text_prompts_are_words() -> None:
    texts = _contents(_source(ids=None, shared=3))
    assert texts == _contents(_source(ids=None, shared=3))
    assert {len(text.split()) for text in texts} == {64}
    assert len({tuple(text.split()[:3]) for text in texts}) == 1
    assert len(set(texts)) == 8


def test_drawn_lengths_stay_in_range_and_have_the_medians_of_their_distributions() -> None:
    rng = random.Random(3)
    for distribution, middle in ((UNIFORM, 5050), (LOG_UNIFORM, 1000)):
        drawn = [Lengths(100, 10_000, distribution).draw(rng) for _ in range(4000)]
        assert min(drawn) >= 100
        assert max(drawn) <= 10_000
        assert median(drawn) == pytest.approx(middle, rel=0.15)
    assert {Lengths(2, 3, LOG_UNIFORM).draw(rng) for _ in range(100)} == {2, 3}


def test_bodies() -> None:
    (ask,) = asks(_source(), OPTIONS, first=5, count=1)
    body = json.loads(ask.body)
    assert body.pop("prompt") == _source().prompt(5).content
    assert body == {
        "model": "m", "max_tokens": 9, "temperature": 0.0, "stream": True, "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }  # fmt: skip
    assert (ask.number, ask.input_tokens, ask.output_tokens, ask.exact) == (5, 64, 9, True)
    options = AskOptions(
        model="m", chat=True, output_tokens=9, temperature=0.5, ignore_eos=False, min_tokens=True
    )  # fmt: skip
    chat = json.loads(asks(_source(ids=None), options, first=0, count=1)[0].body)
    assert chat["messages"] == [{"role": "user", "content": _source(ids=None).prompt(0).content}]
    assert (chat["min_tokens"], "ignore_eos" in chat, "prompt" in chat) == (9, False, False)


def test_arrivals_are_seeded_and_have_their_rate() -> None:
    def times(rate: float, seed: int) -> list[float]:
        source = arrivals(rate, seed=seed)
        return [next(source) for _ in range(4001)]

    assert times(5.0, 1) == times(5.0, 1)
    assert times(5.0, 1) != times(5.0, 2)
    assert times(5.0, 1)[0] == 0.0
    gaps = [b - a for a, b in zip(times(5.0, 1), times(5.0, 1)[1:], strict=False)]
    assert min(gaps) > 0
    assert fmean(gaps) == pytest.approx(0.2, rel=0.1)
    assert sum(gap > 0.2 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.04)  # exponential: 1 / e


class _Server:
    """Answers when `together` requests are there, or all that are left: it waits for as many as the loop allows."""

    def __init__(self, together: int, total: int) -> None:
        self._together, self._left = together, total
        self._waiting: list[asyncio.Event] = []
        self.most = 0
        self.planned: list[float | None] = []

    async def send(self, ask: Ask, *, began: float, planned: float | None = None) -> Record:
        self.planned.append(planned)
        mine = asyncio.Event()
        self._waiting.append(mine)
        self.most = max(self.most, len(self._waiting))
        if len(self._waiting) == min(self._together, self._left):
            for _ in range(20):  # were there room for one more, it would come now
                await asyncio.sleep(0)
                self.most = max(self.most, len(self._waiting))
            released, self._waiting = self._waiting, []
            self._left -= len(released)
            for each in released:
                each.set()
        await mine.wait()
        return Record(number=ask.number, input_tokens=1, sent_s=0.0, end_s=0.0)


def _asks(count: int) -> list[Ask]:
    return [Ask(number=i, input_tokens=1, output_tokens=1, exact=True, body=b"") for i in range(count)]


async def _run(load: Load, server: _Server, **options: Any) -> int:
    done: list[None] = []
    given = {"warmup": (), "arrivals": ()} | options
    await run_load(load, server.send, _asks(load.requests), on_done=lambda: done.append(None), **given)
    return len(done)


@pytest.mark.parametrize("concurrency", [1, 3, 8])
async def test_a_closed_loop_reaches_its_concurrency_and_never_more(concurrency: int) -> None:
    load, server = Load(concurrency, None, 8), _Server(concurrency, 8)
    assert await _run(load, server) == 8
    assert server.most == concurrency
    assert sorted(record.number for record in load.records) == list(range(8))
    assert set(server.planned) == {None}


async def test_an_open_loop_waits_for_nobody() -> None:
    """The server answers none before all have come, which a closed loop would never reach."""
    load, server = Load(None, 5000.0, 20), _Server(20, 20)
    planned = [i / 5000 for i in range(20)]
    assert await _run(load, server, arrivals=iter([*planned, 99.0])) == 20
    assert server.planned == planned
    assert server.most == 20


async def test_the_warm_up_is_kept_apart() -> None:
    load, server = Load(2, None, 4), _Server(1, 7)
    assert await _run(load, server, warmup=_asks(3)) == 7
    assert (len(load.warmup), len(load.records)) == (3, 4)
