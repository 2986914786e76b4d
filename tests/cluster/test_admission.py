"""What a real API server admits and what the operator accepts are the same, and a refusal names the field.

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
from random_specs import RandomSpecs

from localcluster.control_plane import ControlPlane, control_plane
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
