"""Thoughts of a trained model under a budget, with and without a schema behind them."""

from __future__ import annotations

import json

import pytest

THINK = {"messages": [{"role": "user", "content": "How much is 23 + 45?"}], "reasoning_effort": "high", "seed": 1}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}


@pytest.mark.parametrize("form", [{}, {"response_format": FORM}])
@pytest.mark.parametrize("name", ["thinking_token_budget", "thinking_budget"])
def test_a_thought_has_at_most_its_budget(model, form, name) -> None:
    (free,) = model.run(model.chat(**THINK, **form, max_tokens=200))
    assert free.reasoning_tokens > 5, "it thinks, or this tests nothing"
    for budget in (0, 3, 5):
        (bound,) = model.run(model.chat(**THINK, **form, max_tokens=200, **{name: budget}))
        assert bound.reasoning_tokens == budget
        assert bound.finish_reason == "stop"
        assert bound.content
        if form:
            assert json.loads(bound.content)["a"] in (1, 2)
    (ample,) = model.run(model.chat(**THINK, **form, max_tokens=200, **{name: 150}))
    (off,) = model.run(model.chat(**THINK, **form, max_tokens=200, **{name: -1}))
    assert ample.reasoning == off.reasoning == free.reasoning, "a budget that is not used changes nothing"
    assert ample.content == off.content == free.content
