"""docs/fields.md: every field of the request bodies, from the models that read them.

`python tests/clients/field_table.py` writes the page; a test fails where it says something else, and where a field that
OpenAI, Anthropic or vLLM document (public_fields.py) is neither taken, ignored with a reason, nor refused with one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from public_fields import ANTHROPIC, CHAT, COMPLETIONS, RESPONSES, TRANSCRIPTIONS

from modelserve_worker.server.anthropic.request import CountTokensRequest, MessagesRequest
from modelserve_worker.server.bodies.field_policy import Ignored
from modelserve_worker.server.bodies.protocol import ChatCompletionRequest, CompletionRequest
from modelserve_worker.server.bodies.request_model import RequestModel
from modelserve_worker.server.errors.refused_fields import REFUSED_FIELDS
from modelserve_worker.server.responses.request import ResponsesRequest
from modelserve_worker.server.transcriptions.request import TranscriptionRequest, TranslationRequest

PAGE = Path(__file__).parents[2] / "docs" / "fields.md"
ROUTES: Mapping[str, tuple[type[RequestModel], frozenset[str]]] = {
    "/v1/completions": (CompletionRequest, COMPLETIONS),
    "/v1/chat/completions": (ChatCompletionRequest, CHAT),
    "/v1/responses": (ResponsesRequest, RESPONSES),
    "/v1/messages": (MessagesRequest, ANTHROPIC),
    "/v1/audio/transcriptions": (TranscriptionRequest, TRANSCRIPTIONS),
    "/v1/audio/translations": (TranslationRequest, TRANSCRIPTIONS),
}
_HEAD = """# Fields

Every field of a request body: those that are taken, those that are ignored and why, and those that are refused and what
to send instead. Made from the models that read the requests, and held to them by a test
(`python tests/clients/field_table.py` writes this page). Which fields there are, is what OpenAI, Anthropic and vLLM
document (`tests/clients/public_fields.py`); any other name is refused (400, `unsupported_field`). What is ignored asks
for nothing here, or not with the values that are listed. `null` always means that a field was left out.
"""


def taken(model: type[RequestModel]) -> dict[str, dict[str, Any]]:
    """JSON schemas of the model's own fields, by the names that clients send."""
    schema = model.model_json_schema()
    if "$ref" in schema:
        schema = schema["$defs"][schema["$ref"].rpartition("/")[2]]
    found: dict[str, list[dict[str, Any]]] = {}
    for kind in schema.get("oneOf", [schema]):  # of messages there are several
        for name, field in kind["properties"].items():
            found.setdefault(name, []).append(field)
    return {name: fields[0] if len(fields) == 1 else {"anyOf": fields} for name, fields in found.items()}


def undocumented(model: type[RequestModel], public: frozenset[str]) -> set[str]:
    """Public fields of which nobody says what becomes of them."""
    return public - taken(model).keys() - model.ignored.keys() - REFUSED_FIELDS.keys()


def inner_models(*models: type[RequestModel]) -> list[type[RequestModel]]:
    """Objects inside bodies, each once, in the order in which they are met."""
    found: list[type[RequestModel]] = []
    for model in models:
        for field in model.model_fields.values():
            for inner in _models(field.annotation):
                if inner not in found:
                    found += [each for each in (inner, *inner_models(inner)) if each not in found]
    return found


def _models(annotation: Any) -> Iterator[type[RequestModel]]:
    if isinstance(annotation, type) and issubclass(annotation, RequestModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def page() -> str:
    parts = [_HEAD]
    for route, (model, public) in ROUTES.items():
        parts.append(f"\n## {route}\n\n" + _table(_rows(model, public)))
    also = sorted(taken(CountTokensRequest).keys())
    parts.append(f"\n`/v1/messages/count_tokens` takes {', '.join(f'`{name}`' for name in also)} of these.\n")
    parts.append("\n## Objects inside them\n\n" + _table(_inner_rows(), first="object | field"))
    return "".join(parts)


def _table(rows: list[str], first: str = "field") -> str:
    head = f"| {first} | here | what it takes, or why not |"
    return "\n".join([head, "|---" * (head.count("|") - 1) + "|", *rows]) + "\n"


def _rows(model: type[RequestModel], public: frozenset[str]) -> list[str]:
    own, rows = taken(model), []
    for name, schema in own.items():
        if schema.get("type") == "null" or schema.get("const") is False:  # a name that its own check refuses
            rows.append(f"| `{name}` | refused | {REFUSED_FIELDS[name]} |")
        else:
            rows.append(f"| `{name}` | taken | {_takes(schema)} |")
    rows += [_ignored(name, ignored) for name, ignored in model.ignored.items() if name not in own]
    refused = sorted(public - own.keys() - model.ignored.keys())
    return rows + [f"| `{name}` | refused | {REFUSED_FIELDS[name]} |" for name in refused]


def _ignored(name: str, ignored: Ignored) -> str:
    if ignored.values is None:
        return f"| `{name}` | ignored | {ignored.reason} |"
    values = ", ".join(f"`{json.dumps(value)}`" for value in ignored.values)
    other = f"; else refused: {REFUSED_FIELDS[name]}" if name in REFUSED_FIELDS else "; refused with others"
    return f"| `{name}` | ignored if {values} | {ignored.reason}{other} |"


def _inner_rows() -> list[str]:
    rows = []
    for model in inner_models(*(model for model, _ in ROUTES.values())):
        own = taken(model)
        fields = [f"| `{name}` | taken | {_takes(schema)} |" for name, schema in own.items()]
        fields += [_ignored(name, ignored) for name, ignored in model.ignored.items() if name not in own]
        place = (
            f"{model.described_as}{model.__name__.lstrip('_')}" if model.described_as else model.__name__.lstrip("_")
        )
        rows += [f"| `{place}` {field}" for field in fields]
    return rows


def _takes(schema: Mapping[str, Any]) -> str:
    said = _kind(schema)
    return f"{said}: {schema['description']}" if "description" in schema and "properties" not in schema else said


def _kind(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return f"`{schema['$ref'].rpartition('/')[2].lstrip('_')}`"
    for name in ("anyOf", "oneOf"):
        if name in schema:
            kinds = [_kind(each) for each in schema[name] if each.get("type") != "null"]
            return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "any value")
    if kind == "array":
        return f"list of {_kind(schema.get('items', {}))}{_bounds(schema, 'minItems', 'maxItems')}"
    if kind == "string":
        pattern = f" `{schema['pattern']}`" if "pattern" in schema else ""
        return f"text{pattern}{_bounds(schema, 'minLength', 'maxLength')}"
    if kind == "object":
        return f"object{_bounds(schema, 'minProperties', 'maxProperties')}"
    return f"{kind}{_bounds(schema, 'minimum', 'maximum', above='exclusiveMinimum', below='exclusiveMaximum')}"


def _bounds(schema: Mapping[str, Any], least: str, most: str, above: str = "", below: str = "") -> str:
    said = [
        f"{word} {schema[name]}"
        for word, name in (("from", least), ("above", above), ("to", most), ("below", below))
        if name in schema
    ]
    return f" ({', '.join(said)})" if said else ""


if __name__ == "__main__":
    PAGE.write_text(page())
