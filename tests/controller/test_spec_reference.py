"""docs/modelserve.md is what the models say, and knows what an edit of each field does."""

from __future__ import annotations

import pytest
from spec_reference import ADAPTER_PAGE, CACHE_PAGE, PAGE, adapter_page, cache_page, effect, leaves, page, spec_schema

FIELDS = {".".join(path): (path, field) for path, field, _ in leaves(spec_schema())}


def test_the_page_is_what_the_models_say() -> None:
    assert PAGE.read_text() == page(), "python tests/controller/spec_reference.py writes it"
    assert ADAPTER_PAGE.read_text() == adapter_page(), "likewise"
    assert CACHE_PAGE.read_text() == cache_page(), "likewise"


@pytest.mark.parametrize(("name", "expected"), [
    ("context.maxModelLen", "plan"), ("model.revision", "plan"), ("adapters.max", "plan"),
    ("adapters.rank", "plan"), ("pod.tolerations", "plan"),
    ("model.cache.name", "pods"),
    ("model.servedName", "pods"), ("rollout.drainSeconds", "pods"), ("pod.env", "pods"), ("image", "pods"),
    ("rollout.maxSurge", "nothing"), ("gateway.hostnames", "nothing"), ("capacityBuffer.replicas", "nothing"),
    ("replicas", "scales"), ("plan.revision", "decides"),
])  # fmt: skip
def test_what_an_edit_does(name: str, expected: str) -> None:
    """By hand, what the page finds by editing each field."""
    assert effect(*FIELDS[name]) == expected


def test_every_field_is_described() -> None:
    assert [name for name, (_, field) in FIELDS.items() if not field.get("description")] == []
