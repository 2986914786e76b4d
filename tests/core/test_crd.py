"""The CRD file is the generated one, and its schema is what a strict API server and a GitOps pipeline need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from modelserve.crd import (
    DEFINITIONS,
    MODEL_ADAPTERS,
    MODEL_SERVES,
    Definition,
    crd_yaml,
    custom_resource_definition,
    write_crds,
)

CRDS = Path(__file__).resolve().parents[2] / "crds"
FORBIDDEN = {"$ref", "$defs", "title", "patternProperties", "propertyNames", "const", "prefixItems", "oneOf", "allOf"}


def _version() -> dict[str, Any]:
    version: dict[str, Any] = custom_resource_definition()["spec"]["versions"][0]
    return version


def _nodes(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from _nodes(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from _nodes(schema[key], f"{path}[{key}]")


def _fields(of: Definition = MODEL_SERVES) -> list[tuple[str, dict[str, Any]]]:
    root = custom_resource_definition(of=of)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return [node for part in ("spec", "status") for node in _nodes(root["properties"][part], part)]


def _all_fields() -> list[tuple[str, dict[str, Any]]]:
    return [node for each in DEFINITIONS for node in _fields(each)]


def test_the_file_is_the_generated_one() -> None:
    for each in DEFINITIONS:
        assert (CRDS / each.file_name).read_text() == crd_yaml(each)


def test_write_crd_makes_the_directory(tmp_path: Path) -> None:
    written = list(write_crds(tmp_path / "new"))
    assert [yaml.safe_load(each.read_text()) for each in written] == [
        custom_resource_definition(of=each) for each in DEFINITIONS
    ]


def test_the_schema_is_structural() -> None:
    for path, node in _all_fields():
        assert not FORBIDDEN & set(node), path
        if node.get("x-kubernetes-int-or-string"):
            assert "type" not in node, path
        else:
            assert "anyOf" not in node, path
            assert node.get("type") in {"object", "array", "string", "integer", "boolean"}, path
        assert not ("properties" in node and "additionalProperties" in node), path


def test_every_field_is_described() -> None:
    items = [path for path, node in _all_fields() if "description" not in node and not path.endswith("]")]
    assert items == []


def test_everything_is_bounded() -> None:
    for path, node in _all_fields():
        kind = node.get("type")
        if kind == "string":
            assert "maxLength" in node or "enum" in node, path
        elif kind == "integer":
            assert {"minimum", "maximum"} <= set(node), path
        elif kind == "array":
            assert "maxItems" in node, path
        elif kind == "object" and "properties" not in node:
            assert "maxProperties" in node, path


def test_only_the_model_address_is_required() -> None:
    schema = _version()["schema"]["openAPIV3Schema"]
    spec = schema["properties"]["spec"]
    assert (schema["required"], spec["required"], spec["properties"]["model"]["required"]) == (
        ["spec"],
        ["model"],
        ["uri"],
    )


def test_defaults_are_in_the_schema() -> None:
    properties = _version()["schema"]["openAPIV3Schema"]["properties"]
    spec = properties["spec"]["properties"]
    assert spec["replicas"]["default"] == 1
    assert (spec["plan"]["default"], spec["rollout"]["default"], spec["pod"]["default"]) == ({}, {}, {})
    assert spec["plan"]["properties"]["mode"]["default"] == "Automatic"
    rollout = {name: field["default"] for name, field in spec["rollout"]["properties"].items() if "default" in field}
    assert rollout == {"maxSurge": 1, "allowDowntime": False, "drainSeconds": 60}
    (ready,) = properties["status"]["default"]["conditions"]
    assert (ready["type"], ready["status"]) == ("Ready", "Unknown")
    assert properties["status"]["properties"]["conditions"]["default"] == [ready]


def test_what_the_operator_chooses_has_no_default() -> None:
    spec = _version()["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    for name in ("context", "kvCache", "parallelism", "engine", "objective", "accelerators", "image"):
        assert "default" not in spec[name], name


def test_lists_that_are_maps_have_required_keys() -> None:
    keyed = {path: node for path, node in _fields() if node.get("x-kubernetes-list-type") == "map"}
    assert set(keyed) == {
        "status.conditions", "status.plan.candidates", "status.proposedPlan.candidates", "status.calibration.terms",
        "status.calibration.pages", "status.calibration.speed", "spec.pod.env", "spec.pod.imagePullSecrets",
        "spec.drafter.models", "status.plan.drafter.models", "status.proposedPlan.drafter.models",
    }  # fmt: skip
    for path, node in keyed.items():
        assert set(node["x-kubernetes-list-map-keys"]) <= set(node["items"]["required"]), path


def test_cross_field_rules_are_in_cel() -> None:
    ruled = {path for path, node in _fields() if "x-kubernetes-validations" in node}
    parts = (
        "adapters",
        "capacityBuffer",
        "context",
        "drafter",
        "engine",
        "kvCache",
        "model",
        "pod.resources",
        "rollout",
    )
    assert ruled == {"spec", *(f"spec.{part}" for part in parts)}


def test_scale_and_columns() -> None:
    version = _version()
    assert version["subresources"]["scale"] == {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }
    columns = [(column["name"], column["priority"]) for column in version["additionalPrinterColumns"]]
    assert [name for name, priority in columns if priority == 0] == [
        "Model", "GPU", "TP", "MaxLen", "KV", "Pods", "Ready", "Reason", "Age",
    ]  # fmt: skip
    assert {"Plan", "URL", "Waits"} <= {name for name, priority in columns if priority == 1}


def test_an_adapters_schema_says_who_serves_it_and_what() -> None:
    version = custom_resource_definition(of=MODEL_ADAPTERS)["spec"]["versions"][0]
    assert version["subresources"] == {"status": {}}, "nothing of it scales"
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    assert spec["required"] == ["modelRef", "uri"]
    assert (spec["properties"]["rollout"]["default"], spec["properties"]["pin"]["default"]) == ({}, False)
    messages = [each["message"] for each in spec["x-kubernetes-validations"]]
    assert [each.split()[0] for each in messages] == ["modelRef", "servedName", "revision"]
    columns = [each["name"] for each in version["additionalPrinterColumns"] if each["priority"] == 0]
    assert columns == ["Model", "Served", "Rank", "Workers", "Ready", "Reason", "Age"]
