"""A stream whose head said 200 and that ended otherwise: metrics and the access log say how."""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx
import pytest

TEXT: dict[str, Any] = {"model": "tiny", "prompt": "abc", "stream": True, "ignore_eos": True, "max_tokens": 200}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "stream": True}
ROUTES = {
    "/v1/completions": TEXT,
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"model": "tiny", "input": "abc", "stream": True},
    "/v1/messages": {"model": "tiny", "messages": CHAT["messages"], "stream": True, "max_tokens": 99},
}


def _count(server: Any, route: str, status: int) -> float:
    labels = {"method": "POST", "handler": route, "status": str(status)}
    return server.metrics.registry.get_sample_value("http_requests_total", labels) or 0.0


@pytest.mark.parametrize("route", ROUTES)
def test_a_stream_that_fails_counts_as_its_error(server: Any, route: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "modelserve_worker.access")
    server.engine.fail_after = 2
    with httpx.stream("POST", server.url + route, json=ROUTES[route]) as answer:
        assert answer.status_code == 200
        assert "overheated" in "".join(answer.iter_lines())
    server.eventually(lambda: _count(server, route, 500) == 1)
    assert _count(server, route, 200) == 0
    assert f"POST {route} 500 " in caplog.records[-1].getMessage()
    server.engine.fail_after = None
    with httpx.stream("POST", server.url + route, json=ROUTES[route] | {"stream": True}) as answer:
        answer.read()
    server.eventually(lambda: _count(server, route, 200) == 1)


def test_a_stream_that_its_client_left_counts_as_such(server: Any) -> None:
    server.engine.step_seconds = 0.01
    with httpx.stream("POST", f"{server.url}/v1/completions", json=TEXT) as answer:
        next(answer.iter_lines())
    server.eventually(lambda: _count(server, "/v1/completions", 499) == 1)
    assert _count(server, "/v1/completions", 200) == 0


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_a_token_without_text_is_seen(server: Any, route: str) -> None:
    """Of parts of a character, and of special tokens: a client, and what times it, sees that the answer goes on."""
    server.engine.reply = [*server.state.model.text.encoder.encode("aé", add_special_tokens=False, most_tokens=9), 106]
    tokens = len(server.engine.reply) + 3
    body = ROUTES[route] | {"ignore_eos": True, "max_tokens": tokens}
    server.engine.step_seconds = 0.01
    with httpx.stream("POST", server.url + route, json=body) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
    told = [choice.get("text", choice.get("delta", {}).get("content")) for choice in choices]
    assert "".join(filter(None, told)) == "aé"
    assert len(choices) >= tokens


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_tokens_may_be_named_by_their_ids(server: Any, route: str) -> None:
    """As evaluators ask of vLLM, to tell tokens of one text apart."""
    field = {"logprobs": 2} if route == "/v1/completions" else {"logprobs": True, "top_logprobs": 2}
    body = {k: v for k, v in ROUTES[route].items() if k != "stream"} | field | {"max_tokens": 2}
    answer = httpx.post(server.url + route, json=body | {"return_tokens_as_token_ids": True}).json()
    logprobs = answer["choices"][0]["logprobs"]
    if route == "/v1/completions":
        names = [*logprobs["tokens"], *(name for top in logprobs["top_logprobs"] for name in top)]
    else:
        names = [name["token"] for entry in logprobs["content"] for name in (entry, *entry["top_logprobs"])]
    assert len(names) >= 4
    assert all(name.startswith("token_id:") and name.removeprefix("token_id:").isdigit() for name in names)
    plain = httpx.post(server.url + route, json=body | {"return_tokens_as_token_ids": False}).json()
    assert "token_id:" not in json.dumps(plain)
