"""An answer that repeats itself is counted, and ended where the request asks for that."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

LOOPING = {"max_pattern_size": 8, "min_count": 5}


def _post(server: Any, **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 100}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body | fields)


def _loops(server: Any, ended_by: str) -> float:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    (line,) = [each for each in lines if each.startswith("modelserve_looping_answers_total") and ended_by in each]
    return float(line.rsplit(" ", 1)[1])


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_is_ended_with_a_reason_and_its_pages_are_freed(server, stream) -> None:
    server.engine.reply = [300, 301, *[302, 303, 304] * 40]
    before = _loops(server, "repetition_detection")
    answer = _post(server, repetition_detection=LOOPING, stream=stream)
    assert answer.status_code == 200, answer.text
    assert '"stop_reason":"repetition_detected"' in answer.text.replace(": ", ":")
    assert '"finish_reason":"length"' in answer.text.replace(": ", ":")
    if not stream:
        assert answer.json()["usage"]["completion_tokens"] == 2 + 15
    assert len(server.engine.aborted) + len(server.engine.ended) > 0
    assert _loops(server, "repetition_detection") == before + 1


def test_without_it_a_loop_runs_to_its_length_and_is_counted(server) -> None:
    server.engine.reply = [300, 301, *[302, 303, 304] * 40]
    before = _loops(server, "length")
    answer = _post(server).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["stop_reason"] is None
    assert answer["usage"]["completion_tokens"] == 100
    assert _loops(server, "length") == before + 1
    server.engine.reply = [*range(300, 400)]
    _post(server)
    assert _loops(server, "length") == before + 1, "what is merely long is no loop"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_pattern_size": 4}, "min_count is 0"),
        ({"max_pattern_size": 4, "min_count": 1}, "min_count is 1"),
        (
            {"max_pattern_size": 4, "min_pattern_size": 5, "min_count": 2},
            "min_pattern_size 5 exceeds max_pattern_size 4",
        ),
        ({"max_pattern_size": 257, "min_count": 2}, "less than or equal to 256"),
        ({"min_count": 2}, "required"),
    ],
)
def test_what_makes_no_sense_is_refused(server, fields, words) -> None:
    answer = _post(server, repetition_detection=fields)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_a_size_of_nothing_is_off(server) -> None:
    server.engine.reply = [300] * 100
    assert _post(server, repetition_detection={"max_pattern_size": 0}).json()["usage"]["completion_tokens"] == 100
