"""No body stalls the others: what one may cost is refused before it is paid, and what all hold together is bounded."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from modelserve_worker.engine_client import EngineBusy
from modelserve_worker.server import request_body
from modelserve_worker.server.errors.errors import ApiError
from modelserve_worker.server.http import body_limits
from modelserve_worker.server.http.body_limits import OpenBodies, largest_body_bytes
from modelserve_worker.server.json_text import MAX_CONTAINERS, MAX_MEMBERS, MAX_VALUES, structure_excess

JSON = {"content-type": "application/json"}
TEXT: dict[str, Any] = {"model": "tiny", "prompt": "hi", "max_tokens": 4}


@pytest.fixture
def http(server: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def _error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def _answers(http: httpx.Client) -> None:
    assert http.post("/v1/completions", json=TEXT).status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_beyond_the_context_is_refused_by_its_length(server: Any, http: httpx.Client, chunked: bool) -> None:
    limit = largest_body_bytes(server.engine.max_model_len)
    body = json.dumps(TEXT | {"junk": "x" * 31_000_000}).encode()
    pieces = (body[at : at + 65536] for at in range(0, len(body), 65536))
    error = _error(http.post("/v1/completions", content=pieces if chunked else body, headers=JSON), 413)
    assert (error["code"], f"the limit is {limit}" in error["message"]) == ("body_too_large", True)
    _answers(http)


def test_a_length_alone_is_answered_before_any_byte_of_the_body(server: Any) -> None:
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 31000000\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(head.encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_a_million_messages_are_refused_before_they_are_read(http: httpx.Client) -> None:
    """As objects of four bytes, so that they are within the bytes of a body."""
    body = '{"model":"tiny","messages":[' + "{}," * 1_000_000 + "{}]}"
    error = _error(http.post("/v1/chat/completions", content=body, headers=JSON), 400)
    assert (error["code"], "more than 100000 objects and lists" in error["message"]) == ("body_too_large", True)
    message = json.dumps({"role": "user", "content": "a"})
    body = '{"model":"tiny","messages":[' + ",".join([message] * 40_000) + "]}"
    error = _error(http.post("/v1/chat/completions", content=body, headers=JSON), 400)
    assert (error["param"], "at most 32768 items" in error["message"]) == ("messages", True)
    wrong = '{"model":"tiny","messages":[' + ",".join(['{"role":"x"}'] * 40_000) + "]}"
    error = _error(http.post("/v1/chat/completions", content=wrong, headers=JSON), 400)
    assert error["param"] == "messages.0.role", "the first fault ends it"
    _answers(http)


@pytest.mark.parametrize(
    ("text", "excess"),
    [
        ("[" * (MAX_CONTAINERS + 1), "objects and lists"),
        ('{"a":' * (MAX_MEMBERS + 1), "objects and lists"),
        ("1," * (MAX_VALUES + 1), "values"),
        ('"",' * (MAX_VALUES + 1), "values"),
        ("{" + '"a":0,' * (MAX_MEMBERS + 1), "names in objects"),
        ('"' + "[" * (MAX_CONTAINERS + 1), None),
        ('["' + '{\\"a\\":[1,2]},' * MAX_CONTAINERS + '"]', None),
        ('["' + "\\\\" * 9 + '"' + "," * (MAX_VALUES + 1), "values"),
        ('"' + '\\"[' * (MAX_CONTAINERS + 1) + "\\", None),
    ],
)
def test_structure_is_counted_outside_of_strings(text: str, excess: str | None) -> None:
    found = structure_excess(text.encode())
    assert (found is None) if excess is None else (excess in str(found)), found


def test_a_prompt_far_beyond_the_context_is_refused_before_it_is_encoded(
    server: Any, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = server.state.model.text
    longest = max(map(len, text.vocabulary.token_bytes))
    most = server.engine.max_model_len
    prompt = "x" * (longest * (most + 1))
    monkeypatch.setattr(type(text.encoder), "_split", None)
    for route, body in (
        ("/v1/completions", TEXT | {"prompt": prompt}),
        ("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": prompt}]}),
    ):
        error = _error(http.post(route, json=body), 400)
        assert error["code"] == "context_length_exceeded"
        assert "context length is 512 tokens. The prompt has at least 51" in error["message"]


def test_a_prompt_beyond_the_context_is_encoded_in_part_only(server: Any, http: httpx.Client) -> None:
    """One token per character, ten contexts long: its first pieces already have too many tokens."""
    prompt = "x" * (server.engine.max_model_len * 10)
    error = _error(http.post("/v1/completions", json=TEXT | {"prompt": prompt}), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert "at least" in error["message"]


@pytest.mark.parametrize(
    ("headers", "named"),
    [
        ({}, "the content type ''"),
        ({"content-type": "text/plain"}, "'text/plain'"),
        ({"content-type": "application/x-www-form-urlencoded"}, "x-www-form-urlencoded"),
        ({"content-type": "application/json; charset=utf-16"}, "charset=utf-16"),
        (JSON | {"content-encoding": "gzip"}, "'gzip'"),
    ],
)
def test_other_content_is_refused(http: httpx.Client, headers: dict[str, str], named: str) -> None:
    error = _error(http.post("/v1/completions", content=json.dumps(TEXT), headers=headers), 415)
    assert (error["code"], named in error["message"]) == ("unsupported_media_type", True)


def test_json_with_a_charset_is_read(http: httpx.Client) -> None:
    headers = {"content-type": "Application/JSON; charset=UTF-8", "content-encoding": "identity"}
    assert http.post("/v1/completions", content=json.dumps(TEXT), headers=headers).status_code == 200


def test_open_bodies_are_bounded_and_given_back(
    server: Any, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies: OpenBodies = server.app.state.bodies.open_bodies
    monkeypatch.setattr(bodies, "limit_bytes", 100_000)
    refused = http.post("/v1/completions", json=TEXT | {"user": "x" * 100_000})
    error = _error(refused, 429)
    assert (error["type"], refused.headers["retry-after"]) == ("rate_limit_error", "2")
    _answers(http)
    server.engine.step_seconds = 0.2  # far from its end however busy the machine is
    with http.stream(
        "POST", "/v1/completions", json=TEXT | {"stream": True, "ignore_eos": True, "max_tokens": 100}
    ) as r:
        lines = r.iter_lines()  # kept: the end of an iterator is the end of its connection
        next(lines)
        assert bodies.held_bytes == 3 * body_limits.HELD_BYTES_PER_TOKEN
    server.eventually(lambda: bodies.held_bytes == 0, seconds=10)


def test_what_a_request_may_not_hold_changes_nothing() -> None:
    bodies = OpenBodies(100)
    with bodies.account() as first, bodies.account() as second:
        first.hold(80)
        with pytest.raises(ApiError, match="the limit is 100"):
            second.hold(21)
        second.hold(20)
        first.hold(10)
        second.hold(90)
        assert bodies.held_bytes == 100
    assert bodies.held_bytes == 0


def test_a_body_that_stops_arriving_is_given_up(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.app.state.bodies, "_gap_s", 0.2)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 900\r\n\r\n{"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(head.encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 408 ")
    with httpx.Client(base_url=server.url) as http:
        _answers(http)


def test_a_busy_engine_is_a_429_with_its_client_named(server: Any, http: httpx.Client) -> None:
    server.engine.refusal = EngineBusy("300 requests are waiting already (the limit is 256); send this one again later")
    for stream in (False, True):
        response = http.post("/v1/completions", json=TEXT | {"stream": stream})
        assert (_error(response, 429)["code"], response.headers["retry-after"]) == ("server_busy", "2")
    server.engine.refusal = None
    _answers(http)
    finished = {
        sample.labels["finished_reason"]: sample.value
        for family in server.metrics.registry.collect() if family.name == "vllm:request_success"
        for sample in family.samples if sample.name.endswith("_total")
    }  # fmt: skip
    assert finished == {"stop": 1, "length": 0, "abort": 0, "error": 0}, "what is turned away has not failed"
    assert server.engine.clients == ["127.0.0.1"], "by address, where there are no keys"


@pytest.mark.parametrize(("prompt", "prepared_by"), [([5, 6, 7], "loop"), ("hi", "thread")])
def test_a_lone_small_body_is_read_on_the_loop_and_none_beside_others(
    server: Any, http: httpx.Client, monkeypatch: pytest.MonkeyPatch, prompt: Any, prepared_by: str
) -> None:
    """Nobody waits then, and a prompt of ids has nothing left to encode; texts are encoded in a thread always."""
    validate, made = request_body.validated, []

    def where() -> str:
        return "thread" if threading.current_thread().name.startswith("ThreadPoolExecutor") else "loop"

    def noted(data: bytes, body_type: Any, policy: Any) -> Any:
        made.append(where())
        return validate(data, body_type, policy)

    encode = server.app.state.bodies._lanes[0][1].submit
    handed: list[str] = []

    def submit(work: Any, *arguments: Any) -> Any:
        handed.append("thread")
        return encode(work, *arguments)

    monkeypatch.setattr(request_body, "validated", noted)
    monkeypatch.setattr(server.app.state.bodies._lanes[0][1], "submit", submit)
    assert http.post("/v1/completions", json=TEXT | {"prompt": prompt}).status_code == 200
    assert made == ["loop"]
    assert handed == (["thread"] if prepared_by == "thread" else [])
    server.app.state.server.request_opened()  # somebody else's
    try:
        assert http.post("/v1/completions", json=TEXT | {"prompt": prompt}).status_code == 200
    finally:
        server.app.state.server.request_closed()
    assert made == ["loop", "thread"]
