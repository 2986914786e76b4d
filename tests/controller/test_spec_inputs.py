"""Two hashes of a spec: what plans are made from, and what only pods are. Neither sees a default."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from modelserve.api import ModelServe, ModelServeSpec
from modelserve.api.pod import PodOverrides
from modelserve.crd import custom_resource_definition
from modelserve.engine_args import SINCE, EngineArgs
from modelserve.releases import release_of_image
from modelserve_operator.revisions.imported import spec_hash
from modelserve_operator.revisions.spec_inputs import SpecInputs, read_by_planner, spec_inputs

RELEASES = Path(__file__).parents[1] / "releases"
MODEL = {"uri": "hf://example/small"}


def _spec(**fields: Any) -> ModelServeSpec:
    return ModelServeSpec.model_validate({"model": MODEL, **fields})


@pytest.mark.parametrize(
    ("fields", "plan", "pod"),
    [
        ({"replicas": 7}, False, False),
        ({"plan": {"mode": "Manual", "revision": "a-0123456789"}}, False, False),
        ({"rollout": {"maxSurge": 3, "allowDowntime": True}}, False, False),
        ({"revisionHistoryLimit": 0}, False, False),
        ({"rollout": {"drainSeconds": 5}}, False, True),
        ({"image": "other:1"}, False, True),
        ({"model": {**MODEL, "servedName": "x"}}, False, True),
        ({"storage": {"pvcName": "weights"}}, False, True),
        ({"apiKeySecretRef": {"name": "key"}}, False, True),
        ({"pod": {"labels": {"team": "a"}}}, False, True),
        ({"pod": {"env": [{"name": "A", "value": ""}]}}, False, True),
        ({"pod": {"resources": {"limits": {"memory": "3Gi"}}}}, True, False),
        ({"pod": {"tolerations": [{"key": "gpu"}]}}, True, False),
        ({"model": {**MODEL, "revision": "v2"}}, True, False),
        ({"context": {"maxModelLen": 4096}}, True, False),
        ({"accelerators": {"products": ["CPU"]}}, True, False),
        ({"objective": "Latency"}, True, False),
        ({"engine": {"prefixCaching": False}}, True, False),
        ({"kvCache": {"hostMemory": "8Gi"}}, True, False),
    ],
)
def test_each_field_is_of_one_kind(fields: dict[str, Any], plan: bool, pod: bool) -> None:
    bare, changed = spec_inputs(_spec()), spec_inputs(_spec(**fields))
    assert (changed.plan != bare.plan, changed.pod != bare.pod) == (plan, pod)


def test_a_default_that_is_written_out_and_an_empty_object_say_nothing() -> None:
    written = {
        "replicas": 1,
        "plan": {"mode": "Automatic"},
        "rollout": {"maxSurge": 1, "drainSeconds": 60},
        "pod": {"labels": {}, "tolerations": []},
        "context": {},
        "accelerators": {"nodeSelector": {}},
        "revisionHistoryLimit": 5,
    }
    assert spec_inputs(_spec(**written)) == spec_inputs(_spec())


class NextPod(PodOverrides):
    zone: str = "any"


class NextSpec(ModelServeSpec):
    """A later release: fields with defaults at the top and further down."""

    compression: str = "none"
    towers: tuple[str, ...] = ()
    quotas: dict[str, str] = Field(default_factory=dict)
    pod: NextPod = NextPod()


def test_a_field_that_a_later_release_adds_with_a_default_changes_no_hash() -> None:
    fields = {"model": MODEL, "context": {"maxModelLen": 512}, "pod": {"labels": {"team": "a"}}}
    now, later = ModelServeSpec.model_validate(fields), NextSpec.model_validate(fields)
    assert spec_inputs(later) == spec_inputs(now)
    assert read_by_planner(later) == read_by_planner(now)
    defaulted = {**fields, "compression": "none", "towers": [], "pod": {**fields["pod"], "zone": "any"}}
    assert spec_inputs(NextSpec.model_validate(defaulted)) == spec_inputs(now), "as the API server writes it"
    used = spec_inputs(NextSpec.model_validate({**fields, "compression": "zstd"}))
    assert used.plan != spec_inputs(now).plan, "a field counts for plans until it is said not to"


def test_hashes_are_compared_under_the_algorithm_that_made_them() -> None:
    inputs = spec_inputs(_spec())
    assert SpecInputs.from_json(json.loads(json.dumps(inputs.to_json()))) == inputs
    with pytest.raises(ValueError, match="algorithm 99 is not known"):
        SpecInputs.from_json({**inputs.to_json(), "algorithm": 99})


def test_the_hashes_of_released_algorithms_never_change() -> None:
    """Golden: a revision keeps them for years."""
    spec = _spec(context={"maxModelLen": 4096}, pod={"labels": {"team": "a"}}, rollout={"drainSeconds": 5})
    assert spec_inputs(spec) == SpecInputs("dfc27225e6", "a3665b3080", 1)


def _defaults(schema: dict[str, Any], path: str) -> Any:
    for part in path.replace("[]", ".[]").split("."):
        schema = schema["items"] if part == "[]" else schema["properties"][part]
    return schema.get("default")


@pytest.mark.parametrize("release", sorted(each.name for each in RELEASES.iterdir() if each.is_dir()))
def test_a_released_default_never_changes_within_an_api_version(release: str) -> None:
    """A hash leaves defaults out, so another default would be another spec of the same hash."""
    recorded = json.loads((RELEASES / release / "defaults.json").read_text())
    versions = {each["name"]: each for each in custom_resource_definition()["spec"]["versions"]}
    for version, defaults in recorded.items():
        spec = versions[version]["schema"]["openAPIV3Schema"]["properties"]["spec"]
        assert {path: _defaults(spec, path) for path in defaults} == defaults


@pytest.mark.parametrize("scene", sorted((RELEASES / "0.1.0").glob("*.json")), ids=lambda path: path.stem)
def test_specs_compare_as_0_1_0_compared_them(scene: Path) -> None:
    if scene.stem == "defaults":
        return
    objects = json.loads(scene.read_text())["objects"]
    (body,) = [each for each in objects if each["kind"] == "ModelServe"]
    committed = {
        each["metadata"]["labels"]["serving.modelserve.dev/spec-hash"]
        for each in objects
        if "plan.json" in each.get("data", {})
    }
    waits = body["spec"].get("plan", {}).get("mode") == "Manual"
    spec = ModelServe.parse_of_any_release(body)[0].spec
    assert (spec_hash(spec) in committed) is not waits


class LaterArgs(EngineArgs):
    speculation: int = Field(default=3, json_schema_extra={SINCE: "0.3.0"})


@pytest.mark.parametrize(
    ("release", "known"), [("0.1.0", False), ("0.2.9", False), ("0.3.0", True), ("0.3.0-rc.1", True), ("1.0", True)]
)
def test_settings_are_written_in_the_dialect_of_the_worker(release: str, known: bool) -> None:
    document = LaterArgs(model="/m", speculation=5).dialect(release)
    assert ("speculation" in document) is known
    assert EngineArgs.model_validate({key: value for key, value in document.items() if key != "speculation"})
    assert document["model"] == "/m"


@pytest.mark.parametrize(
    ("image", "release"),
    [
        ("registry.example:5000/ai/modelserve-worker:0.1.0", "0.1.0"),
        ("worker:v0.2.0-rc.1@sha256:abc", "0.2.0-rc.1"),
        ("worker:test", None),
        ("registry.example:5000/worker", None),
        ("worker@sha256:0123", None),
    ],
)
def test_the_release_of_an_image_is_its_tag(image: str, release: str | None) -> None:
    assert release_of_image(image) == release
