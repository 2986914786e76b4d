"""What an installation sets for every ModelServe, the CRD it brings, and how it is seen to work from outside."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from modelserve import __version__
from modelserve.api import ModelServe
from modelserve.crd import CRD_NAME, RELEASE_ANNOTATION, custom_resource_definition
from modelserve.errors import InvalidInput
from modelserve.model.model_facts import ModelFacts
from modelserve_operator import crd_upgrade, helm_test, labels
from modelserve_operator.cluster.kinds import DEFINITION, DEPLOYMENT, DISRUPTION_BUDGET, MODEL_SERVE, SERVICE
from modelserve_operator.inventory.supply import Supply
from modelserve_operator.planning.revision_builder import RevisionBuilder, plan_for
from modelserve_operator.process.metrics import REGISTRY
from modelserve_operator.reporting import resource_metrics
from modelserve_operator.settings import Settings, from_environment
from modelserve_operator.sources import model_source


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        (
            "MODELSERVE_CHILD_LABELS",
            "team=search",
            "='team=search': Input should be a valid dict",
        ),
        ("MODELSERVE_CHILD_LABELS", '{"team": 7}', "string"),
        ("MODELSERVE_CHILD_LABELS", '{"team": "two words"}', "pattern"),
        ("MODELSERVE_SERVICE_TYPE", "ExternalName", "'ClusterIP', 'NodePort' or 'LoadBalancer'"),
        ("MODELSERVE_LEASE_NAME", "Not/A/Name", "MODELSERVE_LEASE_NAME='Not/A/Name'"),
    ],
)
def test_wrong_settings_are_named(variable: str, value: str, said: str) -> None:
    with pytest.raises(InvalidInput) as error:
        from_environment({variable: value})
    assert said in str(error.value)


def test_children_carry_the_installations_labels_and_type_and_pods_are_left_alone(ready_world: Any) -> None:
    world = ready_world
    template = world.deployment_of("tiny")["spec"]["template"]
    world.settings = Settings(
        worker_image="worker:test",
        child_labels={"team": "search", labels.MANAGED_BY: "somebody"},
        child_annotations={"example.com/owner": "me"},
        service_type="NodePort",
    )
    world.restart_operator()
    world.settle()
    for kind in (DEPLOYMENT, SERVICE, DISRUPTION_BUDGET):
        for body in world.cluster.of(kind):
            assert body["metadata"]["labels"]["team"] == "search"
            assert body["metadata"]["labels"][labels.MANAGED_BY] == "modelserve", "ours win: the watches need them"
            assert body["metadata"]["annotations"]["example.com/owner"] == "me"
    assert world.cluster.of(SERVICE)[0]["spec"]["type"] == "NodePort"
    assert world.deployment_of("tiny")["spec"]["template"] == template
    assert world.condition("Ready") == ("True", "RolledOut")
    world.rest()

    def give_port(body: dict[str, Any]) -> None:  # as the API server does
        body["spec"]["ports"][0]["nodePort"] = 31234

    world.cluster.change(SERVICE, "tiny", give_port)
    world.settle()
    assert world.rest() == []
    assert world.cluster.of(SERVICE)[0]["spec"]["ports"][0]["nodePort"] == 31234


def _pod(facts: ModelFacts, settings: Settings, **spec: Any) -> tuple[str, dict[str, Any]]:
    document = {
        "apiVersion": "serving.modelserve.dev/v1alpha1",
        "kind": "ModelServe",
        "metadata": {"name": "m", "namespace": "ml"},
        "spec": {"model": {"uri": "pvc://weights/x"}, "accelerators": {"products": ["CPU"]}, **spec},
    }
    parsed = ModelServe.parse(document).spec
    plan = plan_for(parsed, facts, Supply())
    source = model_source(parsed)
    revision = RevisionBuilder(parsed, "m", source, facts, settings).proposed(plan)
    return revision.hash, dict(revision.template["spec"])


def test_pull_secrets_of_the_installation_come_after_the_users_and_are_a_new_revision(tiny_facts: ModelFacts) -> None:
    plain, with_secrets = Settings(), Settings(image_pull_secrets=("registry", "own"))
    own = {"imagePullSecrets": [{"name": "own"}]}
    before, pod = _pod(tiny_facts, plain, pod=own)
    after, secured = _pod(tiny_facts, with_secrets, pod=own)
    assert pod["imagePullSecrets"] == [{"name": "own"}]
    assert secured["imagePullSecrets"] == [{"name": "own"}, {"name": "registry"}]
    assert before != after, "else a worker that could not pull would never get them"
    assert "imagePullSecrets" not in _pod(tiny_facts, plain)[1]


def test_the_api_key_is_a_file_that_only_the_worker_sees(tiny_facts: ModelFacts) -> None:
    _, pod = _pod(
        tiny_facts,
        Settings(),
        model={"uri": "hf://example/small"},
        apiKeySecretRef={"name": "keys", "key": "gemma"},
        pod={"env": [{"name": "MODELSERVE_API_KEY_FILE", "value": "/tmp/mine"}]},
    )
    (worker,), (*_, fetch) = pod["containers"], pod["initContainers"]
    (variable,) = [each for each in worker["env"] if each["name"] == "MODELSERVE_API_KEY_FILE"]
    (mount,) = [each for each in worker["volumeMounts"] if each["name"] == "api-key"]
    (volume,) = [each for each in pod["volumes"] if each["name"] == "api-key"]
    assert variable["value"] == f"{mount['mountPath']}/{volume['secret']['items'][0]['path']}"
    assert mount["readOnly"] is True
    assert volume["secret"]["secretName"] == "keys"
    assert volume["secret"]["items"][0]["key"] == "gemma"
    assert "api-key" not in [each["name"] for each in fetch["volumeMounts"]]
    assert "api-key" not in [each["name"] for each in _pod(tiny_facts, Settings())[1]["volumes"]]


def _definition(release: str | None, **properties: Any) -> dict[str, Any]:
    body = custom_resource_definition()
    body["metadata"] = {"name": CRD_NAME, "namespace": "", "resourceVersion": "7", "annotations": {"kept": "yes"}}
    if release is not None:
        body["metadata"]["annotations"][RELEASE_ANNOTATION] = release
    body["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"] |= properties
    body["status"] = {"conditions": [{"type": "Established", "status": "True"}]}
    return body


@pytest.mark.parametrize("release", [None, "0.0.9", __version__])
def test_a_crd_of_this_or_an_earlier_release_becomes_this_ones_as_a_whole(world: Any, release: str | None) -> None:
    world.cluster.put(DEFINITION, _definition(release, dropped={"type": "string"}))
    assert asyncio.run(crd_upgrade.bring_up_to_date(world.cluster)) is True
    (body,) = world.cluster.of(DEFINITION)
    assert body["spec"] == custom_resource_definition()["spec"]
    assert body["metadata"]["annotations"] == {"kept": "yes", RELEASE_ANNOTATION: __version__}


def test_a_crd_of_a_later_release_stays(world: Any) -> None:
    later = _definition("9.10.0", later={"type": "string"})
    world.cluster.put(DEFINITION, later)
    assert asyncio.run(crd_upgrade.bring_up_to_date(world.cluster)) is False
    assert world.cluster.of(DEFINITION)[0]["spec"] == later["spec"]


def _metrics(*, leader: int, events: int) -> str:
    return f'modelserve_operator_leader {leader}\nmodelserve_operator_watch_events_total{{kind="Node"}} {events}\n'


def test_an_installation_works_when_the_one_that_holds_the_lease_hears_the_cluster() -> None:
    answers = iter(["ok", _metrics(leader=0, events=0), "ok", _metrics(leader=1, events=3)])
    assert helm_test.problem(lambda path: next(answers), replicas=2) is None
    waiting = _metrics(leader=0, events=0)
    told = "no operator holds the Lease: 16 answers came from operators that wait for it"
    assert helm_test.problem(lambda path: waiting, replicas=2) == told
    deaf = _metrics(leader=1, events=0)
    assert "has heard nothing" in (helm_test.problem(lambda path: deaf, replicas=1) or "")

    working = _metrics(leader=1, events=3)
    assert helm_test.problem(lambda path: working, replicas=1) is None
    assert "keeps no ModelCaches" in (helm_test.problem(lambda path: working, replicas=1, caches=True) or "")
    keeping = f'{working}modelserve_operator_caches{{state="there"}} 0\n'
    assert helm_test.problem(lambda path: keeping, replicas=1, caches=True) is None

    def refuse(path: str) -> str:
        raise OSError("connection refused")

    assert "connection refused" in (helm_test.problem(refuse, replicas=1) or "")


def _value(name: str, **wanted: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"namespace": "ml", "name": "tiny", **wanted})


def test_the_status_is_told_as_metrics_and_forgotten_with_the_modelserve(ready_world: Any) -> None:
    status = ready_world.status()
    ready = {"type": "Ready", "reason": ready_world.condition("Ready")[1]}
    assert _value("modelserve_condition", **ready) == 1
    assert _value("modelserve_condition", type="Stalled", reason="") == 0
    assert [_value("modelserve_replicas", state=state) for state in ("desired", "there", "ready")] == [1, 1, 1]
    pool = status["plan"]["perGpu"]["kvPoolBytes"]
    assert _value("modelserve_planned_pool_bytes", accelerator="CPU") == pool
    target = _value("modelserve_target_concurrency", accelerator="CPU")
    assert target == resource_metrics.target_concurrency(status["plan"])
    assert target is not None
    assert 1 <= target <= status["plan"]["engine"]["maxNumSeqs"]
    ready_world.cluster.remove(MODEL_SERVE, "ml", "tiny")
    ready_world.settle()
    assert _value("modelserve_target_concurrency", accelerator="CPU") is None
    assert _value("modelserve_condition", **ready) is None


@pytest.mark.parametrize(
    ("plan", "target"),
    [
        ({}, None),
        ({"targetConcurrency": 7, "concurrency": {"at8k": "12.91", "atMax": "1.10"}}, 7),
        ({"concurrency": {"at8k": "12.91", "atMax": "1.10"}, "engine": {"maxNumSeqs": 64}}, 12),
        ({"concurrency": {"at8k": "912.9", "atMax": "1.10"}, "engine": {"maxNumSeqs": 64}}, 64),
        ({"concurrency": {"atMax": "0.50"}, "engine": {"maxNumSeqs": 64}}, 1),
        ({"candidates": [{"verdict": "Fits", "speed": {"concurrency": 9}},
                         {"verdict": "Chosen", "speed": {"concurrency": 16}}],
          "concurrency": {"atMax": "99"}, "engine": {"maxNumSeqs": 64}}, 16),
    ],
)  # fmt: skip
def test_the_target_of_an_autoscaler_is_what_the_plan_answers_at_once(plan: dict[str, Any], target: int | None) -> None:
    """As it states itself, or as follows from one of a release that did not."""
    assert resource_metrics.target_concurrency(plan) == target
