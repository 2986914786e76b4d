"""Schemathesis from /openapi.json: requests that the document allows, EXAMPLES of them for each operation.

Writes a line of JSON for each operation: how many there were by status, and what was wrong with an answer.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import schemathesis
from features import HOST
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)


def _calls(request: dict[str, Any]) -> list[Any]:
    """Ids of the calls that any message or item of the request has made."""
    messages = [each for name in ("messages", "input") for each in _objects(request.get(name))]
    blocks = [block for message in messages for block in _objects(message.get("content"))]
    calls = [call for message in messages for call in _objects(message.get("tool_calls"))]
    ids = [call.get("call_id", call.get("id")) for call in [*messages, *blocks, *calls]]
    return [each for each in ids if each]


def _objects(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


@schemathesis.hook
def filter_body(context: Any, body: Any) -> bool:
    """JSON Schema cannot say that a result answers a call of the same request; without one it is refused."""
    if not isinstance(body, dict):
        return True
    calls = _calls(body)
    messages = [each for name in ("messages", "input") for each in _objects(body.get(name))]
    blocks = [block for message in messages for block in _objects(message.get("content"))]
    results = [each for each in [*messages, *blocks] if "tool_call_id" in each or "tool_use_id" in each]
    results += [each for each in messages if each.get("type") == "function_call_output"]
    answered = [each.get("tool_call_id") or each.get("tool_use_id") or each.get("call_id") for each in results]
    return all(each in calls for each in answered)


CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]
EXAMPLES = int(sys.argv[1])
EXAMPLES_WITHOUT_BODY = 2


def _try(operation: Any) -> dict[str, Any]:
    statuses: Counter[int] = Counter()
    refusals: Counter[str] = Counter()
    faults: list[str] = []
    examples = EXAMPLES if operation.body else EXAMPLES_WITHOUT_BODY

    @given(operation.as_strategy(generation_mode=GenerationMode.POSITIVE))
    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def attempt(case: Any) -> None:
        response = case.call(base_url=HOST)
        statuses[response.status_code] += 1
        if response.status_code >= 400:
            refusals[response.text[:300]] += 1
        try:
            case.validate_response(response, checks=CHECKS)
        except (Exception, FailureGroup) as error:
            faults.append(f"{type(error).__name__}: {error}"[:2000])

    attempt()
    return {
        "operation": operation.label,
        "statuses": {str(status): count for status, count in statuses.items()},
        "refusals": refusals.most_common(8),
        "faults": faults[:3],
    }


schema = schemathesis.openapi.from_url(f"{HOST}/openapi.json")
for found in schema.get_all_operations():
    print(json.dumps(_try(found.ok())), flush=True)
