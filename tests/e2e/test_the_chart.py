"""The way into a cluster that is not ours: images are built, the chart is installed, and lives through what charts live
through. The tests are one story and run in this order; each leaves an installed release behind.
"""

from __future__ import annotations

import subprocess
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from localcluster import audit, connections, image_build, network_policy, operator_process, promql
from localcluster.binaries import require_tool
from localcluster.crds import install_crds
from localcluster.deployment import CHECKPOINT, Deployed, apply_example, example
from localcluster.helm import CHART, Helm
from localcluster.kubectl import Kubectl, condition, wait_for
from localcluster.service_access import service_url
from localcluster.settings import IMAGE_RUNTIME, OPERATOR_USER, RELEASE_NAMESPACES, REPOSITORY, Layout
from localcluster.target import Target
from localcluster.traffic import traffic_to
from modelserve.crd import FILE_NAME
from modelserve_operator.cluster.kinds import ADMISSION_VERBS
from modelserve_operator.settings import Settings

NAMESPACE = "modelserve-e2e"
SYSTEM, TENANT = RELEASE_NAMESPACES
CRD = "modelserves.serving.modelserve.dev"
RELEASE = f"{CRD.partition('.')[2]}/release"
VALUES: dict[str, Any] = {
    "image": {"repository": image_build.image_name("operator"), "tag": image_build.TAG, "pullPolicy": "Never"},
    "worker": {
        "image": {"repository": image_build.image_name("worker"), "tag": image_build.TAG, "pullPolicy": "Never"}
    },
    "runtimeClassName": IMAGE_RUNTIME,
    "replicas": 2,
    "modelCaches": {"enabled": True},
    "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "1Gi"}},
    "networkPolicy": {"workers": {"namespaces": [NAMESPACE]}},
}
NOT_OF_EVERY_SUITE = {  # rules for what happens seldom, and in no test of this cluster
    ("karpenter.sh", "nodepools", "watch"),  # only where Karpenter is installed when the operator starts
    *(("", "podtemplates", verb) for verb in ("get", "patch", "delete")),  # of spec.capacityBuffer
    *(("autoscaling.x-k8s.io", "capacitybuffers", verb) for verb in ("get", "watch", "patch", "delete")),
    *(("resource.k8s.io", "resourceclaimtemplates", verb) for verb in ("get", "patch", "delete")),  # of plans by claims
    ("resource.k8s.io", "resourceclaims", "get"),  # where a pod waits for devices that a rollout would give up
    *(("gateway.networking.k8s.io", "httproutes", verb) for verb in ("get", "watch", "patch", "delete")),
    *(("inference.networking.k8s.io", "inferencepools", verb) for verb in ("get", "watch", "patch", "delete")),
    *(
        ("inference.networking.x-k8s.io", "inferencemodelrewrites", verb)
        for verb in ("get", "watch", "patch", "delete")
    ),
    ("gateway.networking.k8s.io", "referencegrants", "watch"),  # likewise
    ("serving.modelserve.dev", "modeladapters", "get"),  # where one has changed while it was to be patched
    ("", "pods", "patch"),  # where a node is drained under onEviction SurgeFirst
    ("", "pods", "get"),  # where one has changed while it was to be patched
    ("", "events", "list"),  # where a pod hangs before its containers begin, or a Job gets none
    ("serving.modelserve.dev", "modelserves", "get"),  # after a status write that lost a race
    ("serving.modelserve.dev", "modelcaches", "get"),  # likewise
    ("", "persistentvolumeclaims", "patch"),  # of a cache's claim, which is written once: as all of the kind
    ("apps", "controllerrevisions", "delete"),  # of revisions beyond the history limit
}


@pytest.fixture(scope="module")
def layout(cluster: Target) -> Layout:
    assert cluster.local is not None, "built_images skips other clusters"
    return cluster.local


@pytest.fixture(scope="module")
def helm(cluster: Target, built_images: None) -> Helm:
    return Helm(require_tool("helm", print), namespace=SYSTEM, kubeconfig=cluster.kubectl.kubeconfig)


@pytest.fixture(scope="module")
def watched() -> Iterator[connections.Watch]:
    with connections.watching() as watch:
        yield watch


