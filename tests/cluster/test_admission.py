"""What a real API server admits and what the operator accepts are the same, and a refusal names the field; what needs
a right of its author is admitted from those who have it.

MODELSERVE_SPECS=2000 asks for more of them.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
import yaml
from random_specs import RandomSpecs

from localcluster.binaries import require_tool
from localcluster.control_plane import ControlPlane, control_plane
from localcluster.helm import Helm
from localcluster.kubectl import KubectlError, wait_for
from modelserve.api import VERSION, ModelServe
from modelserve.crd import CRD_NAME, custom_resource_definition
from modelserve.errors import InvalidInput

pytestmark = pytest.mark.e2e

COUNT = int(os.environ.get("MODELSERVE_SPECS", "200"))
PATH = "/apis/serving.modelserve.dev/v1alpha1/namespaces/default/modelserves?dryRun=All&fieldValidation=Strict"


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    with control_plane() as found:
        yield found


def _document(spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "serving.modelserve.dev/v1alpha1",
        "kind": "ModelServe",
        "metadata": {"name": "any", "namespace": "default"},
        "spec": spec,
    }


async def _admit(plane: ControlPlane, specs: list[Any]) -> list[tuple[int, dict[str, Any]]]:
    """HTTP status and answer of a dry-run of each."""
    connector = aiohttp.TCPConnector(ssl=plane.admin_tls(), limit=4)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def ask(spec: Any) -> tuple[int, dict[str, Any]]:
            body = json.dumps(_document(spec))
            headers = {"Content-Type": "application/json"}
            async with session.post(plane.url + PATH, data=body, headers=headers) as answer:
                return answer.status, await answer.json()

        return await asyncio.gather(*map(ask, specs))


def _refusal(document: dict[str, Any]) -> InvalidInput | None:
    try:
        ModelServe.parse(document)
    except InvalidInput as error:
        return error
    return None


async def test_whatever_is_asked_is_admitted_or_refused_by_field(plane: ControlPlane) -> None:
    stream = RandomSpecs(1)
    specs = [stream.any() for _ in range(COUNT)]
    for spec, (status, answer) in zip(specs, await _admit(plane, specs), strict=True):
        shown = f"{json.dumps(spec)[:1500]}: {status} {answer.get('message')}"
        if status == 201:
            refused = _refusal(answer)  # a schema says nothing of the keys of a map
            assert refused is None or "[key]" in str(refused), f"admitted, and then refused: {shown}: {refused}"
        else:
            assert status in (400, 422), shown
            assert "spec" in answer["message"], shown
            assert _refusal(_document(spec)) is not None or status == 400 or _only_stricter(answer), shown


def _only_stricter(answer: dict[str, Any]) -> bool:
    """The operator reads a field that is null as one that is left out; such an object never gets to it."""
    return "must be of type" in answer["message"] and ': "null"' in answer["message"]


async def test_what_the_schema_allows_is_admitted_unless_a_rule_across_fields_refuses_it_on_both_sides(
    plane: ControlPlane,
) -> None:
    stream = RandomSpecs(2)
    specs = [stream.valid() for _ in range(COUNT)]
    answers = await _admit(plane, specs)
    admitted = [status == 201 for status, _ in answers]
    accepted = [_refusal(_document(spec)) is None for spec in specs]
    differing = [
        f"{json.dumps(spec)[:1500]}: {answer.get('message')} / {_refusal(_document(spec))}"
        for spec, (_, answer), one, other in zip(specs, answers, admitted, accepted, strict=True)
        if one != other
    ]
    assert differing == []
    assert COUNT // 4 < sum(admitted) < COUNT


def _applied(plane: ControlPlane, body: dict[str, Any], *options: str) -> str:
    """Applied as an administrator, or as `--as=NAME`."""
    return plane.kubectl.run("apply", "--server-side", *options, "-f", "-", document=json.dumps(body))


def _named(name: str, **spec: Any) -> dict[str, Any]:
    body = _document({"model": {"uri": "hf://google/gemma-4-E4B-it"}, **spec})
    return {**body, "metadata": {"name": name, "namespace": "default"}}


def _admitted(plane: ControlPlane, body: dict[str, Any], *options: str) -> bool:
    try:
        _applied(plane, body, *options)
    except KubectlError:
        return False
    return True


def test_a_rule_that_came_later_lets_stored_objects_be_edited(plane: ControlPlane) -> None:
    """What breaks it may stay as it is, for ever; nobody may add it, nor edit around it."""
    definition = custom_resource_definition()
    spec = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    rules = [spec["rollout"], spec["pod"]["properties"]["resources"]]
    kept = [each.pop("x-kubernetes-validations") for each in rules]
    plane.kubectl.apply(definition)
    old = _named("old", rollout={"maxSurge": 0}, pod={"resources": {"limits": {"nvidia.com/gpu": "4"}}})
    wait_for("the definition without its rules", lambda: _admitted(plane, old))
    for each, rule in zip(rules, kept, strict=True):
        each["x-kubernetes-validations"] = rule
    plane.kubectl.apply(definition)
    never = _named("new", rollout={"maxSurge": 0})
    wait_for("the definition with them", lambda: not _admitted(plane, never, "--dry-run=server"))
    gpus = _named("new", pod={"resources": {"requests": {"nvidia.com/gpu": "1"}}})
    for refused, told in ((never, "set maxSurge to 1 or more"), (gpus, "GPUs come from the plan")):
        with pytest.raises(KubectlError, match=told):
            _applied(plane, refused)
        assert _refusal(refused) is not None
    patch = plane.kubectl.within("default").run
    patch("label", "modelserve", "old", "team=search")
    patch("scale", "modelserve", "old", "--replicas=3")
    patch("patch", "modelserve", "old", "--type=merge", "-p", '{"spec":{"context":{"maxModelLen":8192}}}')
    stored = plane.kubectl.get("modelserve", "old", "-n", "default")
    assert ModelServe.parse_of_any_release(stored)[0].spec.replicas == 3, "and the operator reads it as before"
    with pytest.raises(KubectlError, match="set maxSurge to 1 or more"):
        patch("patch", "modelserve", "old", "--type=merge", "-p", '{"spec":{"rollout":{"drainSeconds":5}}}')
    patch("patch", "modelserve", "old", "--type=merge", "-p", '{"spec":{"rollout":{"maxSurge":1}}}')
    plane.kubectl.delete("modelserve", "old", "-n", "default")


NEXT, OBJECTS = "v1beta1", 20


def _serve(plane: ControlPlane, *versions: str) -> None:
    """The next API version beside this one, or this one alone; the last is stored."""
    plane.kubectl.apply(custom_resource_definition(versions))


def _listed(plane: ControlPlane, version: str) -> dict[str, dict[str, Any]]:
    """Objects by name, as one version has them; it takes the API server a moment to serve it."""
    path = f"/apis/serving.modelserve.dev/{version}/namespaces/default/modelserves"
    items: list[dict[str, Any]] = []

    def served() -> bool:
        try:
            items[:] = json.loads(plane.kubectl.run("get", "--raw", path))["items"]
        except KubectlError:
            return False
        return True

    wait_for(f"{version} served", served)
    return {item["metadata"]["name"]: item for item in items}


def _told(body: dict[str, Any]) -> tuple[Any, ...]:
    """What must not change with the version that one reads or writes."""
    return body["spec"], body["status"], body["metadata"]["generation"], body["metadata"]["uid"]


def test_an_object_goes_through_the_next_api_version_and_back(plane: ControlPlane) -> None:
    """Decision 0026: one schema, no conversion but of the version's name, in whichever is stored, and rolled back."""
    stream = RandomSpecs(3)
    valid = [spec for spec in (stream.valid() for _ in range(4 * OBJECTS)) if _refusal(_document(spec)) is None]
    named = [
        {**_document(spec), "metadata": {"name": f"any-{number}", "namespace": "default"}}
        for number, spec in enumerate(valid[:OBJECTS])
    ]
    plane.kubectl.apply({"apiVersion": "v1", "kind": "List", "items": named})
    before = _listed(plane, VERSION)
    assert len(before) == OBJECTS
    for versions in ((NEXT, VERSION), (VERSION, NEXT), (NEXT, VERSION)):
        _serve(plane, *versions)
        later = _listed(plane, NEXT)
        assert {body["apiVersion"] for body in later.values()} == {f"serving.modelserve.dev/{NEXT}"}
        assert {name: _told(body) for name, body in later.items()} == {n: _told(body) for n, body in before.items()}
        rewritten = {"apiVersion": "v1", "kind": "List", "items": list(later.values())}
        plane.kubectl.run("replace", "-f", "-", document=json.dumps(rewritten))  # as a storage migration does
        back = _listed(plane, VERSION)
        assert {name: _told(body) for name, body in back.items()} == {n: _told(body) for n, body in before.items()}
        assert all(_refusal(body) is None for body in back.values())
    stored = plane.kubectl.get("crd", CRD_NAME)["status"]["storedVersions"]
    assert set(stored) == {VERSION, NEXT}


