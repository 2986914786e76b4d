"""The chart's webhook: off unless asked for, its rights what the process states, its plans the operator's."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from localcluster.binaries import require_tool
from localcluster.helm import Helm, HelmError
from localcluster.settings import ClusterError
from modelserve_operator.cluster import kinds
from modelserve_operator.settings import Settings, WebhookSettings, read

VALUES: dict[str, Any] = {
    "webhook": {"enabled": True, "replicas": 2},
    "watchNamespaces": ["team-a"],
    "userId": 1001,
    "allowed": [{"namespaces": ["*"], "images": ["registry.example/*"]}],
    "worker": {
        "image": {"repository": "registry.example/worker"},
        "policy": "Rolling",
        "imagePullSecrets": ["registry"],
    },
}
Objects = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def helm() -> Helm:
    try:
        return Helm(require_tool("helm", print))
    except ClusterError as error:
        pytest.skip(str(error))


def _objects(helm: Helm, values: dict[str, Any]) -> Objects:
    rendered = [each for each in yaml.safe_load_all(helm.template(values)) if each]
    return {(each["kind"], each["metadata"]["name"]): each for each in rendered}


@pytest.fixture(scope="module")
def objects(helm: Helm) -> Objects:
    return _objects(helm, VALUES)


NAME = "modelserve-operator-webhook"


def _pod(objects: Objects, name: str) -> dict[str, Any]:
    return objects["Deployment", name]["spec"]["template"]["spec"]  # type: ignore[no-any-return]


def test_it_is_there_only_where_it_is_asked_for(helm: Helm) -> None:
    assert [name for _, name in _objects(helm, {}) if "webhook" in name] == []


def test_it_warns_and_can_neither_refuse_nor_hold_up_for_long(objects: Objects) -> None:
    (hook,) = objects["ValidatingWebhookConfiguration", f"modelserve-system-{NAME}"]["webhooks"]
    assert (hook["failurePolicy"], hook["timeoutSeconds"], hook["sideEffects"]) == ("Ignore", 1, "None")
    (rule,) = hook["rules"]
    assert rule["resources"] == ["modelserves"], "neither status nor scale: those are written by programs"
    assert "caBundle" not in hook["clientConfig"], "Helm makes no certificate: each rendering would have another"
    assert "data" not in objects["Secret", NAME]
    assert hook["namespaceSelector"]["matchExpressions"][0]["values"] == ["team-a"]


@pytest.mark.parametrize("namespaces", [[], ["team-a"]])
def test_its_rights_are_those_that_the_process_states(helm: Helm, namespaces: list[str]) -> None:
    objects = _objects(helm, {**VALUES, "watchNamespaces": namespaces})
    cluster = objects["ClusterRole", f"modelserve-system-{NAME}"]["rules"]
    own = objects["Role", NAME]["rules"]
    named = [rule for rule in (*cluster, *own) if "resourceNames" in rule]
    granted = [rule for rule in cluster if rule not in named]
    if namespaces:
        there = objects["Role", f"modelserve-system-{NAME}"]
        assert there["metadata"]["namespace"] == "team-a"
        assert objects["RoleBinding", f"modelserve-system-{NAME}"]["subjects"][0]["name"] == NAME
        granted += there["rules"]
        assert "configmaps" not in str(cluster), "of other namespaces it reads nothing but nodes and pools"
    assert granted == [*kinds.CLUSTER_RULES, *kinds.WEBHOOK_RULES]
    trust = sorted(kinds.WEBHOOK_TRUST_RULES, key=repr)
    assert sorted(({k: v for k, v in rule.items() if k != "resourceNames"} for rule in named), key=repr) == trust
    assert {name for rule in named for name in rule["resourceNames"]} == {NAME, f"modelserve-system-{NAME}"}
    assert not any({"create", "delete", "update", "*"} & set(rule["verbs"]) for rule in (*cluster, *own))


def test_it_plans_with_the_operators_settings(objects: Objects) -> None:
    def environment(name: str) -> dict[str, str]:
        (container,) = _pod(objects, name)["containers"]
        return {each["name"]: each.get("value", "pod-name") for each in container["env"]}

    webhook = read(WebhookSettings, environment(NAME))
    operator = read(Settings, environment("modelserve-operator"))
    assert webhook.webhook_hosts == (f"{NAME}.modelserve-system.svc",)
    for field in (
        "worker_image",
        "image_pull_policy",
        "image_pull_secrets",
        "pod_user_id",
        "worker_policy",
        "namespace",
        "allowed",
    ):
        assert getattr(webhook, field) == getattr(operator, field), field
    assert webhook.worker_policy == "Rolling"


def test_its_pod_is_restricted_and_apart_from_the_operators(objects: Objects) -> None:
    pod = _pod(objects, NAME)
    assert pod["securityContext"]["runAsUser"] == 1001
    assert pod["securityContext"]["runAsNonRoot"] is True
    (container,) = pod["containers"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert pod["serviceAccountName"] == NAME
    selected = objects["Deployment", "modelserve-operator"]["spec"]["selector"]["matchLabels"].items()
    labels = objects["Deployment", NAME]["spec"]["template"]["metadata"]["labels"]
    assert not selected <= labels.items(), "the operator's Service and policy must not select it"
    assert objects["PodDisruptionBudget", NAME]["spec"]["maxUnavailable"] == 1
    (rule, _) = objects["NetworkPolicy", NAME]["spec"]["ingress"]
    assert rule == {"ports": [{"protocol": "TCP", "port": 10250}]}


@pytest.mark.parametrize("values", [{"port": 443}, {"port": 9090}, {"replicas": 0}, {"enable": True}])
def test_wrong_values_are_refused(helm: Helm, values: dict[str, Any]) -> None:
    with pytest.raises(HelmError, match="/webhook"):
        helm.template({"webhook": values})
