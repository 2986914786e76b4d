"""What GitOps tools make of states of a ModelCache: Argo CD by the health check in docs/gitops, Flux by kstatus."""

from __future__ import annotations

import copy
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cache_volumes import SECOND, CacheVolumes, cache, edit, look_again, wait

from localcluster.binaries import require_tool
from localcluster.settings import ClusterError
from modelserve_operator import labels
from modelserve_operator.cluster.kinds import CLAIM, MODEL_CACHE

CHECK = Path("docs/gitops/argocd/resource_customizations/serving.modelserve.dev/ModelCache/health.lua")
PROGRESSING, HEALTHY = ("Progressing", "InProgress"), ("Healthy", "Current")
DEGRADED = ("Degraded", "Failed")


def _object(world: Any) -> dict[str, Any]:
    body = copy.deepcopy(world.cluster.objects[MODEL_CACHE, "ml", "gemma"])
    return {"apiVersion": f"{labels.GROUP}/v1alpha1", "kind": "ModelCache", **body}


def test_each_state_is_what_a_pipeline_should_take_it_for(world) -> None:
    try:
        program = require_tool("gitops", print)
    except ClusterError as error:
        pytest.skip(str(error))
    world.serve(MODEL_CACHE)
    world.cluster.remove(CLAIM, "ml", "weights")
    volumes, found = CacheVolumes(world), dict[str, dict[str, Any]]()
    cache(world, "gemma")
    found["unseen"] = _object(world)
    world.settle()
    found["no such claim"] = _object(world)
    world.cluster.put(CLAIM, {"metadata": {"name": "weights", "namespace": "ml"}, "spec": {}, "status": {}})
    world.pass_time(11.0)
    found["fetching"] = _object(world)
    volumes.broken["gemma"] = "AccessDenied"
    wait(world, volumes)
    found["no token"] = _object(world)
    del volumes.broken["gemma"]
    look_again(world, "gemma")
    wait(world, volumes)
    found["filled"] = _object(world)
    volumes.broken["gemma"] = "AccessDenied"
    look_again(world, "gemma", "again")
    wait(world, volumes)
    found["filled, and the token has run out"] = _object(world)
    del volumes.broken["gemma"]
    volumes.commits["v2"] = SECOND
    edit(world, "gemma", revision="v2")
    found["edited"] = _object(world)
    world.settle()
    found["another revision is fetched"] = _object(world)
    root = Path(__file__).resolve().parents[2]
    line = [str(program), str(root / CHECK)]
    done = subprocess.run(line, input=json.dumps(list(found.values())), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    verdicts = [(each["argo"]["status"], each["kstatus"]["status"]) for each in json.loads(done.stdout)]
    assert dict(zip(found, verdicts, strict=True)) == {
        "unseen": PROGRESSING,
        "no such claim": PROGRESSING,
        "fetching": PROGRESSING,
        "no token": DEGRADED,
        "filled": HEALTHY,
        "filled, and the token has run out": HEALTHY,
        "edited": PROGRESSING,
        "another revision is fetched": PROGRESSING,
    }
