"""Streams of known bytes at known times, and the times that are made of them."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from typing import Any

import pytest
from streaming_endpoint import DONE, Reply, StreamingEndpoint, completion_event, encoded, usage_event

from modelserve_tools.bench.answer import Answer, BadStream
from modelserve_tools.bench.endpoint import Endpoint, api_url, open_session
from modelserve_tools.bench.record import Record
from modelserve_tools.bench.workload import Ask


def _chat(**delta: Any) -> dict[str, Any]:
    finish = delta.pop("finish_reason", None)
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def _answer(*parts: tuple[float, bytes]) -> Answer:
    answer = Answer()
    for at, data in parts:
        answer.feed(data, at)
    answer.close()
    return answer


def test_events_are_timed_by_the_read_that_completed_them() -> None:
    first, last = encoded(completion_event()), encoded(completion_event(finish_reason="length"))
    answer = _answer(
        (1.0, first + first[:10]),
        (2.0, first[10:] + first + b": keep alive\n\n"),
        (3.0, last + encoded(usage_event(7, 4))),
        (4.0, DONE),
    )
    assert answer.times == [1.0, 2.0, 2.0, 3.0]
    assert (answer.prompt_tokens, answer.completion_tokens, answer.finish_reason) == (7, 4, "length")


def test_every_split_of_the_bytes_reads_the_same() -> None:
    stream = encoded(completion_event(" é"), completion_event(finish_reason="stop"), usage_event(3, 2)) + DONE
    stream = stream.replace(b"\n", b"\r\n")
    for cut in range(len(stream) + 1):
        answer = _answer((1.0, stream[:cut]), (2.0, stream[cut:]))
        assert (len(answer.times), answer.completion_tokens, answer.done) == (2, 2, True)


def test_a_token_may_have_no_text_and_an_end_may_have_no_token() -> None:
    nothing = encoded(completion_event(""))
    end = encoded(completion_event("", finish_reason="length"))
    assert _answer((1.0, nothing), (2.0, nothing), (3.0, end + encoded(usage_event(1, 3)))).times == [1.0, 2.0, 3.0]
    assert _answer((1.0, nothing), (2.0, nothing), (3.0, end + encoded(usage_event(1, 2)))).times == [1.0, 2.0]


def test_a_chat_begins_with_its_first_token_not_with_its_role() -> None:
    answer = _answer(
        (1.0, encoded(_chat(role="assistant", content=""))),
        (2.0, encoded(_chat(reasoning_content="hm"))),
        (3.0, encoded(_chat(content="well"))),
        (4.0, encoded(_chat(finish_reason="stop"), usage_event(5, 2))),
    )
    assert answer.times == [2.0, 3.0]


@pytest.mark.parametrize(
    ("data", "kind", "text"),
    [
        (b'data: {"error": {"message": "out of\\n pages"}}\n\n', "error in the stream", "out of pages"),
        (b"data: <html>\n\n", "no completion event", "the stream has '<html>'"),
        (b'data: {"choices": [{}]}\n\n', "no completion event", "the stream has '{\"choices\": [{}]}'"),
        (encoded(completion_event()), "ended early", "the stream ended after 1 events and no finish_reason"),
        (b"", "ended early", "the stream ended after 0 events and no finish_reason"),
    ],
)
def test_what_is_no_answer_is_named(data: bytes, kind: str, text: str) -> None:
    with pytest.raises(BadStream) as raised:
        _answer((1.0, data))
    assert (raised.value.kind, str(raised.value)) == (kind, text)


def test_times_of_a_record() -> None:
    record = Record(number=0, input_tokens=8, sent_s=5.0, end_s=3.0, output_tokens=5, event_s=[1.0, 1.5, 1.5, 2.5])
    assert (record.ttft_s, record.tpot_s, record.gaps_s) == (1.0, 1.5 / 4, [0.5, 0.0, 1.0])
    single = Record(number=0, input_tokens=8, sent_s=5.0, end_s=3.0, output_tokens=1, event_s=[1.0])
    assert (single.ttft_s, single.tpot_s, single.gaps_s) == (1.0, None, [])


async def test_a_scripted_schedule_is_measured_exactly() -> None:
    """The clock stands still between reads, and the server sends an event only when the one before it was read."""
    readings = [100.0, 100.9, 101.0, 101.3, 101.5, 101.75]  # sent, three tokens, usage, end
    read = asyncio.Event()

    def clock() -> float:
        read.set()
        return readings.pop(0)

    async def script(body: dict[str, Any], reply: Reply) -> None:
        await reply.head()
        parts = [encoded(completion_event()), encoded(completion_event())]
        parts += [encoded(completion_event(finish_reason="length")), encoded(usage_event(2, 3)) + DONE]
        for part in parts:
            await read.wait()
            read.clear()
            await reply.send(part)
        await read.wait()
        await reply.end()

    ask = Ask(number=4, input_tokens=2, output_tokens=3, exact=True, body=json.dumps({"prompt": [5, 6]}).encode())
    async with StreamingEndpoint(script).serving() as url, open_session(api_key=None, timeout_s=30) as session:
        record = await Endpoint(session, api_url(url), chat=False, clock=clock).send(ask, began=90.0, planned=9.5)
    assert readings == []
    assert record.error_kind is None
    assert (record.number, record.sent_s, record.late_s) == (4, 10.0, 0.5)
    assert record.end_s == pytest.approx(1.75)
    assert record.ttft_s == pytest.approx(0.9)
    assert record.gaps_s == pytest.approx([0.1, 0.3])
    assert record.tpot_s == pytest.approx(0.2)
    assert (record.prompt_tokens, record.output_tokens, record.wrong_length) == (2, 3, None)
    assert all(earlier <= later for earlier, later in pairwise(record.event_s))


@pytest.mark.parametrize(
    ("given", "api"),
    [
        ("http://h:8000", "http://h:8000/v1"),
        ("http://h:8000/", "http://h:8000/v1"),
        ("http://h:8000/v1", "http://h:8000/v1"),
        ("https://h/openai/v1/", "https://h/openai/v1"),
    ],
)
def test_the_address_of_the_api(given: str, api: str) -> None:
    assert api_url(given) == api
