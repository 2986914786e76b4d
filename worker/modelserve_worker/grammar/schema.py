"""JSON schemas as clients send them: bounded before anything is built from them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from modelserve.errors import InvalidInput
from modelserve_worker.grammar.endless_schema import endless_circle
from modelserve_worker.grammar.idle_keywords import without_idle_keywords
from modelserve_worker.grammar.limits import DOCUMENT_PART
from modelserve_worker.grammar.unique_keys import free_names, unrepeatable_names

MAX_SCHEMA_CHARACTERS = 64 * 1024
MAX_SCHEMA_DEPTH = 64  # objects and lists inside each other, of the document
MAX_SCHEMA_OBJECTS = 2_048  # JSON objects in the document, so at most as many properties
_WHITE_SPACE = r"( |\n[ \t]{0,40})"  # between the parts of a document: one blank, or a new line with its indentation
_OPTIONS = {
    "whitespace_pattern": _WHITE_SPACE,  # unbounded, a model that is unsure writes blanks until its last token
    "lenient": False,
    "coerce_one_of": False,
}


def bounded_schema(schema: Any, *, field: str) -> dict[str, Any] | bool:
    """The schema less keywords that ask for nothing. Raises InvalidInput for what is no schema, is larger than the
    limits, or has no finite document.
    """
    if schema is False:
        raise InvalidInput(f"{field} is false, which no document matches; send a schema, or true", field=field)
    if not isinstance(schema, dict | bool):
        raise InvalidInput(f"{field} must be a JSON schema (an object, or true), not {schema!r:.80}", field=field)
    objects = 0
    for depth, level in enumerate(_levels(schema), start=1):
        objects += sum(isinstance(each, dict) for each in level)
        if depth > MAX_SCHEMA_DEPTH:
            raise InvalidInput(
                f"{field}: objects and lists are nested more than {MAX_SCHEMA_DEPTH} deep; flatten the schema, or use "
                "$defs and $ref",
                field=field,
            )
    if objects > MAX_SCHEMA_OBJECTS:
        raise InvalidInput(f"{field}: the schema has {objects} objects; the limit is {MAX_SCHEMA_OBJECTS}", field=field)
    text = json.dumps(schema, ensure_ascii=False)
    length = len(text)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"{field} holds half of a surrogate pair; send valid Unicode", field=field) from error
    if length > MAX_SCHEMA_CHARACTERS:
        raise InvalidInput(
            f"{field}: the schema has {length} characters of JSON; the limit is {MAX_SCHEMA_CHARACTERS}", field=field
        )
    if circle := endless_circle(schema):
        way = ", which needs ".join(f"{each!r:.80}" for each in [*circle[1:3], circle[0]])
        more = f" by way of {len(circle) - 3} more" if len(circle) > 3 else ""
        raise InvalidInput(
            f"{field}: no finite text matches it: {circle[0]!r:.80} needs {way}{more}, and so on without end. Leave "
            "what leads back out of required, or let it be null or an empty list",
            field=field,
        )
    return without_idle_keywords(schema)  # type: ignore[no-any-return]


def document_part(schema: Any, *, field: str) -> dict[str, Any]:
    """The part of a grammar for an answer that is a JSON document of `schema`. Raises InvalidInput."""
    bounded = bounded_schema(schema, field=field)
    unrepeatable_names(bounded, field=field)
    part = json_grammar(bounded)
    return part | {"name": DOCUMENT_PART} if free_names(bounded) else part


def json_grammar(schema: dict[str, Any] | bool) -> dict[str, Any]:
    """The part of a grammar that JSON documents of `schema` match; keys in the schema's order."""
    return {"json_schema": {**({} if isinstance(schema, bool) else schema), "x-guidance": _OPTIONS}}


def _levels(document: Any) -> Iterator[list[Any]]:
    level = [document]
    while level:
        yield level
        inner: list[Any] = []
        for each in level:
            inner += each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
        level = [each for each in inner if isinstance(each, dict | list)]
