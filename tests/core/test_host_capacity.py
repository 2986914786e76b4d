"""Memory and processors of nodes bind a plan as their GPUs do, and what nobody knows of them refuses nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from modelserve.api.schema_types import quantity_value
from modelserve.api.spec import ModelServeSpec
from modelserve.api.status import PlanStatus
from modelserve.cli.__main__ import main
from modelserve.planning.planner import plan
from modelserve.planning.pools.offers import offers_from_nodes
from modelserve.published import published_model
from modelserve_operator.manifests.pod_resources import worker_resources

URI = "hf://google/gemma-4-E4B-it"
GIB = 1 << 30


def _node(
    memory: str | None, cpu: str | None = "16", *, gpus: int = 2, name: str = "n", **labels: str
) -> dict[str, Any]:
    sizes = {name: value for name, value in (("memory", memory), ("cpu", cpu)) if value is not None}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"nvidia.com/gpu.product": "NVIDIA-L4", **labels}},
        "status": {"allocatable": {"nvidia.com/gpu": "2", **sizes}},
    }


def _plan(*nodes: dict[str, Any], **fields: Any) -> PlanStatus:
    facts = published_model(URI)
    assert facts is not None
    spec = ModelServeSpec.model_validate({"model": {"uri": URI}, **fields})
    return plan(spec, facts.architecture, offers_from_nodes(nodes), weight_format=facts.format)


def _asked(found: PlanStatus, fields: dict[str, Any]) -> dict[str, str]:
    """What the pods of a plan ask for."""
    users = fields.get("pod", {}).get("resources", {})
    requests: dict[str, str] = worker_resources(users, found, downloaded_bytes=None)["requests"]
    return requests


def test_host_memory_that_no_node_has_is_refused_with_what_is_missing() -> None:
    found = _plan(_node("4Gi"), kvCache={"hostMemory": "10Ti"})
    assert not found.fits
    (candidate,) = found.candidates
    assert (candidate.verdict, candidate.limited_by) == ("Refused", "HostMemory")
    needed = 10 * 1024 * GIB + (49 * GIB) // 8 + (32 << 20)  # as tests of the pod's resources count
    assert candidate.shortfall_bytes == needed - 4 * GIB
    assert "10,240.00 GiB of it kvCache.hostMemory" in (candidate.message or "")
    assert "has 4.00 GiB allocatable" in (candidate.message or "")
    assert candidate.remedy == "fits on nodes with 10,246.16 GiB of allocatable memory"


ASKED: list[dict[str, Any]] = [
    {},
    {"kvCache": {"hostMemory": "32Gi"}},
    {"parallelism": {"tensor": 2}},
    {"parallelism": {"tensor": 2}, "kvCache": {"hostMemory": "20Gi"}},
    {"pod": {"resources": {"requests": {"memory": "50Gi", "cpu": "7"}}}},
    {"pod": {"resources": {"limits": {"memory": "5Gi", "cpu": "1"}}}},
    {"drafter": {"published": True}, "kvCache": {"hostMemory": "8Gi"}},
    {"accelerators": {"maxPerReplica": 1}, "pod": {"resources": {"limits": {"memory": "64Gi"}}}},
]


@pytest.mark.parametrize("fields", ASKED, ids=[json.dumps(each)[:60] for each in ASKED])
def test_a_plan_fits_where_its_own_pods_do_and_nowhere_else(fields: dict[str, Any]) -> None:
    """The bounds are the requests of the pods that the operator makes, to the byte."""
    fields = {"accelerators": {"maxPerReplica": 1}} | fields if "parallelism" not in fields else fields
    requests = _asked(_plan(_node(None, None), **fields), fields)
    memory, cpu = int(quantity_value(requests["memory"])), int(quantity_value(requests["cpu"]) * 1000)
    assert _plan(_node(str(memory), f"{cpu}m"), **fields).fits
    short = _plan(_node(str(memory - 1), f"{cpu}m"), **fields)
    assert [each.limited_by for each in short.candidates] == ["HostMemory"]
    assert short.candidates[0].shortfall_bytes == 1
    slow = _plan(_node(str(memory), f"{cpu - 1}m"), **fields)
    assert [(each.limited_by, each.shortfall_bytes) for each in slow.candidates] == [("Cpu", None)]


@pytest.mark.parametrize(
    ("fields", "node", "remedied"),
    [
        ({"kvCache": {"hostMemory": "64Gi"}}, ("32Gi", "16"), {"kvCache": {"hostMemory": "25Gi"}}),
        ({"kvCache": {"hostMemory": "64Gi"}}, ("6600Mi", "16"), {}),
        (
            {"pod": {"resources": {"requests": {"memory": "64Gi"}}}},
            ("32Gi", "16"),
            {"pod": {"resources": {"requests": {"memory": "32768Mi"}}}},
        ),
        ({}, ("32Gi", "1500m"), {"pod": {"resources": {"requests": {"cpu": "1"}}}}),
        ({}, ("32Gi", "900m"), {"pod": {"resources": {"requests": {"cpu": "900m"}}}}),
        (
            {"kvCache": {"hostMemory": "64Gi"}},
            ("32Gi", "1"),
            {"kvCache": {"hostMemory": "25Gi"}, "pod": {"resources": {"requests": {"cpu": "1"}}}},
        ),
    ],
)
def test_a_remedy_names_the_field_and_works(
    fields: dict[str, Any], node: tuple[str, str], remedied: dict[str, Any]
) -> None:
    one = {"accelerators": {"maxPerReplica": 1}}
    (candidate,) = _plan(_node(*node), **one | fields).candidates
    assert candidate.verdict == "Refused"
    values = [each for part in remedied.values() for each in _leaves(part)] or ["left out"]
    said = (candidate.remedy or "").removeprefix("fits ").split(" and ")
    assert [each.endswith(value) for each, value in zip(said, values, strict=True)] == [True] * len(values)
    assert _plan(_node(*node), **one | remedied).fits


def _leaves(part: Any) -> list[str]:
    return [leaf for each in part.values() for leaf in _leaves(each)] if isinstance(part, dict) else [part]


def test_another_number_of_gpus_or_another_pool_is_taken_where_its_nodes_have_room() -> None:
    small = _node("9Gi", name="small")  # room for one rank: 6.2 GiB, and not for two: 10.7
    assert _plan(small).gpus_per_replica == 1
    large = _node("128Gi", name="large", zone="b", **{"node.kubernetes.io/instance-type": "big"})
    grouped = {"parallelism": {"tensor": 2}}
    assert not _plan(small, **grouped).fits
    both = _plan(small, large, **grouped)
    assert both.fits
    named = [each for term in both.node_selector_terms or () for each in term.match_expressions]
    assert {each.values for each in named if each.key == "node.kubernetes.io/instance-type"} == {("big",)}
    assert all(
        any(each.key == "node.kubernetes.io/instance-type" for each in term.match_expressions)
        for term in both.node_selector_terms or ()
    ), "the pool without room is not named"


def test_the_largest_node_of_a_pool_counts() -> None:
    nodes = [_node("4Gi", "64", name="a"), _node("64Gi", "1", name="b")]
    assert _plan(*nodes).fits, "no node is refused for what another lacks: the scheduler will say"


@pytest.mark.parametrize(("memory", "cpu"), [(None, None), (None, "16"), ("64Gi", None), ("odd", "16")])
def test_what_no_node_tells_is_no_refusal_and_is_said(memory: str | None, cpu: str | None) -> None:
    found = _plan(_node(memory, cpu), kvCache={"hostMemory": "16Gi"}, accelerators={"maxPerReplica": 1})
    assert found.fits
    assert "no node tells yet whether it has the 2 CPUs and 22.16 GiB of memory that a pod asks for" in (
        found.message or ""
    )
    told = _plan(_node("64Gi"), kvCache={"hostMemory": "16Gi"}, accelerators={"maxPerReplica": 1})
    assert "no node tells" not in (told.message or "")
    assert told.hash == found.hash, "nodes are no part of what runs"


def test_the_command_counts_what_nodes_of_a_file_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    serve = {
        "apiVersion": "serving.modelserve.dev/v1alpha1",
        "kind": "ModelServe",
        "metadata": {"name": "chat"},
        "spec": {"model": {"uri": URI}, "kvCache": {"hostMemory": "10Ti"}},
    }
    files = {"serve.yaml": serve, "nodes.yaml": _node("4Gi", "1")}
    for name, body in files.items():
        (tmp_path / name).write_text(yaml.safe_dump(body))
    flags = ["-f", str(tmp_path / "serve.yaml"), "--nodes", str(tmp_path / "nodes.yaml")]
    assert main(["plan", *flags, "-o", "json"]) == 3
    (entry,) = json.loads(capsys.readouterr().out)
    assert {each["limitedBy"] for each in entry["plan"]["candidates"]} == {"HostMemory"}
    assert main(["plan", *flags]) == 3
    assert "HostMemory" in capsys.readouterr().out