AUTHOR = "gitops"  # may write ModelServes, and nothing that the operator makes of them
ROLE = {
    "apiVersion": "rbac.authorization.k8s.io/v1",
    "kind": "Role",
    "metadata": {"name": "authors", "namespace": "default"},
    "rules": [
        {
            "apiGroups": ["serving.modelserve.dev"],
            "resources": ["modelserves", "modelserves/scale"],
            "verbs": ["get", "create", "update", "patch"],
        }
    ],
}
BINDING = {
    "apiVersion": "rbac.authorization.k8s.io/v1",
    "kind": "RoleBinding",
    "metadata": {"name": "authors", "namespace": "default"},
    "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "authors"},
    "subjects": [{"kind": "User", "name": AUTHOR, "apiGroup": "rbac.authorization.k8s.io"}],
}
GATEWAY = {"parentRefs": [{"name": "public", "namespace": "gateways"}], "hostnames": ["gemma.example.com"]}
GUARDED: dict[str, tuple[Any, Any, str]] = {  # by path: as the administrator set it, as nobody else may, the right
    "gateway": (GATEWAY, {**GATEWAY, "hostnames": ["bank.example.com"]}, "httproutes.gateway.networking.k8s.io"),
    "capacityBuffer": ({"replicas": 1}, {"replicas": 9}, "capacitybuffers.autoscaling.x-k8s.io"),
    "image": ("registry.example/worker:1", "registry.example/mine:1", "pods"),
    "pod.env": ([{"name": "A", "value": "1"}], [{"name": "LD_PRELOAD", "value": "/x.so"}], "pods"),
    "pod.serviceAccountName": ("workers", "builder", "pods"),
    "pod.priorityClassName": ("low", "system-node-critical", "pods"),
    "pod.runtimeClassName": ("nvidia", "other", "pods"),
    "pod.imagePullSecrets": ([{"name": "registry"}], [{"name": "other"}], "pods"),
}