@pytest.fixture(scope="module")
def imaged(cluster: Target, helm: Helm, layout: Layout, watched: connections.Watch) -> Iterator[Deployed]:
    """A ModelServe that runs the image, under a release that came over kubectl's CRD and a ModelServe that serves."""
    tiny = apply_example(cluster, NAMESPACE, "tiny")
    operator_process.start(cluster)
    tiny.wait_ready()
    operator_process.stop(layout)  # with its files: the next test that needs it starts it anew
    # The chart brings its own, and Helm takes over nothing that is there.
    cluster.kubectl.delete("secret", Settings.model_fields["management_secret"].default, "-n", SYSTEM)
    runtime = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": IMAGE_RUNTIME}}
    cluster.kubectl.apply({**runtime, "handler": IMAGE_RUNTIME}, *(_restricted(name) for name in RELEASE_NAMESPACES))
    helm.install(VALUES)
    served = apply_example(cluster, NAMESPACE, "imaged", pod=_pod())
    yield served
    for namespace in RELEASE_NAMESPACES:
        installed = Helm(helm.program, namespace=namespace, kubeconfig=helm.kubeconfig)
        if installed.run("list", "--short", "--all").strip():
            installed.uninstall()
    served.kubectl.run("delete", "modelserve", "imaged")
    cluster.kubectl.run("delete", "namespace", *RELEASE_NAMESPACES[1:], "--ignore-not-found")
    install_crds(cluster.kubectl)


def _pod() -> dict[str, Any]:
    return {**example()["spec"]["pod"], "runtimeClassName": IMAGE_RUNTIME}


def _restricted(name: str) -> dict[str, Any]:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


def _ask(served: Deployed) -> str:
    with service_url(served.target, NAMESPACE, served.name) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120)
        message: Any = {"role": "user", "content": "Tell me the capital of Poland."}
        answer = client.chat.completions.create(model=CHECKPOINT.name, messages=[message], temperature=0, max_tokens=32)
        return answer.choices[0].message.content or ""


def _workers(kubectl: Kubectl) -> dict[str, int]:
    """uid of every worker pod of the namespace, and restarts of its container."""
    return {
        pod["metadata"]["uid"]: sum(each["restartCount"] for each in pod["status"].get("containerStatuses", ()))
        for pod in kubectl.items("pods", "-l", "app.kubernetes.io/component=worker")
    }


def _service_comes_back(served: Deployed, name: str) -> None:
    """Whether somebody reconciles: a Service that is deleted is made again."""
    old = served.kubectl.get("service", name)["metadata"]["uid"]
    served.kubectl.run("delete", "service", name)

    def back() -> bool:
        found = served.kubectl.items("services", f"--field-selector=metadata.name={name}")
        return any(each["metadata"]["uid"] != old for each in found)

    # What is deleted between an operator's first list and its watch is found by the watchdog, half a minute later.
    wait_for("the Service is made again", back)


def test_a_model_answers_from_images_that_were_built_here(imaged: Deployed, helm: Helm) -> None:
    imaged.wait_ready()
    assert "Warsaw" in _ask(imaged)
    (pod,) = imaged.owned("pods")
    assert pod["spec"]["containers"][0]["image"].endswith(f"modelserve-worker:{image_build.TAG}")
    listed = imaged.kubectl.run("exec", pod["metadata"]["name"], "--", "ls", "/opt")
    assert listed.split() == ["modelserve"], "nothing is lent to this container"
    helm.run("test", helm.release, "--timeout=480s")


def test_the_manifest_is_what_runs_and_nothing_differs_at_rest(imaged: Deployed, helm: Helm) -> None:
    imaged.wait_ready()
    _no_difference(imaged.target.kubectl, helm.manifest())
    _no_difference(imaged.kubectl, yaml.safe_dump(example("imaged", pod=_pod())))


def _no_difference(kubectl: Kubectl, manifest: str) -> None:
    """kubectl diff exits with 1 where something differs, and `run` raises what it prints."""
    kubectl.run("diff", "--server-side", "--force-conflicts", "-f", "-", document=manifest)


