"""Documents of a later release: fields that this one does not know are left out, and named."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from modelserve.errors import InvalidInput, first_fault

Model = TypeVar("Model", bound=BaseModel)


def parsed_spec(model: type[Model], spec: object) -> tuple[Model, tuple[str, ...]]:
    """The spec of an object of the cluster, whose schema may be a later release's, and the fields that this one does
    not have. Raises InvalidInput.
    """
    if not isinstance(spec, Mapping):
        raise InvalidInput("spec must be an object")
    known, unknown = without_unknown(model, spec)
    try:
        return model.model_validate_json(json.dumps(known), strict=True, by_alias=True, by_name=False), unknown
    except ValidationError as error:
        path, message = first_fault(error)
        field = ".".join(filter(None, ("spec", path)))
        raise InvalidInput(f"{field}: {message.removeprefix('Value error, ')}", field=field) from error


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
