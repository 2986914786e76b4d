"""Specs of every kind, made of a seed and the CRD's own schema: valid ones, values at limits, and mutated ones."""

from __future__ import annotations

import copy
import random
import re
from typing import Any

from modelserve.crd import custom_resource_definition

_VERSION = custom_resource_definition()["spec"]["versions"][0]
SCHEMA: dict[str, Any] = _VERSION["schema"]["openAPIV3Schema"]["properties"]["spec"]

TEXTS = (
    "hf://google/gemma-4-E2B-it", "hf://google/gemma-4-31B-it", "hf://google/gemma-4-12B-it-qat-w4a16-ct",
    "hf://own/model", "pvc://weights/tiny", "pvc://other", "CPU", "NVIDIA-H200", "NVIDIA-L4", "Tesla-T4",
    "NVIDIA-H100-80GB-HBM3-MIG-3g.40gb", "unknown-product", "nvidia.com/gpu", "zone", "a", "x-1", "main", "token",
    "registry.example/worker:1", "0", "1", "0.5", "0.85", "0.9", "0.99", "3.25", "500m", "4Gi", "64Gi", "1Ki", "16",
    "9999999999999999E", "99999999999999999999", "0.0001",
    "images.example.com", "http://*.example.com",
    "abcdef0123", "a-0123456789", "PATH", "HF_TOKEN", "memory", "cpu", "ephemeral-storage", "A b", "",
)  # fmt: skip
ODD = (
    None, True, False, -1, 0, 1, 2**31, 2**63, 10**30, 0.5, -0.0, 1e308, "", " ", "0", "-1", "1e9", "é", "a\n",
    "x" * 64, "x" * 9000, "hf://", "pvc:///", "file:///etc", "../..", "NaN", "1Gi ", "100E", [], {}, [None], [[]],
    {"a": 1}, {"": ""}, ["CPU", "CPU"], {"uri": 5},
)  # fmt: skip


RARE = {"drafter": 0.2, "image": 0.1, "revision": 0.1}  # fields that leave nothing else to be seen


class RandomSpecs:
    """A stream of specs; the same seed gives the same."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def valid(self) -> dict[str, Any]:
        """One that the schema allows; rules across fields may still refuse it."""
        spec: dict[str, Any] = self._value(SCHEMA, depth=0)
        return spec

    def any(self) -> Any:
        """A valid one, or one with up to three faults."""
        spec = self.valid()
        for _ in range(self._random.choice((0, 0, 1, 1, 2, 3))):
            spec = self._mutated(spec)
        return spec

    def _value(self, schema: dict[str, Any], *, depth: int) -> Any:
        rng = self._random
        if "enum" in schema:
            return rng.choice(schema["enum"])
        if schema.get("x-kubernetes-int-or-string"):
            return rng.choice((1, 2, self._text(schema), self._text(schema)))
        kind = schema["type"]
        if kind == "object" and "additionalProperties" in schema:
            values = schema["additionalProperties"]
            return {self._key(): self._value(values, depth=depth + 1) for _ in range(rng.randrange(3))}
        if kind == "object":
            return {
                name: self._value(child, depth=depth + 1)
                for name, child in schema.get("properties", {}).items()
                if name in schema.get("required", ()) or rng.random() < RARE.get(name, 0.3 if depth == 0 else 0.5)
            }
        if kind == "array":
            most = min(schema.get("maxItems", 3), 3)
            count = rng.randint(schema.get("minItems", 0), most)
            return [self._value(schema["items"], depth=depth + 1) for _ in range(count)]
        if kind == "boolean":
            return rng.random() < 0.5
        if kind == "integer":
            low, high = schema.get("minimum", 0), schema.get("maximum", 1 << 20)
            small = min(high, max(low, 4))
            return rng.choice((low, high, small, small, rng.randint(low, min(high, 1 << 17)), rng.randint(low, high)))
        return self._text(schema)

    def _text(self, schema: dict[str, Any]) -> str:
        pattern, longest = re.compile(schema.get("pattern", "")), schema.get("maxLength", 64)
        fitting = [text for text in TEXTS if len(text) >= schema.get("minLength", 0) and pattern.search(text)]
        return self._random.choice([text for text in fitting if len(text) <= longest])

    def _key(self) -> str:
        return self._random.choice([text for text in TEXTS if re.fullmatch(r"[A-Za-z][A-Za-z0-9./-]*", text)])

    def _mutated(self, spec: Any) -> Any:
        """The spec with one fault at a random place."""
        rng, found = self._random, copy.deepcopy(spec)
        places = list(_places(found))
        if not places:
            return rng.choice(ODD)
        holder, key = rng.choice(places)
        match rng.randrange(6):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[rng.choice(("unknown", f"{key}s", "", "é" * 80))] = rng.choice(ODD)
            case 2 if isinstance(holder[key], list):
                holder[key] = holder[key] * 20
            case 3 if isinstance(holder[key], str):
                holder[key] += rng.choice(("-", " ", "\n", "x" * 600, "é"))
            case _:
                holder[key] = copy.deepcopy(rng.choice(ODD))
        return found


def _places(document: Any) -> Any:
    """(container, key) of everything in a document; nothing of a scalar."""
    if not isinstance(document, dict | list):
        return
    pairs = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in pairs:
        yield document, key
        if isinstance(value, dict | list):
            yield from _places(value)
