"""Documents of a later release: fields that this one does not know are left out, and named."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError


def without_unknown(model: type[BaseModel], document: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The document without fields that `model` does not have, at any depth, and the paths of those: `a.b`.

    Other faults are left for the validation of the result to find.
    """
    known = copy.deepcopy(dict(document))
    try:
        model.model_validate(known)
    except ValidationError as error:
        unknown = [each["loc"] for each in error.errors(include_url=False) if each["type"] == "extra_forbidden"]
        return _without(known, unknown), tuple(".".join(map(str, path)) for path in unknown)
    return known, ()


def _without(document: dict[str, Any], paths: Sequence[tuple[int | str, ...]]) -> dict[str, Any]:
    for *parents, last in paths:
        place: Any = document
        for part in parents:
            place = place[part]
        del place[last]
    return document
