"""Records what this release leaves in a cluster, as golden fixtures that later releases read: `python record.py`.

    PYTHONPATH=operator:worker .venv/bin/python tests/releases/record.py

writes `tests/releases/RELEASE/`: one file per scene with every object of the tests' in-memory cluster and what its
workers answer on /v1/plan, the defaults of the CRD, and the operator itself, which runs from `operator.whl`. Once
per release, from its own commit; what was recorded before is never written again.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from modelserve import __version__
from modelserve.crd import custom_resource_definition
from modelserve_operator import labels
from modelserve_operator.cluster.kinds import CLAIM, MODEL_SERVE

HERE = Path(__file__).parent
CONTROLLER = HERE.parent / "controller" / "conftest.py"

H200 = {"product": "NVIDIA-H200", "memory_mib": 143_771, "gpus": 8}
H100 = {"product": "NVIDIA-H100-80GB-HBM3", "memory_mib": 81_559, "gpus": 8}
BIG = {"model": {"uri": "hf://google/gemma-4-31B-it", "servedName": "big"}, "storage": {"pvcName": "weights"}}


def _controller() -> Any:
    """The in-memory cluster of tests/controller."""
    specification = importlib.util.spec_from_file_location("controller_conftest", CONTROLLER)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module


def _world(controller: Any) -> Any:
    world = controller.World()
    metadata = {"name": "weights", "namespace": "ml"}
    world.cluster.put(CLAIM, {"metadata": metadata, "spec": {"accessModes": ["ReadWriteMany"]}, "status": {}})
    return world


def _approve(world: Any, approved: str) -> None:
    def annotate(body: dict[str, Any]) -> None:
        body["metadata"].setdefault("annotations", {})[labels.APPROVE_PLAN] = approved

    world.cluster.change(MODEL_SERVE, "big", annotate)
    world.settle()


def ready_on_the_cpu(controller: Any) -> Any:
    """An inspected model, one revision, Ready."""
    world = _world(controller)
    world.create(controller.TINY_SPEC)
    world.cluster.end_job(message=controller.tiny_facts.__wrapped__().model_dump_json(by_alias=True))
    world.settle()
    world.make_ready()
    return world


def rolling_out(controller: Any) -> Any:
    """Two revisions: the old one serves, the new one is starting."""
    world = ready_on_the_cpu(controller)
    world.edit(context={"maxModelLen": 1024})
    return world


def measured_on_gpus(controller: Any) -> Any:
    """A published model on two GPU nodes, Ready, with what its workers measured learned."""
    world = _world(controller)
    world.add_node("a", **H200)
    world.create({**BIG, "replicas": 2, "pod": {"labels": {"team": "search"}}}, name="big")
    for deployment in world.cluster.of(controller.DEPLOYMENT):
        world.cluster.make_ready(deployment, surplus={"context": 200 << 20})
    world.settle()
    return world


def approved_again(controller: Any) -> Any:
    """Of two plans of one spec the earlier one was approved once more; the later one is a proposal."""
    world = _world(controller)
    world.add_node("a", **H200)
    world.create(BIG, name="big")
    first = world.status("big")["plan"]["hash"]
    world.add_node("a", **H100)
    _approve(world, world.status("big")["proposedPlan"]["hash"])
    _approve(world, first)
    return world


def waiting_for_approval(controller: Any) -> Any:
    """An edited spec waits in mode Manual while the plan before it runs."""
    world = measured_on_gpus(controller)
    world.edit("big", plan={"mode": "Manual"}, context={"maxModelLen": 4096})
    return world


SCENES: tuple[Callable[[Any], Any], ...] = (
    ready_on_the_cpu,
    rolling_out,
    measured_on_gpus,
    approved_again,
    waiting_for_approval,
)


def objects_of(cluster: Any) -> list[dict[str, Any]]:
    """Every object, with its kind, in a fixed order."""
    ordered = sorted(cluster.objects.items(), key=lambda item: (item[0][0].kind, item[0][1], item[0][2]))
    return [{"apiVersion": kind.api_version, "kind": kind.kind, **body} for (kind, _, _), body in ordered]


def defaults(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, default) of every field of a structural schema that has one."""
    if "default" in schema:
        yield path, schema["default"]
    for name, child in schema.get("properties", {}).items():
        yield from defaults(child, f"{path}.{name}".lstrip("."))
    if "items" in schema:
        yield from defaults(schema["items"], f"{path}[]")


def crd_defaults() -> dict[str, dict[str, Any]]:
    """Defaults of `spec` by API version and path."""
    versions = custom_resource_definition()["spec"]["versions"]
    specs = {each["name"]: each["schema"]["openAPIV3Schema"]["properties"]["spec"] for each in versions}
    return {name: dict(defaults(spec)) for name, spec in specs.items()}


def archive_operator(path: Path) -> None:
    """The packages of `operator/` as Python imports them from an archive; the same files give the same bytes."""
    folder = HERE.parents[1] / "operator"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for file in sorted(folder.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                archive.writestr(
                    zipfile.ZipInfo(str(file.relative_to(folder))), file.read_bytes(), zipfile.ZIP_DEFLATED
                )


def main() -> None:
    """Record this release."""
    target, controller = HERE / __version__, _controller()
    target.mkdir(exist_ok=False)
    for scene in SCENES:
        cluster = scene(controller).cluster
        recorded = {"objects": objects_of(cluster), "workers": cluster.worker_plans}
        text = json.dumps(recorded, indent=1, sort_keys=True)
        (target / f"{scene.__name__}.json").write_text(text + "\n")
    archive_operator(target / "operator.whl")
    (target / "defaults.json").write_text(json.dumps(crd_defaults(), indent=1, sort_keys=True) + "\n")
    print(target)


if __name__ == "__main__":
    main()
