"""What GitOps tools make of states of a ModelAdapter: Argo CD by the health check in docs/gitops, Flux by kstatus."""

from __future__ import annotations

import copy
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from adapter_workers import AdapterFleet, adapter, edit, wait

from localcluster.binaries import require_tool
from localcluster.settings import ClusterError
from modelserve_operator import labels
from modelserve_operator.cluster.kinds import MODEL_ADAPTER

CHECK = Path("docs/gitops/argocd/resource_customizations/serving.modelserve.dev/ModelAdapter/health.lua")
PROGRESSING, HEALTHY = ("Progressing", "InProgress"), ("Healthy", "Current")
DEGRADED = ("Degraded", "Failed")


def _object(world: Any) -> dict[str, Any]:
    body = copy.deepcopy(world.cluster.objects[MODEL_ADAPTER, "ml", "legal"])
    return {"apiVersion": f"{labels.GROUP}/v1alpha1", "kind": "ModelAdapter", **body}


def test_each_state_is_what_a_pipeline_should_take_it_for(world, tiny_spec, tiny_facts) -> None:
    try:
        program = require_tool("gitops", print)
    except ClusterError as error:
        pytest.skip(str(error))
    world.serve(MODEL_ADAPTER)
    fleet = AdapterFleet(world.cluster, limit=8)
    found: dict[str, dict[str, Any]] = {}
    adapter(world, "legal")
    found["unseen"] = _object(world)
    world.settle()
    found["no such model"] = _object(world)
    world.create({**tiny_spec, "adapters": {"max": 8}})
    world.cluster.end_job(message=tiny_facts.model_dump_json(by_alias=True))
    world.settle()
    found["no workers"] = _object(world)
    world.make_ready()
    found["loading"] = _object(world)
    wait(world)
    found["serving"] = _object(world)
    edit(world, "legal", uri="hf://team/legal-2")
    found["edited"] = _object(world)
    world.settle()
    found["rolling out"] = _object(world)
    wait(world)
    fleet.broken["hf://team/legal-3"] = "NoEffect"
    edit(world, "legal", uri="hf://team/legal-3")
    wait(world)
    found["broken"] = _object(world)
    root = Path(__file__).resolve().parents[2]
    line = [str(program), str(root / CHECK)]
    done = subprocess.run(line, input=json.dumps(list(found.values())), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    verdicts = [(each["argo"]["status"], each["kstatus"]["status"]) for each in json.loads(done.stdout)]
    assert dict(zip(found, verdicts, strict=True)) == {
        "unseen": PROGRESSING,
        "no such model": PROGRESSING,
        "no workers": PROGRESSING,
        "loading": PROGRESSING,
        "serving": HEALTHY,
        "edited": PROGRESSING,
        "rolling out": PROGRESSING,
        "broken": DEGRADED,
    }
