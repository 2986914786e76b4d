"""JSON schemas that no finite document matches, since each would hold another one of them.

Such a schema compiles; its answers go on until they are cut or too complex to follow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

Schema = Mapping[str, Any]


def endless_circle(document: Any) -> list[str]:
    """The `$ref`s of a circle that whoever writes a document goes round without end; empty when there is a way out.

    What is found is certain. Not everything is looked at: alternatives of types and conditions count as ways out.
    """
    return _Circles(document).circle() if isinstance(document, dict) else []


class _Circles:
    """Finds the schemas that have a finite document: those whose demands are met by such schemas, and no others.

    A schema is looked at when one that needs it is, and again when one that it waits for turns out to have one.
    """

    def __init__(self, document: Schema) -> None:
        self._document = document
        self._finite: set[int] = set()  # by id(); all are parts of the document
        waiting: dict[int, list[Schema]] = defaultdict(list)
        pending, seen = [document], {id(document)}
        while pending:
            schema = pending.pop()
            if id(schema) in self._finite:
                continue
            needed = self._unmet(schema)
            if not needed:
                self._finite.add(id(schema))
                pending += waiting.pop(id(schema), ())
            for each in needed:
                waiting[id(each)].append(schema)
                if id(each) not in seen:
                    seen.add(id(each))
                    pending.append(each)

    def circle(self) -> list[str]:
        """References on a way that comes to a schema a second time: the one that leads there, and those behind it."""
        schema, passed, references = self._document, dict[int, int](), list[str]()
        while id(schema) not in self._finite:
            if id(schema) in passed:
                return [references[-1], *references[passed[id(schema)] : -1]]
            passed[id(schema)] = len(references)
            step = self._unmet(schema)[0]
            if step is self._target(schema):
                references.append(schema["$ref"])
            schema = step
        return []

    def _unmet(self, schema: Schema) -> list[Schema]:
        """The alternatives of the first demand that none of them meets; empty when all demands are met."""
        for alternatives in self._demands(schema):
            parts: list[Schema] = [each for each in alternatives if isinstance(each, dict)]
            # Of `true` any document will do; what else is no object is not ours to refuse.
            if len(parts) == len(alternatives) and not any(id(each) in self._finite for each in parts):
                return parts
        return []

    def _demands(self, schema: Schema) -> Iterator[list[Any]]:
        """Lists of schemas; a document needs a part, or itself, to match one of each."""
        target = self._target(schema)
        if target is not None:
            yield [target]
        for part in _items(schema.get("allOf")):
            yield [part]
        for union in ("anyOf", "oneOf"):
            if options := _items(schema.get(union)):
                yield options
        if "enum" in schema or "const" in schema:
            return
        if schema.get("type") in ("object", ["object"]):
            yield from _members(schema)
        if schema.get("type") in ("array", ["array"]):
            yield from _elements(schema)

    def _target(self, schema: Schema) -> Schema | None:
        """Where its `$ref` leads, as far as that is a schema of the document."""
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        found: Any = self._document
        for step in map(unquote, reference[1:].split("/")[1:]):
            if isinstance(found, list) and step.isdecimal() and int(step) < len(found):
                found = found[int(step)]
            else:
                found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
        return found if isinstance(found, dict) else None


def _members(schema: Schema) -> Iterator[list[Any]]:
    """What the values of an object's keys must match."""
    properties, others = schema.get("properties"), schema.get("additionalProperties", True)
    named = properties if isinstance(properties, dict) else {}
    if "patternProperties" in schema:
        others = True
    for name in _items(schema.get("required")):
        if isinstance(name, str):
            yield [named.get(name, others)]
    if _count(schema.get("minProperties")):
        yield [*named.values(), others]


def _elements(schema: Schema) -> Iterator[list[Any]]:
    """What the first elements of an array must match."""
    first, least = _items(schema.get("prefixItems")), _count(schema.get("minItems"))
    yield from ([each] for each in first[:least])
    if least > len(first):
        yield [schema.get("items", True)]


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _count(value: Any) -> int:
    return max(0, value) if type(value) is int else 0
