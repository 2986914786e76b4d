"""The release after this one, with one more field and one more key in plans, and back: no pod ends, nothing is lost.

The next release is this code with a later spec and a later plan. Both directions hold for every pair of releases from
here on.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from pydantic import Field

import modelserve.api.modelserve
import modelserve.planning.report
import modelserve_operator.planning.case
import modelserve_operator.planning.revision_builder
import modelserve_operator.revisions.imported
import modelserve_operator.revisions.revision
import modelserve_operator.revisions.spec_inputs
from modelserve.api import ModelServe, ModelServeSpec, PlanStatus
from modelserve.engine_args import SINCE, EngineArgs
from modelserve_operator.cluster.kinds import CONTROLLER_REVISION, DEPLOYMENT, MODEL_SERVE, POD

NEXT = "9.0.0"


class NextSpec(ModelServeSpec):
    compression: str = "none"  # defaulted by the CRD: it stands in every object


class NextModelServe(ModelServe):
    spec: NextSpec


class NextPlan(PlanStatus):
    tier: str | None = "first"


class NextArgs(EngineArgs):
    compression: str = Field(default="none", json_schema_extra={SINCE: NEXT})


class Releases:
    """Which release's operator runs on the world's cluster."""

    def __init__(self, world) -> None:
        self.world = world
        self._patched = pytest.MonkeyPatch()

    def next(self) -> None:
        """Upgrade: its CRD comes first, and the API server fills in the default as it reads."""
        for (kind, *_), body in self.world.cluster.objects.items():
            if kind is MODEL_SERVE:
                body["spec"].setdefault("compression", "none")
        patch = self._patched.setattr
        patch(modelserve.api.modelserve, "ModelServeSpec", NextSpec)
        patch(modelserve_operator.revisions.spec_inputs, "ModelServeSpec", NextSpec)
        patch(modelserve_operator.planning.case, "ModelServe", NextModelServe)
        patch(modelserve_operator.revisions.imported, "ModelServe", NextModelServe)
        patch(modelserve.planning.report, "PlanStatus", NextPlan)
        patch(modelserve_operator.revisions.revision, "PlanStatus", NextPlan)
        patch(modelserve_operator.planning.revision_builder, "__version__", NEXT)
        patch(modelserve_operator.planning.revision_builder, "ENGINE_VERSION", NEXT)
        patch(modelserve_operator.planning.revision_builder, "engine_args_for", _next_settings)
        self._restart()

    def this(self) -> None:
        """Roll back. The CRD stays the later one."""
        self._patched.undo()
        self._restart()

    def _restart(self) -> None:
        self.world.rest()
        self.world.restart_operator()
        self.world.settle()


def _next_settings(plan: PlanStatus, spec: NextSpec, **directories: Any) -> EngineArgs:
    before = modelserve.planning.engine_args_for(plan, spec, **directories)
    return NextArgs.model_validate({**before.model_dump(), "compression": spec.compression})


@pytest.fixture
def releases(world):
    made = Releases(world)
    yield made
    made._patched.undo()


@pytest.fixture
def served(world, releases: Releases):
    """One on two GPU nodes, committed by this release, with a bystander."""
    world.add_node("a", product="NVIDIA-H200", memory_mib=143_771, gpus=8)
    for name in ("big", "other"):
        world.create({"model": {"uri": "hf://google/gemma-4-31B-it"}, "pod": {"labels": {"team": "a"}}}, name=name)
    world.make_ready()
    return world


def _running(world) -> dict[str, Any]:
    return {
        kind.kind: {body["metadata"]["name"]: copy.deepcopy(body) for body in world.cluster.of(kind)}
        for kind in (POD, DEPLOYMENT, CONTROLLER_REVISION)
    }


def _ready(world) -> bool:
    return all(world.condition("Ready", name) == ("True", "RolledOut") for name in ("big", "other"))


def test_an_upgrade_and_a_rollback_touch_nothing_that_runs(served, releases: Releases) -> None:
    before = _running(served)
    releases.next()
    assert _running(served) == before
    assert _ready(served)
    assert served.rest().count(("patch/status", "ModelServe", "big")) <= 1
    releases.this()
    assert _running(served) == before
    assert _ready(served)
    assert "spec.compression of a later release" in served.message("Planned", "big")
    assert [event["reason"] for event in served.cluster.events].count("UnknownFields") == 2, "once for each"
    releases.next()
    assert _running(served) == before
    assert "of a later release" not in served.message("Planned", "big")


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_what_the_next_release_commits_survives_a_rollback(served, releases: Releases, compression: str) -> None:
    """Also where the field that this release does not know is in use."""
    releases.next()
    served.edit("big", context={"maxModelLen": 4096}, compression=compression)
    served.make_ready()
    (new,) = (each for each in served.cluster.of(CONTROLLER_REVISION) if each["data"]["renderer"]["release"] == NEXT)
    assert new["data"]["plan"]["tier"] == "first"
    assert new["data"]["engine"]["compression"] == compression
    before = _running(served)
    releases.this()
    assert _running(served) == before
    assert _ready(served)
    assert served.status("big")["revision"] == new["metadata"]["name"]
    served.pass_time(3600)
    assert _running(served) == before
    releases.next()
    assert _running(served) == before, "its own keys were kept"
    assert _ready(served)


def test_edits_go_on_after_a_rollback_and_after_the_next_upgrade(served, releases: Releases) -> None:
    releases.next()
    served.edit("big", context={"maxModelLen": 4096})
    served.make_ready()
    (first,) = {name for name in served.deployments() if served.deployment(name)["metadata"]["name"].startswith("big-")}
    plan = served.shown_plan("big")
    releases.this()
    served.edit("big", pod={"labels": {"team": "b"}})
    served.make_ready()
    assert _ready(served)
    plan.pop("tier")
    assert served.shown_plan("big") == plan, "the plan that the next release made, but for what this one cannot read"
    assert _team(served) == "b"
    served.edit("big", pod={"labels": {"team": "a"}})
    served.make_ready()
    assert served.status("big")["revision"] == f"big-{first}", "back to the revision of the next release"
    releases.next()
    assert _ready(served)
    served.edit("big", pod={"labels": {"team": "b"}})
    served.make_ready()
    assert _ready(served)
    assert _team(served) == "b"


def _team(world) -> str:
    name = world.status("big")["revision"]
    template = world.deployment(name.removeprefix("big-"))["spec"]["template"]
    return str(template["metadata"]["labels"]["team"])


def test_an_older_worker_gets_no_setting_that_it_does_not_know(served, releases: Releases) -> None:
    """A label under the next release keeps the worker of this one, and so its dialect."""
    releases.next()
    served.edit("big", pod={"labels": {"team": "b"}})
    served.make_ready()
    name = served.status("big")["revision"]
    data = served.cluster.objects[CONTROLLER_REVISION, "ml", name]["data"]
    assert (data["renderer"]["release"], data["worker"]["release"] == NEXT) == (NEXT, False)
    assert "compression" not in data["engine"]
    assert EngineArgs.model_validate(json.loads(json.dumps(data["engine"]))), "this release's worker reads it"
