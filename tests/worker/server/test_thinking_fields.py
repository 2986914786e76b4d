"""A budget of thoughts, by the names that clients send it under."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

USER = [{"role": "user", "content": "hi"}]


def _post(server: Any, route: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{route}", json=_body(fields))


def _body(fields: dict[str, Any]) -> dict[str, Any]:
    body = {"model": "tiny", "messages": USER, "max_tokens": 8} | fields
    return {name: value for name, value in body.items() if value is not None}


@pytest.mark.parametrize(
    ("route", "fields", "tokens"),
    [
        ("chat/completions", {"thinking_token_budget": 7}, 7),
        ("chat/completions", {"thinking_budget": 0}, 0),
        ("chat/completions", {"thinking_token_budget": -1}, None),
        ("chat/completions", {"reasoning_effort": "high"}, None),
        ("messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, 1024),
        ("messages", {"thinking": {"type": "enabled"}}, None),
        ("messages", {"thinking": {"type": "adaptive", "budget_tokens": 1024}}, None),
        ("messages", {"thinking": {"type": "disabled"}}, None),
    ],
)
def test_a_budget_reaches_the_engine_and_is_off_by_default(server, route, fields, tokens) -> None:
    answer = _post(server, route, **fields)
    assert answer.status_code == 200, answer.text
    budget = server.engine.requests[-1].thinking_budget
    assert (None if budget is None else budget.tokens) == tokens
    if budget is not None:
        assert (budget.opens, budget.closes[0], budget.begun) == (100, 101, False)


@pytest.mark.parametrize(
    ("route", "fields", "words"),
    [
        ("chat/completions", {"thinking_token_budget": -2}, "thinking_token_budget"),
        ("chat/completions", {"thinking_token_budget": 1, "thinking_budget": 1}, "are one thing; send one of them"),
        ("messages", {"thinking": {"type": "enabled", "budget_tokens": 0}}, "budget_tokens"),
        ("completions", {"prompt": "a", "messages": None, "thinking_token_budget": 1}, "thinking_token_budget"),
    ],
)
def test_what_makes_no_sense_is_refused(server, route, fields, words) -> None:
    answer = _post(server, route, **fields)
    assert answer.status_code == 400
    assert words in answer.text