def test_an_upgrade_restarts_no_worker_and_what_it_changes_arrives(imaged: Deployed, helm: Helm) -> None:
    before = _workers(imaged.kubectl)
    changed = {
        **VALUES,
        "worker": {"image": {**VALUES["worker"]["image"], "tag": "later"}, "imagePullSecrets": ["registry"]},
        "children": {
            "labels": {"team": "search"},
            "annotations": {"example.com/owner": "me"},
            "serviceType": "NodePort",
        },
        "podAnnotations": {"example.com/upgraded": "yes"},
    }
    with traffic_to(imaged) as traffic:
        wait_for("first answers", lambda: traffic.answered > 2 or bool(traffic.errors))
        helm.upgrade(changed)

        def arrived() -> bool:
            service = imaged.kubectl.get("service", "imaged")
            labelled = service["metadata"]["labels"].get("team") == "search"
            return bool(labelled and service["spec"]["type"] == "NodePort")

        wait_for("labels and type of the Service", arrived)
        wait_for("the proposal", lambda: "proposedRevision" in imaged.status())
        answered = traffic.answered
        wait_for("answers after it all", lambda: traffic.answered > answered + 2)
    assert traffic.errors == []
    for kind in ("deployments", "services", "poddisruptionbudgets"):
        for body in imaged.owned(kind):
            assert body["metadata"]["annotations"]["example.com/owner"] == "me"
            assert body["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "modelserve"
    assert _workers(imaged.kubectl) == before
    assert imaged.condition("Ready")["status"] == "True"


def test_every_expression_of_rules_and_dashboard_returns_data(imaged: Deployed, helm: Helm, tmp_path: Path) -> None:
    promtool = require_tool("promtool", print)
    rules, dashboard = (CHART / "files" / name for name in ("rules.yaml", "dashboard.json"))
    subprocess.run([promtool, "check", "rules", "--lint=all", "--lint-fatal", rules], check=True)
    kubectl = imaged.target.kubectl
    holder = kubectl.get("pod", _lease(kubectl, SYSTEM), "-n", SYSTEM)
    (worker,) = imaged.owned("pods")
    places = {
        f"http://{holder['status']['podIP']}:9090/metrics": {"job": "operator", "pod": holder["metadata"]["name"]},
        f"http://{worker['status']['podIP']}:8000/metrics": {
            "namespace": NAMESPACE,
            "name": "imaged",
            "pod": worker["metadata"]["name"],
        },
    }
    before = {place: _read(place) for place in places}
    _ask(imaged)
    _service_comes_back(imaged, "imaged")
    after: dict[str, str] = {}

    def counted() -> bool:
        """The end of a reconcile, and of a request, comes behind what one sees of it."""
        after.update({place: _read(place) for place in places})
        return all(_ended(after[place]) > _ended(before[place]) for place in places)

    wait_for("a reconcile and a request have ended", counted)
    scraped = [promql.Scraped(before[place], after[place], labels) for place, labels in places.items()]
    expressions = promql.expressions_of(rules, dashboard)
    assert len(expressions) > 30
    empty = promql.without_data(promtool, rules, scraped, expressions, tmp_path)
    # Nothing is compared on a CPU, and this model takes no images or sounds: tests/chart holds those metrics by name.
    elsewhere = (
        "modelserve_sizing_error_ratio",
        "modelserve_speed_error_ratio",
        "modelserve_image",
        "modelserve_sound",
    )
    assert [each for each in empty if not any(metric in each for metric in elsewhere)] == []


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        text: str = answer.read().decode()
        return text


def _ended(metrics: str) -> float:
    """Reconciles of an operator, or requests of a worker."""
    names = ("modelserve_operator_reconcile_seconds_count", "vllm:request_time_per_output_token_seconds_count")
    return sum(float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(names))


def test_the_examples_in_front_of_a_model_are_accepted_and_an_autoscaler_finds_its_target(
    imaged: Deployed, layout: Layout
) -> None:
    """Ingress and HPA by the API server itself; the HPA's controller reads /scale of the ModelServe."""
    kubectl = imaged.kubectl
    front = REPOSITORY / "docs" / "examples" / "front"
    for name in ("ingress.yaml", "api-key.yaml"):
        kubectl.run("apply", "--dry-run=server", "-f", str(front / name))
    autoscaler = yaml.safe_load((front / "hpa.yaml").read_text())
    autoscaler["spec"]["scaleTargetRef"]["name"] = "imaged"
    kubectl.apply(autoscaler)
    try:

        def found() -> bool:
            return condition(kubectl.get("hpa", "gemma"), "AbleToScale").get("reason") == "SucceededGetScale"

        wait_for("the autoscaler read /scale", found)
    finally:
        kubectl.delete("hpa", "gemma")
    service = kubectl.get("service", "imaged")
    ingress = yaml.safe_load((front / "ingress.yaml").read_text())
    backend = ingress["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]
    assert backend["port"]["name"] in {port["name"] for port in service["spec"]["ports"]}


def _lease(kubectl: Kubectl, namespace: str) -> str:
    holder: str = kubectl.get("lease", "modelserve-operator", "-n", namespace)["spec"].get("holderIdentity", "")
    return holder


def test_of_two_operators_one_works_and_the_other_takes_over(imaged: Deployed, layout: Layout) -> None:
    kubectl, before = imaged.target.kubectl.within(SYSTEM), _workers(imaged.kubectl)

    def operators() -> dict[str, dict[str, Any]]:
        selected = kubectl.items("pods", "-l", "app.kubernetes.io/name=modelserve-operator")
        return {each["metadata"]["name"]: each for each in selected if "deletionTimestamp" not in each["metadata"]}

    first = _lease(kubectl, SYSTEM)
    assert len(operators()) == 2
    assert first in operators()
    kubectl.run("delete", "pod", first, "--grace-period=0", "--force")
    wait_for("another holder", lambda: _lease(kubectl, SYSTEM) in set(operators()) - {first})
    _service_comes_back(imaged, "imaged")

    second = _lease(kubectl, SYSTEM)
    kubectl.run(
        "patch", "lease", "modelserve-operator", "--type=merge", "-p", '{"spec": {"holderIdentity": "stranger"}}'
    )

    def ended() -> bool:
        statuses = operators()[second]["status"]["containerStatuses"]
        return bool(statuses[0]["restartCount"] == 1)

    wait_for("the one that lost the Lease has ended", ended)
    assert "is now held by 'stranger'" in kubectl.run("logs", second, "--previous")
    wait_for("a holder again", lambda: _lease(kubectl, SYSTEM) in operators())
    _service_comes_back(imaged, "imaged")
    assert _workers(imaged.kubectl) == before
    _only_holders_worked(layout)


def _only_holders_worked(layout: Layout) -> None:
    """Before each request of an operator, for anything but the Lease, the last renewal was its own."""
    holder = None
    for entry in audit.requests(layout, f"system:serviceaccount:{SYSTEM}:modelserve-operator"):
        reference = entry.get("objectRef") or {}
        (pod,) = entry["user"]["extra"]["authentication.kubernetes.io/pod-name"]
        if reference.get("resource") == "leases":
            if entry["verb"] != "get" and entry["responseStatus"]["code"] < 300:
                holder = pod
        elif (reference and entry["stage"] != "ResponseComplete") or entry["verb"] in ("patch", "create", "delete"):
            assert pod == holder, f"{pod} asked for {entry['requestURI']} while {holder} held the Lease"


def _spec_fields(crd: dict[str, Any]) -> dict[str, Any]:
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    fields: dict[str, Any] = schema["properties"]["spec"]["properties"]
    return fields


def test_a_later_crd_is_left_alone_by_a_rollback(imaged: Deployed, helm: Helm) -> None:
    kubectl, before = imaged.target.kubectl, _workers(imaged.kubectl)
    ahead = kubectl.get("crd", CRD)
    _spec_fields(ahead)["later"] = {"type": "string", "maxLength": 8, "description": "A field of a later release."}
    document = {key: ahead[key] for key in ("apiVersion", "kind", "spec")}
    metadata = {"name": CRD, "annotations": {RELEASE: "9.0.0"}}
    applied = yaml.safe_dump({**document, "metadata": metadata})
    kubectl.run("apply", "--server-side", "--force-conflicts", "-f", "-", document=applied)
    helm.rollback(1)
    left = kubectl.get("crd", CRD)
    assert left["metadata"]["annotations"][RELEASE] == "9.0.0"
    assert "later" in _spec_fields(left)

    def as_before() -> bool:
        return bool(imaged.kubectl.get("service", "imaged")["spec"]["type"] == "ClusterIP")

    wait_for("the first values again", as_before)
    _service_comes_back(imaged, "imaged")
    imaged.wait_ready()
    assert _workers(imaged.kubectl) == before


def test_networkpolicies_allow_what_was_seen_and_no_stranger(
    imaged: Deployed, helm: Helm, layout: Layout, watched: connections.Watch
) -> None:
    """The bridge of the local cluster enforces nothing: what was connected is held against the policies here."""
    _service_comes_back(imaged, "imaged")
    kubectl = imaged.target.kubectl
    namespaces = {each["metadata"]["name"]: each["metadata"]["labels"] for each in kubectl.items("namespaces")}
    policies = [each for each in yaml.safe_load_all(helm.manifest()) if each and each["kind"] == "NetworkPolicy"]
    server = network_policy.Peer(layout.kubernetes_service_address)
    peers: dict[str, network_policy.Peer] = {}

    def both_seen() -> bool:
        """An operator that has just taken over asks the workers in its first reconcile, a moment from now."""
        peers.update(_peers(kubectl, namespaces))
        seen = _seen(watched, peers, server, policies)
        return {("modelserve-operator", "the API server"), ("modelserve-operator", "worker")} <= seen

    wait_for("an operator connected to the API server and to a worker", both_seen, interval_s=1.0)
    (worker,) = (peer for peer in peers.values() if (peer.labels or {}).get("serving.modelserve.dev/name") == "imaged")
    operator = next(peer for peer in peers.values() if _role(peer, server) == "modelserve-operator")
    stranger = network_policy.Peer("10.9.9.9", "elsewhere", {"app": "x"}, {"kubernetes.io/metadata.name": "elsewhere"})
    neighbour = network_policy.Peer("10.9.9.8", NAMESPACE, {"app": "x"}, namespaces[NAMESPACE])
    for source, target, port, expected in (
        (neighbour, worker, 8000, True),
        (stranger, worker, 8000, False),
        (neighbour, worker, 22, False),
        (worker, stranger, 5432, False),
        (worker, network_policy.Peer("1.2.3.4"), 443, True),
        (stranger, operator, 9090, True),
        (stranger, operator, 22, False),
        (operator, stranger, 8000, False),
    ):
        assert network_policy.allowed(policies, source=source, target=target, port=port) is expected, (source, target)


def _peers(kubectl: Kubectl, namespaces: Mapping[str, dict[str, str]]) -> dict[str, network_policy.Peer]:
    """The pods that there are, by uid."""
    return {
        pod["metadata"]["uid"]: network_policy.Peer(
            pod["status"].get("podIP", ""),
            pod["metadata"]["namespace"],
            pod["metadata"].get("labels") or {},
            namespaces[pod["metadata"]["namespace"]],
        )
        for pod in kubectl.items("pods", "--all-namespaces")
    }


def _seen(
    watched: connections.Watch,
    peers: Mapping[str, network_policy.Peer],
    server: network_policy.Peer,
    policies: list[dict[str, Any]],
) -> set[tuple[str, str]]:
    """Who has connected to whom so far; each connection asserted to be allowed."""
    by_address = {peer.address: peer for peer in peers.values()}
    seen = set()
    for connection in set(watched.seen):
        own, other = peers.get(connection.uid), by_address.get(connection.peer)
        if connection.peer == server.address:
            other = server
        if own is None or other is None:  # a pod that has gone; the node itself, which probes, and where the tests run
            continue
        source, target = (other, own) if connection.incoming else (own, other)
        assert network_policy.allowed(policies, source=source, target=target, port=connection.port), connection
        seen.add((_role(source, server), _role(target, server)))
    return seen


def _role(peer: network_policy.Peer, server: network_policy.Peer) -> str:
    if peer == server:
        return "the API server"
    labels = peer.labels or {}
    return labels.get("app.kubernetes.io/component") or labels.get("app.kubernetes.io/name") or "other"


def test_uninstalled_it_leaves_what_serves_and_installed_again_for_one_namespace_it_goes_on(
    imaged: Deployed, helm: Helm, layout: Layout
) -> None:
    kubectl, before = imaged.target.kubectl, _workers(imaged.kubectl)
    _granted_and_used(kubectl, layout, SYSTEM)
    helm.uninstall()
    assert kubectl.exists("crd", CRD)
    assert "Warsaw" in _ask(imaged)
    older = yaml.safe_dump({"metadata": {"annotations": {RELEASE: "0.0.1"}}})
    kubectl.run("patch", "crd", CRD, "--type=merge", "-p", older)
    tenant = Helm(helm.program, namespace=TENANT, kubeconfig=helm.kubeconfig)
    tenant.install({**VALUES, "replicas": 1, "watchNamespaces": [NAMESPACE]})
    brought = kubectl.get("crd", CRD)
    assert brought["metadata"]["annotations"][RELEASE] != "0.0.1"
    assert "later" not in _spec_fields(brought)
    _no_difference(kubectl, (REPOSITORY / "crds" / FILE_NAME).read_text())
    _service_comes_back(imaged, "imaged")
    imaged.wait_ready()
    assert _workers(imaged.kubectl) == before
    tenant.run("test", tenant.release, "--timeout=480s")
    _granted_and_used(kubectl, layout, TENANT)


def _granted_and_used(kubectl: Kubectl, layout: Layout, namespace: str) -> None:
    """What the operator asked for is what its roles grant: all of it granted, by the API server's own answers."""
    user = f"system:serviceaccount:{namespace}:modelserve-operator"
    refused = [
        entry["requestURI"]
        for entry in audit.requests(layout, user)
        if entry.get("responseStatus", {}).get("code") == 403
    ]
    assert refused == []
    used, granted = audit.rules_used(layout, user), _granted(kubectl, user)
    outside = {each for each in used if not _covered(each, granted)}
    assert outside == set()


def _granted(kubectl: Kubectl, user: str) -> dict[str, list[dict[str, Any]]]:
    """Rules of the operator's ServiceAccount by namespace; "" for those of every namespace."""
    _, _, namespace, name = user.split(":")
    found: dict[str, list[dict[str, Any]]] = {}
    for kind in ("rolebindings", "clusterrolebindings"):
        for binding in kubectl.items(kind, "--all-namespaces"):
            subjects = binding.get("subjects") or ()
            if not any((each.get("namespace"), each["name"]) == (namespace, name) for each in subjects):
                continue
            where = binding["metadata"].get("namespace", "")
            scope = ("-n", where) if binding["roleRef"]["kind"] == "Role" else ()
            role = kubectl.get(binding["roleRef"]["kind"].lower(), binding["roleRef"]["name"], *scope)
            found.setdefault(where, []).extend(role["rules"])
    return found


def _covered(used: tuple[str, str, str, str], granted: Mapping[str, list[dict[str, Any]]]) -> bool:
    namespace, group, resource, verb = used
    return any(
        group in rule["apiGroups"] and resource in rule["resources"] and verb in rule["verbs"]
        for where in ("", namespace)
        for rule in granted.get(where, ())
    )


def test_no_rule_goes_unused(imaged: Deployed, helm: Helm, layout: Layout, request: pytest.FixtureRequest) -> None:
    """Over the whole suite: the operator beside the cluster, with the same rules, and those that were installed."""
    if not any("test_life_of_a_modelserve" in item.nodeid for item in request.session.items):
        pytest.skip("some rules are for what other tests of the suite do")
    users = (
        OPERATOR_USER,
        *(f"system:serviceaccount:{namespace}:modelserve-operator" for namespace in RELEASE_NAMESPACES),
    )
    used = {each[1:] for user in users for each in audit.rules_used(layout, user)}
    rendered = yaml.safe_load_all(helm.template(VALUES))
    granted = {
        (group, resource, verb)
        for body in rendered
        if body and body["kind"] in ("Role", "ClusterRole") and body["metadata"]["name"].endswith("modelserve-operator")
        for rule in body["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert granted - used - set(ADMISSION_VERBS) - NOT_OF_EVERY_SUITE == set()
    assert used - granted == set()