def _within(path: str, value: Any) -> dict[str, Any]:
    for part in reversed(path.split(".")):
        value = {part: value}
    return dict(value)


@pytest.fixture(scope="module")
def guarded(plane: ControlPlane) -> ControlPlane:
    """With the chart's policy, an author's role, and what an administrator made with every guarded field."""
    rendered = yaml.safe_load_all(Helm(require_tool("helm", print)).template({}))
    policies = [each for each in rendered if each and each["kind"].startswith("ValidatingAdmissionPolicy")]
    assert len(policies) == 2
    spec: dict[str, Any] = {"pod": {}}
    for path, (value, _, _) in GUARDED.items():
        (spec["pod"] if path.startswith("pod.") else spec)[path.removeprefix("pod.")] = value
    plane.kubectl.apply(ROLE, BINDING, *policies, _named("made", **spec))
    refused = _named("probe", image="registry.example/mine:1")
    wait_for("the policy", lambda: not _admitted(plane, refused, "--dry-run=server", f"--as={AUTHOR}"))
    return plane


def test_an_author_without_the_rights_changes_all_but_what_needs_them(guarded: ControlPlane) -> None:
    run, me = guarded.kubectl.within("default").run, f"--as={AUTHOR}"
    run("label", "modelserve", "made", "team=search", me)
    run("scale", "modelserve", "made", "--replicas=2", me)
    run(
        "patch",
        "modelserve",
        "made",
        me,
        "--type=merge",
        "-p",
        '{"spec":{"replicas":3,"context":{"maxModelLen":8192}}}',
    )
    live = guarded.kubectl.get("modelserve", "made", "-n", "default")
    again = {key: live[key] for key in ("apiVersion", "kind", "spec")}
    again["metadata"] = {"name": "made", "namespace": "default"}
    _applied(guarded, again, me, "--field-manager=gitops", "--force-conflicts")  # all of it, as it is in Git
    for removed in ({"image": None, "gateway": None}, {"pod": None}):
        run("patch", "modelserve", "made", me, "--dry-run=server", "--type=merge", "-p", json.dumps({"spec": removed}))
    _applied(guarded, _named("plain", replicas=2, pod={"tolerations": [{"operator": "Exists"}]}), me)
    checking = guarded.kubectl.get("validatingadmissionpolicies")["items"][0]["status"]
    assert not checking.get("typeChecking", {}).get("expressionWarnings"), checking


@pytest.mark.parametrize("path", GUARDED)
def test_who_sets_or_changes_a_guarded_field_needs_the_right_itself(guarded: ControlPlane, path: str) -> None:
    (_, other, right), me = GUARDED[path], f"--as={AUTHOR}"
    run, patch = guarded.kubectl.within("default").run, json.dumps({"spec": _within(path, other)})
    told = rf"spec\.{path}: {AUTHOR} may not create {right} in namespace default, .* Ask for that right, or"
    with pytest.raises(KubectlError, match=told):
        run("patch", "modelserve", "made", me, "--dry-run=server", "--type=merge", "-p", patch)
    with pytest.raises(KubectlError, match=told):
        _applied(guarded, _named("new", **_within(path, other)), me, "--dry-run=server")


def test_an_author_who_is_given_the_right_may(guarded: ControlPlane) -> None:
    rule = {"apiGroups": ["gateway.networking.k8s.io"], "resources": ["httproutes"], "verbs": ["create"]}
    guarded.kubectl.apply({**ROLE, "rules": [*ROLE["rules"], rule]})
    routed = _named("routed", gateway=GATEWAY)
    wait_for("the right", lambda: _admitted(guarded, routed, "--dry-run=server", f"--as={AUTHOR}"))
    picked = _named("picked", gateway={**GATEWAY, "endpointPicker": {"name": "epp", "port": 9002}})
    with pytest.raises(KubectlError, match=r"endpointPicker: gitops may not create inferencepools\."):
        _applied(guarded, picked, f"--as={AUTHOR}")
