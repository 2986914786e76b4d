"""What `kubectl modelserve plan` says of a ModelAdapter is what the operator then does with it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from adapter_workers import AdapterFleet, adapter, fleet_of_two, ready, shown, wait

from modelserve.api.model_adapter import ModelAdapterSpec
from modelserve.cli.adapter_preview import AdapterSurroundings, adapter_preview, target_of
from modelserve_operator.cluster.kinds import MODEL_ADAPTER, MODEL_SERVE, REFERENCE_GRANT

GRANT = {
    "metadata": {"name": "adapters", "namespace": "ml"},
    "spec": {
        "from": [{"group": "serving.modelserve.dev", "kind": "ModelAdapter", "namespace": "team"}],
        "to": [{"group": "serving.modelserve.dev", "kind": "ModelServe"}],
    },
}


@pytest.fixture
def fleet(world, tiny_spec, tiny_facts) -> AdapterFleet:
    """Of a ModelServe with room for three versions."""
    world.serve(REFERENCE_GRANT)
    return fleet_of_two(world, tiny_spec, tiny_facts, room=3)


def _preview(world: Any, name: str, *, namespace: str = "ml", **spec: Any) -> tuple[list[str], bool]:
    """Of the object as it would be, over what the cluster has."""
    objects = world.cluster.objects
    live = objects.get((MODEL_ADAPTER, namespace, name))
    body = copy.deepcopy(live) if live is not None else {"metadata": {"name": name, "namespace": namespace}}
    body["spec"] = {"modelRef": {"name": "tiny", "namespace": "ml"}, "uri": f"hf://team/{name}", **spec}
    adapters = [each for (kind, *_), each in objects.items() if kind is MODEL_ADAPTER and each is not live]
    grants = [each for (kind, *_), each in objects.items() if kind is REFERENCE_GRANT]
    around = AdapterSurroundings(
        objects.get((MODEL_SERVE, *target_of(body))),
        live,
        [each for each in adapters if target_of(each) == target_of(body)],
        grants,
    )
    parsed, _ = ModelAdapterSpec.parse(body["spec"])
    return adapter_preview(body, parsed, around)


@pytest.mark.parametrize(
    ("namespace", "spec", "reason"),
    [
        ("ml", {}, "Serving"),
        ("ml", {"modelRef": {"name": "other"}}, "ModelServeNotFound"),
        ("ml", {"servedName": "tiny-model"}, "NameTaken"),
        ("ml", {"servedName": "first"}, "NameTaken"),
        ("ml", {"uri": "pvc://elsewhere/legal"}, "ClaimNotMounted"),
        ("team", {}, "ReferenceNotGranted"),
    ],
)
def test_a_new_one_is_served_or_refused_as_it_was_said(
    fleet, world, namespace: str, spec: dict[str, Any], reason: str
) -> None:
    adapter(world, "first")
    wait(world)
    if reason == "NameTaken" and spec["servedName"] == "tiny-model":
        uri = world.cluster.objects[MODEL_SERVE, "ml", "tiny"]["spec"]["model"]["uri"]
        spec = {"servedName": uri.rstrip("/").rsplit("/", 1)[1]}
    said, served = _preview(world, "legal", namespace=namespace, **spec)
    assert served == (reason == "Serving")
    if served:
        assert said[0].startswith("2 workers of tiny load hf://team/legal beside what they serve")
        assert said[-1] == "2 of 3 versions are there then."
    else:
        assert said[0].startswith(f"Accepted, and not served: {reason}: ")
    adapter(world, "legal", namespace=namespace, **{"modelRef": {"name": "tiny", "namespace": "ml"}, **spec})
    wait(world)
    assert ready(world, "legal", namespace=namespace)[1] == reason


def test_a_grant_lets_another_namespace_in(fleet, world) -> None:
    world.cluster.put(REFERENCE_GRANT, GRANT)
    assert _preview(world, "legal", namespace="team")[1]


def test_room_is_said_of_new_ones_and_of_new_versions(fleet, world) -> None:
    for name in ("a", "b", "c"):
        adapter(world, name)
    wait(world)
    said, served = _preview(world, "legal")
    assert (said[0].split(": ")[1], served) == ("TooManyAdapters", False)
    assert _preview(world, "a") == (["Nothing is loaded: hf://team/a is what serves."], True)
    (said,), _ = _preview(world, "a", uri="hf://team/a2")
    assert said.startswith("NoRoomForRollout: hf://team/a stays, and the new version waits: 3 of 3 versions")
    world.cluster.remove(MODEL_ADAPTER, "ml", "c")
    lines, served = _preview(world, "a", uri="hf://team/a2", rollout={"weight": 30})
    assert served
    assert lines[1:3] == [
        "hf://team/a serves until every worker has the new one.",
        "Then 30 % of requests are answered by the new one, until rollout.weight is 100 or uri is set back.",
    ]
    assert shown(world, "a")["activeVersion"]["uri"] == "hf://team/a", "nothing was written"


def test_a_model_without_room_for_adapters_is_said_with_the_remedy(world, tiny_spec) -> None:
    world.serve(MODEL_ADAPTER)
    world.create(tiny_spec)
    said, served = _preview(world, "legal")
    assert "AdaptersNotEnabled" in said[0]
    assert "spec.adapters.max" in said[0]
    assert not served
