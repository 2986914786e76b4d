"""Requests and limits of every container: always there, limits at or above requests, the user's figures first."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelserve.api import ModelServeSpec, PlanStatus
from modelserve.api.schema_types import quantity_value
from modelserve.model.adapters.addresses import DOWNLOADS_BYTES
from modelserve.model.model_facts import ModelFacts
from modelserve_operator.cluster.kinds import DEPLOYMENT
from modelserve_operator.inventory.pools import Pool
from modelserve_operator.inventory.supply import Supply
from modelserve_operator.manifests.inspect_job import inspect_job
from modelserve_operator.manifests.pod_resources import worker_resources
from modelserve_operator.planning.revision_builder import RevisionBuilder, plan_for
from modelserve_operator.settings import Settings
from modelserve_operator.sources import model_source

H200 = Pool((("nvidia.com/gpu.product", "NVIDIA-H200"),), resources=(("nvidia.com/gpu", "8"),))
QUANTITIES = st.sampled_from(["1", "250m", "3", "9", "64Mi", "1Gi", "3Gi", "100Gi", "1e3"])
NAMES = ("cpu", "memory", "ephemeral-storage")


def _pod(facts: ModelFacts, **fields: Any) -> dict[str, Any]:
    spec = ModelServeSpec.model_validate({"model": {"uri": "pvc://weights/x"}, **fields})
    plan = plan_for(spec, facts, Supply(pools=(H200,)))
    settings = Settings(worker_image="worker:test")
    revision = RevisionBuilder(spec, "m", model_source(spec), facts, settings).proposed(plan)
    return dict(revision.template["spec"])


def _check(resources: dict[str, Any], *names: str) -> None:
    for name in names:
        assert quantity_value(resources["requests"][name]) <= quantity_value(resources["limits"][name]), name


@given(
    requests=st.dictionaries(st.sampled_from(NAMES), QUANTITIES),
    limits=st.dictionaries(st.sampled_from(NAMES), QUANTITIES),
    tensor_parallel=st.sampled_from([1, 2, 8]),
    on_cpu=st.booleans(),
    downloaded=st.sampled_from([None, 0, 60 << 30]),
)
def test_limits_are_at_or_above_requests_and_the_users_figures_win(
    requests: dict[str, str], limits: dict[str, str], tensor_parallel: int, on_cpu: bool, downloaded: int | None
) -> None:
    contradiction = {n for n in requests if n in limits and quantity_value(requests[n]) > quantity_value(limits[n])}
    plan = PlanStatus(
        tensor_parallel=tensor_parallel,
        container_memory_bytes=4 << 30 if on_cpu else None,
        resource_name=None if on_cpu else "nvidia.com/gpu",
        gpus_per_replica=0 if on_cpu else tensor_parallel,
    )
    made = worker_resources({"requests": requests, "limits": limits}, plan, downloaded_bytes=downloaded)
    for side, users in (("requests", requests), ("limits", limits)):
        theirs = {name: value for name, value in users.items() if not (on_cpu and (side, name) == ("limits", "memory"))}
        assert made[side] | theirs == made[side]
    if on_cpu:
        contradiction.add("memory")  # the plan divides the limit that the user gave, or the default
    _check(made, *({"cpu", "memory"} - contradiction))
    if downloaded is not None:
        _check(made, *({"ephemeral-storage"} - contradiction))
        if "ephemeral-storage" not in requests and "ephemeral-storage" not in limits:
            assert quantity_value(made["requests"]["ephemeral-storage"]) > downloaded
    assert made["limits"].get("nvidia.com/gpu") == (None if on_cpu else str(tensor_parallel))
    assert "nvidia.com/gpu" not in made["requests"]


def test_a_memory_request_alone_is_what_the_cpu_worker_is_planned_with(tiny_facts: ModelFacts) -> None:
    asked = {"resources": {"requests": {"memory": "6Gi"}}}
    pod = _pod(tiny_facts, accelerators={"products": ["CPU"]}, pod=asked)
    resources = pod["containers"][0]["resources"]
    assert resources["requests"]["memory"] == "6Gi"
    assert resources["limits"]["memory"] == str(6 << 30)
    _check(resources, "memory", "cpu")


def test_a_gpu_worker_is_no_best_effort_and_the_weights_are_no_part_of_its_memory(tiny_facts: ModelFacts) -> None:
    heavy = tiny_facts.model_copy(update={"weight_bytes": 60 << 30})
    resources = [_pod(facts)["containers"][0]["resources"] for facts in (tiny_facts, heavy)]
    assert resources[0]["requests"]["memory"] == resources[1]["requests"]["memory"] == str((49 << 30) // 8 + (32 << 20))
    assert resources[0]["limits"]["memory"] == str((49 << 30) // 4 + (64 << 20))
    assert set(resources[0]["requests"]) == {"cpu", "memory"}, "a claim holds the weights"
    grouped = _pod(tiny_facts, parallelism={"tensor": 2})["containers"][0]["resources"]
    assert int(grouped["requests"]["memory"]) == (85 << 30) // 8 + (32 << 20), "two ranks and their shared memory"


def test_host_memory_for_cached_prefixes_is_asked_for_once_and_beside_the_rest(tiny_facts: ModelFacts) -> None:
    bare, asked = (
        _pod(tiny_facts, **fields)["containers"][0]["resources"] for fields in ({}, {"kvCache": {"hostMemory": "8Gi"}})
    )
    for side in ("requests", "limits"):
        assert int(asked[side]["memory"]) - int(bare[side]["memory"]) == 8 << 30
    on_cpu = _pod(tiny_facts, accelerators={"products": ["CPU"]}, kvCache={"hostMemory": "8Gi"})
    assert on_cpu["containers"][0]["resources"]["limits"]["memory"] == str(4 << 30), "the pool is host memory there"


def test_a_download_into_scratch_space_asks_for_the_room_and_costs_nothing_more(tiny_facts: ModelFacts) -> None:
    facts = tiny_facts.model_copy(update={"weight_bytes": 60 << 30})
    pod = _pod(facts, model={"uri": "hf://example/x"}, pod={"resources": {"requests": {"memory": "20Gi"}}})
    (*_, fetch), (worker,) = pod["initContainers"], pod["containers"]
    assert int(worker["resources"]["requests"]["ephemeral-storage"]) > 60 << 30
    gpus = {"nvidia.com/gpu"}
    for side in ("requests", "limits"):
        assert fetch["resources"][side] == {
            name: value for name, value in worker["resources"][side].items() if name not in gpus
        }
    assert fetch["resources"]["requests"]["memory"] == "20Gi"
    assert fetch["resources"]["limits"]["memory"] == str(20 << 30), "a limit yields to a higher request"
    kept = _pod(facts, model={"uri": "hf://example/x"}, storage={"pvcName": "cache"})
    assert "ephemeral-storage" not in kept["containers"][0]["resources"]["requests"]


def test_room_for_adapters_that_are_downloaded_is_asked_for_where_there_may_be_some(tiny_facts: ModelFacts) -> None:
    def asked(**fields: Any) -> int | None:
        resources = _pod(tiny_facts, **fields)["containers"][0]["resources"]
        if "ephemeral-storage" in resources["requests"]:
            _check(resources, "ephemeral-storage")
            return int(quantity_value(resources["requests"]["ephemeral-storage"]))
        return None

    room = {"adapters": {"max": 4}}
    hub = {"model": {"uri": "hf://me/x"}}
    assert asked() is None
    assert asked(**room) == DOWNLOADS_BYTES
    without, beside = asked(**hub), asked(**hub, **room)
    assert without is not None
    assert beside == without + DOWNLOADS_BYTES


@pytest.mark.parametrize("uri", ["pvc://weights/x", "hf://example/x"])
def test_every_container_of_the_inspection_states_both_sides(uri: str) -> None:
    spec = ModelServeSpec.model_validate({"model": {"uri": uri}})
    owner = {"metadata": {"name": "m", "namespace": "ml", "uid": "u"}}
    job = inspect_job(owner, spec, source=model_source(spec), image="i", pull_policy="Always", user_id=65532)
    pod = job["spec"]["template"]["spec"]
    for container in (*pod["containers"], *pod.get("initContainers", ())):
        _check(container["resources"], "cpu", "memory", "ephemeral-storage")


def test_a_committed_revision_keeps_its_template(ready_world) -> None:
    (before,) = ready_world.cluster.of(DEPLOYMENT)
    ready_world.settings = ready_world.settings.model_copy(update={"image_pull_policy": "Always"})
    ready_world.rest()
    ready_world.restart_operator()
    ready_world.settle()
    assert ready_world.rest() == []
    ready_world.edit(context={"maxModelLen": 1024})
    (kept, new) = sorted(
        ready_world.cluster.of(DEPLOYMENT), key=lambda body: body["metadata"]["uid"] != before["metadata"]["uid"]
    )
    assert kept == before
    policies = [each["spec"]["template"]["spec"]["containers"][0]["imagePullPolicy"] for each in (kept, new)]
    assert policies == ["IfNotPresent", "Always"]


def test_a_port_for_events_is_the_pods_and_its_address_names_it(tiny_facts: ModelFacts) -> None:
    (worker,) = _pod(tiny_facts, engine={"kvEventsPort": 15_557})["containers"]
    assert {"name": "kv-events", "containerPort": 15_557, "protocol": "TCP"} in worker["ports"]
    assert {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}} in worker["env"]
    (bare,) = _pod(tiny_facts)["containers"]
    assert [port["name"] for port in bare["ports"]] == ["http"]
    assert "POD_IP" not in {each["name"] for each in bare["env"]}
