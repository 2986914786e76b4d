"""The chart as real Helm renders it: its rules are the operator's, its settings exist, wrong values are refused."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from localcluster import network_policy
from localcluster.binaries import require_tool
from localcluster.helm import CHART, Helm, HelmError
from localcluster.openshift import refusals
from localcluster.settings import ClusterError
from modelserve import __version__
from modelserve.catalogue import CatalogueEntry, user_catalogue
from modelserve.crd import DEFINITIONS, crd_yaml
from modelserve_operator.allowed import AllowRule
from modelserve_operator.cluster import kinds
from modelserve_operator.inventory.pools import PassingTaints
from modelserve_operator.settings import Settings, from_environment

ROOT = Path(__file__).parents[2]
NAMESPACED: dict[str, Any] = {
    "watchNamespaces": ["team-a", "team-b"],
    "workerAccess": "api-proxy",
    "replicas": 2,
    "imagePullSecrets": ["registry"],
    "image": {"repository": "registry.example/operator", "digest": "sha256:" + "a" * 64},
    "worker": {"imagePullSecrets": ["registry", "second"]},
    "allowed": [{"namespaces": ["team-a"], "gateways": ["gateways/public"], "bufferReplicas": 2}],
    "startupTaints": ["example.com/boots", "a/"],
    "leavingTaints": ["example.com/drained"],
    "children": {"labels": {"team": "search"}, "annotations": {"a/b": "c"}, "serviceType": "LoadBalancer"},
    "accelerators": {
        "NVIDIA-H300": {
            "memoryMiB": 200000,
            "bandwidthGBps": 6000,
            "bfloat16TFLOPS": 1500,
            "computeCapability": "9.0",
            "gpusPerNode": 8,
        }
    },
    "networkPolicy": {"workers": {"namespaces": ["team-b", "team-c"]}},
    "monitoring": {name: {"enabled": True} for name in ("serviceMonitor", "prometheusRule", "dashboard")},
    "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
}
Objects = list[dict[str, Any]]


@pytest.fixture(scope="module")
def helm() -> Helm:
    try:
        return Helm(require_tool("helm", print))
    except ClusterError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def plain(helm: Helm) -> Objects:
    return [each for each in yaml.safe_load_all(helm.template({})) if each]


@pytest.fixture(scope="module")
def namespaced(helm: Helm) -> Objects:
    return [each for each in yaml.safe_load_all(helm.template(NAMESPACED)) if each]


def _of(objects: Objects, kind: str) -> dict[str, dict[str, Any]]:
    return {f"{each['metadata'].get('namespace', '')}/{each['metadata']['name']}": each for each in objects
            if each["kind"] == kind}  # fmt: skip


def _rules(body: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"apiGroups": r["apiGroups"], "resources": r["resources"], "verbs": r["verbs"]} for r in body["rules"]]


def test_lint_finds_nothing(helm: Helm) -> None:
    assert "0 chart(s) failed" in helm.lint(NAMESPACED)


def test_the_chart_is_of_this_release_and_its_crd_the_generated_one() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == __version__
    for each in DEFINITIONS:
        assert (CHART / "crds" / each.file_name).read_text() == crd_yaml(each), "run `make crds`"


def test_cluster_wide_the_rules_are_the_operators(plain: Objects) -> None:
    roles = _of(plain, "ClusterRole")
    granted = _rules(roles["/modelserve-system-modelserve-operator"])
    assert granted == [*kinds.CLUSTER_RULES, *kinds.NAMESPACED_RULES]
    _own_rules(plain)
    assert list(_of(plain, "Role")) == ["modelserve-system/modelserve-operator"]


def test_for_two_namespaces_the_rules_are_the_operators_and_in_those_alone(namespaced: Objects) -> None:
    assert _rules(_of(namespaced, "ClusterRole")["/modelserve-system-modelserve-operator"]) == [*kinds.CLUSTER_RULES]
    roles = _of(namespaced, "Role")
    assert {name.partition("/")[0] for name in roles} == {"modelserve-system", "team-a", "team-b"}
    for namespace in ("team-a", "team-b"):
        granted = _rules(roles[f"{namespace}/modelserve-system-modelserve-operator"])
        assert granted == [*kinds.NAMESPACED_RULES, *kinds.API_PROXY_RULES]
    _own_rules(namespaced)


def _own_rules(objects: Objects) -> None:
    body = _of(objects, "Role")["modelserve-system/modelserve-operator"]
    granted = {(r, v) for rule in body["rules"] for r in rule["resources"] for v in rule["verbs"]}
    assert granted == {(r, v) for rule in kinds.OWN_RULES for r in rule["resources"] for v in rule["verbs"]}
    for rule in body["rules"]:
        assert rule.get("resourceNames") or rule["verbs"] == ["create"]


def test_claims_are_written_where_caches_are_kept(helm: Helm) -> None:
    values = {"modelCaches": {"enabled": True, "fetches": 7}}
    found = [each for each in yaml.safe_load_all(helm.template(values)) if each]
    granted = _rules(_of(found, "ClusterRole")["/modelserve-system-modelserve-operator"])
    assert granted == [*kinds.CLUSTER_RULES, *kinds.NAMESPACED_RULES, *kinds.CACHE_RULES]
    deployment = _of(found, "Deployment")["modelserve-system/modelserve-operator"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    told = {each["name"]: each.get("value") for each in container["env"]}
    assert (told["MODELSERVE_MODEL_CACHES"], told["MODELSERVE_CACHE_FETCHES"]) == ("true", "7")


def test_no_secret_is_read_and_no_pod_is_privileged(plain: Objects, namespaced: Objects) -> None:
    for body in (*plain, *namespaced):
        if body["kind"] in ("Role", "ClusterRole"):
            for rule in body["rules"]:
                assert "*" not in rule["verbs"]
                if "secrets" in rule["resources"]:
                    assert rule["resourceNames"] == ["modelserve-operator-management"], "its own, which it makes"
        for pod in _pod_specs(body):
            assert pod["securityContext"]["runAsNonRoot"] is True
            assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            assert not any("hostPath" in volume for volume in pod.get("volumes", ()))
            for container in pod["containers"]:
                security = container["securityContext"]
                assert security["readOnlyRootFilesystem"] is True
                assert security["allowPrivilegeEscalation"] is False
                assert security["capabilities"] == {"drop": ["ALL"]}
                assert {"cpu", "memory"} <= set(container["resources"]["requests"])


def _pod_specs(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if body["kind"] == "Pod":
        yield body["spec"]
    if body["kind"] in ("Deployment", "Job"):
        yield body["spec"]["template"]["spec"]


def _environment(objects: Objects) -> dict[str, str]:
    (deployment,) = _of(objects, "Deployment").values()
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return {each["name"]: each.get("value", "pod-name") for each in container["env"]}


def test_its_values_become_settings_that_the_operator_reads(plain: Objects, namespaced: Objects) -> None:
    settings = from_environment(_environment(namespaced))
    assert settings.watch_namespaces == ("team-a", "team-b")
    assert settings.image_pull_secrets == ("registry", "second")
    assert settings.child_labels == {"team": "search"}
    assert settings.allowed == (AllowRule(namespaces=("team-a",), gateways=("gateways/public",), buffer_replicas=2),)
    assert settings.child_annotations == {"a/b": "c"}
    assert settings.passing == PassingTaints(("example.com/boots", "a/"), ("example.com/drained",))
    assert settings.service_type == "LoadBalancer"
    assert (settings.lease_name, settings.lease_holder) == ("modelserve-operator", "pod-name")
    assert settings.worker_access == "api-proxy"
    assert settings.namespace == "modelserve-system"
    default = from_environment(_environment(plain))
    changed = {"lease_name", "lease_holder", "management_secret"}  # the chart always elects, and names its objects
    assert default.model_dump(exclude=changed) == Settings().model_dump(exclude=changed)


@pytest.mark.parametrize(
    ("values", "served", "user"),
    [
        ({}, (), 65532),
        ({}, ("security.openshift.io/v1",), None),
        ({"userId": "assigned"}, (), None),
        ({"userId": 1001}, ("security.openshift.io/v1",), 1001),
    ],
    ids=["anywhere", "openshift", "assigned", "chosen"],
)
def test_the_platform_assigns_the_user_where_it_wants_to(
    helm: Helm, values: dict[str, Any], served: tuple[str, ...], user: int | None
) -> None:
    objects = [each for each in yaml.safe_load_all(helm.template(values, served=served)) if each]
    pods = [pod for body in objects for pod in _pod_specs(body)]
    assert len(pods) >= 2
    assert {pod["securityContext"].get("runAsUser") for pod in pods} == {user}
    assert {pod["securityContext"].get("runAsGroup") for pod in pods} == {user}
    assert from_environment(_environment(objects)).pod_user_id == user, "the workers' too"
    if user is None:
        assert [refusal for pod in pods for refusal in refusals(pod)] == []


def test_images_are_named_by_digest_or_by_the_charts_release(plain: Objects, namespaced: Objects) -> None:
    images = {container["image"] for body in namespaced for pod in _pod_specs(body) for container in pod["containers"]}
    assert images == {"registry.example/operator@sha256:" + "a" * 64}
    assert _environment(plain)["MODELSERVE_WORKER_IMAGE"] == f"modelserve-worker:{__version__}"
    for body in namespaced:
        for pod in _pod_specs(body):
            assert pod["imagePullSecrets"] == [{"name": "registry"}]


def test_accelerators_are_what_the_catalogue_reads(namespaced: Objects) -> None:
    body = _of(namespaced, "ConfigMap")["modelserve-system/modelserve-accelerators"]
    assert user_catalogue(body["data"])["NVIDIA-H300"].product == "NVIDIA-H300"
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert schema["properties"]["accelerators"]["additionalProperties"] == CatalogueEntry.model_json_schema()


def test_the_lease_is_renewed_past_tenants_and_two_operators_are_on_two_nodes(
    plain: Objects, namespaced: Objects
) -> None:
    (schema,) = _of(plain, "FlowSchema").values()
    assert schema["spec"]["priorityLevelConfiguration"] == {"name": "leader-election"}
    ((subject,), (rule,)) = (schema["spec"]["rules"][0][part] for part in ("subjects", "resourceRules"))
    assert subject["serviceAccount"] == {"name": "modelserve-operator", "namespace": "modelserve-system"}
    assert (rule["resources"], rule["namespaces"]) == (["leases"], ["modelserve-system"])
    assert (
        "topologySpreadConstraints"
        not in _of(plain, "Deployment")["modelserve-system/modelserve-operator"]["spec"]["template"]["spec"]
    )
    two = _of(namespaced, "Deployment")["modelserve-system/modelserve-operator"]["spec"]["template"]
    (spread,) = two["spec"]["topologySpreadConstraints"]
    assert (spread["topologyKey"], spread["whenUnsatisfiable"]) == ("kubernetes.io/hostname", "ScheduleAnyway")
    assert spread["labelSelector"]["matchLabels"].items() <= two["metadata"]["labels"].items()


def test_the_rules_of_what_is_allowed_are_the_operators() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert schema["properties"]["allowed"]["items"] == AllowRule.model_json_schema(by_alias=True)


def test_authors_are_asked_for_their_rights_unless_it_is_switched_off(helm: Helm, namespaced: Objects) -> None:
    kinds_made = [each["kind"] for each in namespaced if each["kind"].startswith("ValidatingAdmissionPolicy")]
    assert kinds_made == ["ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"]
    (policy,) = _of(namespaced, "ValidatingAdmissionPolicy").values()
    constraints = policy["spec"]["matchConstraints"]
    (rule,) = constraints["resourceRules"]
    assert rule["resources"] == ["modelserves", "modelcaches"], "no subresource"
    assert rule["operations"] == ["CREATE", "UPDATE"]
    assert constraints["namespaceSelector"]["matchExpressions"][0]["values"] == ["team-a", "team-b"]
    assert "ValidatingAdmissionPolicy" not in helm.template({"accessPolicy": {"enabled": False}})


def test_the_crd_is_no_part_of_the_release(plain: Objects) -> None:
    for body in plain:
        assert body["kind"] != "CustomResourceDefinition"
        if body["metadata"]["name"].endswith("-crd"):
            hooks = body["metadata"]["annotations"]["helm.sh/hook"].split(",")
            assert hooks == ["pre-install", "pre-upgrade", "pre-rollback"]


def test_policies_are_made_for_the_namespaces_of_workers(plain: Objects, namespaced: Objects) -> None:
    assert len(_of(plain, "NetworkPolicy")) == 1
    made = {name.partition("/")[0] for name in _of(namespaced, "NetworkPolicy")}
    assert made == {"modelserve-system", "team-a", "team-b", "team-c"}


@pytest.mark.parametrize("protocol", ["UDP", "TCP"])
def test_names_are_looked_up_wherever_the_cluster_keeps_its_dns(namespaced: Objects, protocol: str) -> None:
    named = _of(namespaced, "NetworkPolicy")
    policies = list(named.values())
    managed = {"app.kubernetes.io/managed-by": "modelserve"}
    worker = network_policy.Peer("10.1.0.1", "team-a", managed | {"app.kubernetes.io/component": "worker"})
    inspection = network_policy.Peer("10.1.0.2", "team-c", managed | {"app.kubernetes.io/component": "inspection"})
    selector = named["modelserve-system/modelserve-operator"]["spec"]["podSelector"]["matchLabels"]
    operator = network_policy.Peer("10.1.0.3", "modelserve-system", selector)

    def pod(namespace: str) -> network_policy.Peer:
        return network_policy.Peer("10.2.0.1", namespace, {"app": "x"}, {"kubernetes.io/metadata.name": namespace})

    for source in (worker, inspection, operator):
        for target, port, expected in (
            (pod("kube-system"), 53, True),
            (network_policy.Peer("169.254.20.10"), 53, True),  # a cache on the node
            (pod("openshift-dns"), 5353, True),  # where OpenShift's Service leads
            (pod("openshift-dns"), 9154, False),
            (pod("elsewhere"), 5353, False),
            (network_policy.Peer("1.2.3.4"), 5353, False),
        ):
            asked = network_policy.allowed(policies, source=source, target=target, port=port, protocol=protocol)
            assert asked is expected, (source, target, port)


@pytest.mark.parametrize(
    ("release", "namespace"),
    [("modelserve-" + "a" * 38 + "-re", "ml"), ("2024", "77"), ("on", "true"), ("a.b", "ml")],
    ids=["cut_at_a_dash", "numbers", "words_of_yaml", "dots"],
)
def test_every_name_of_a_release_and_namespace_is_text_that_kubernetes_takes(
    helm: Helm, release: str, namespace: str
) -> None:
    rendered = replace(helm, release=release, namespace=namespace).template(
        {**NAMESPACED, "watchNamespaces": ["0", "a"]}
    )
    objects = [each for each in yaml.safe_load_all(rendered) if each]
    assert len(objects) > 20
    for each in objects:
        metadata = each["metadata"]
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", metadata["name"]), metadata["name"]
        for text in (metadata.get("namespace", ""), *metadata.get("labels", {}).values(), *_selected(each)):
            assert isinstance(text, str), (each["kind"], text)
    (deployment,) = _of(objects, "Deployment").values()
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert {"name": "MODELSERVE_NAMESPACE", "value": namespace} in container["env"]


def _selected(body: dict[str, Any]) -> Iterator[Any]:
    """Values of every selector in an object, and namespaces of its subjects."""
    yield from (each["namespace"] for each in body.get("subjects", ()))
    waiting: list[Any] = [body.get("spec")]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            yield from (each.get("matchLabels") or {}).values()
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each


def test_labels_of_the_release_are_not_those_of_children(namespaced: Objects) -> None:
    """The operator watches its children by managed-by: the accelerators alone are meant to be seen."""
    ours = [each["metadata"]["name"] for each in namespaced
            if each["metadata"]["labels"].get("app.kubernetes.io/managed-by") == "modelserve"]  # fmt: skip
    assert ours == ["modelserve-accelerators"]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"replcas": 2}, "replcas"),
        ({"replicas": "two"}, "/replicas"),
        ({"replicas": 9}, "/replicas"),
        ({"watchNamespaces": "team-a"}, "/watchNamespaces"),
        ({"watchNamespaces": ["Team_A"]}, "/watchNamespaces/0"),
        ({"image": {"digest": "sha256:abc"}}, "/image/digest"),
        ({"worker": {"image": {"pullPolicy": "Sometimes"}}}, "/worker/image/pullPolicy"),
        ({"children": {"labels": {"app.kubernetes.io/name": "mine"}}}, "invalid propertyName 'app.kubernetes.io/name'"),
        ({"children": {"labels": {"team": 7}}}, "/children/labels/team"),
        ({"children": {"serviceType": "ExternalName"}}, "/children/serviceType"),
        ({"accelerators": {"NVIDIA-H300": {"memoryGiB": 200}}}, "/accelerators/NVIDIA-H300"),
        ({"networkPolicy": {"apiServer": {"ports": [99999]}}}, "/networkPolicy/apiServer/ports/0"),
        (
            {"networkPolicy": {"workers": {"clientsFrom": [{"podselector": {}}]}}},
            "/networkPolicy/workers/clientsFrom/0",
        ),
        ({"resyncSeconds": 5}, "/resyncSeconds"),
        ({"allowed": [{"gateways": ["*"]}]}, "/allowed/0"),
        ({"allowed": [{"namespaces": ["*"], "hostname": ["x"]}]}, "/allowed/0"),
        ({"serviceAccount": {"create": False}}, "serviceAccount.name is needed"),
    ],
)
def test_wrong_values_are_refused_with_their_path(helm: Helm, values: dict[str, Any], said: str) -> None:
    with pytest.raises(HelmError, match=re.escape(said)):
        helm.template(values)


def test_every_value_is_in_the_schema_and_has_its_default() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def check(value: Any, node: dict[str, Any], path: str) -> None:
        if node.get("additionalProperties") is False:
            assert set(value) <= set(node["properties"]), path
            for key, inner in value.items():
                check(inner, node["properties"][key], f"{path}.{key}")

    check(values, schema, "")
    assert set(schema["properties"]) - set(values) == {"global"}


@pytest.mark.parametrize("image", ["operator", "worker"])
def test_images_are_built_from_the_pinned_requirements(image: str) -> None:
    pins = _blocks(ROOT / "requirements.txt")
    own = _blocks(ROOT / "images" / image / "requirements.txt")
    assert own.items() <= pins.items()
    assert ("torch" in own) is (image == "worker")
    assert "kopf" not in own or image == "operator"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {"operator": ("operator",), "worker": ("worker", "otel")}[image]
    stated = [*project["dependencies"], *(each for extra in extras for each in project["optional-dependencies"][extra])]
    assert {re.split("[>=<~]", each)[0] for each in stated} <= own.keys()


def _blocks(path: Path) -> dict[str, str]:
    """Pin and hashes by the name of the distribution."""
    lines = path.read_text().replace("\\\n", " ").splitlines()
    return {line.partition("==")[0]: " ".join(line.split()) for line in lines if line.strip()}
