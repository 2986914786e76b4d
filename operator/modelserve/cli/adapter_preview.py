"""What a ModelAdapter would come to, by the objects that there are: refused and why, or loaded where. Pure.

The operator decides by more: what its installation allows, Secrets, and what workers say of the files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modelserve.api import ModelServe, ModelServeSpec
from modelserve.api.model_adapter import ADAPTER_KIND, ModelAdapterSpec
from modelserve.api.modelserve import KIND
from modelserve.errors import InvalidInput
from modelserve.model.adapters.addresses import CLAIM, HUB, default_revision
from modelserve.planning.engine_settings import served_name
from modelserve.reference_grant import grants

Body = Mapping[str, Any]
NOT_SEEN = "What the installation allows, Secrets, and the adapters' files are not looked at here."


@dataclass(frozen=True)
class AdapterSurroundings:
    """Objects of the cluster. `others`: ModelAdapters that refer to the same ModelServe, the one that is previewed not
    among them; `live`: that one, where it exists."""

    model_serve: Body | None
    live: Body | None = None
    others: Sequence[Body] = ()
    grants: Sequence[Body] = ()


def target_of(body: Body) -> tuple[str, str]:
    """Namespace and name of the ModelServe that a ModelAdapter of a cluster refers to."""
    reference = body["spec"]["modelRef"]
    return str(reference.get("namespace") or body["metadata"]["namespace"]), str(reference["name"])


def adapter_preview(body: Body, spec: ModelAdapterSpec, around: AdapterSurroundings) -> tuple[list[str], bool]:
    """Sentences about applying the object, and whether workers would get it."""
    refused = next(_refusals(body, spec, around), None)
    if refused is not None:
        return [f"Accepted, and not served: {refused}"], False
    assert around.model_serve is not None, "refused otherwise"
    room = _spec_of(around.model_serve)
    assert room is not None, "refused otherwise"
    assert room.adapters is not None, "refused otherwise"
    return list(_loaded(spec, around, most=room.adapters.max)), True


def _refusals(body: Body, spec: ModelAdapterSpec, around: AdapterSurroundings) -> Iterator[str]:
    """By the operator's reasons, in its order."""
    namespace, name = target_of(body)
    own = str(body["metadata"]["namespace"])
    if own != namespace and not any(grants(each, own, name) for each in around.grants):
        yield f"ReferenceNotGranted: no ReferenceGrant of namespace {namespace} lets {ADAPTER_KIND}s of {own} in."
    if around.model_serve is None:
        yield f"ModelServeNotFound: there is no {KIND} {name} yet; the adapter waits for it."
        return
    serve = _spec_of(around.model_serve)
    if serve is None:
        yield f"ModelServeInvalid: the spec of {KIND} {name} cannot be read; its condition Accepted says why."
        return
    if serve.adapters is None:
        yield f"AdaptersNotEnabled: {KIND} {name} serves no adapters: set its spec.adapters.max, which makes new pods."
        return
    claim = _claim_of(serve)
    if spec.uri.startswith(CLAIM) and (own != namespace or spec.uri.removeprefix(CLAIM).partition("/")[0] != claim):
        yield f"ClaimNotMounted: workers mount {claim or 'no claim'}; put the files there, or use hf://."
    yield from _no_place(body, spec, serve, around, most=serve.adapters.max)


def _no_place(
    body: Body, spec: ModelAdapterSpec, serve: ModelServeSpec, around: AdapterSurroundings, *, most: int
) -> Iterator[str]:
    """An object that exists is older than those made after it; a new one is the youngest."""
    name = spec.served_name or str(body["metadata"]["name"])
    older = [each for each in around.others if around.live is None or _age(each) < _age(around.live)]
    taken = [each for each in older if _taken(each)]
    if name == served_name(serve):
        yield f"NameTaken: the model itself is served as {name}."
    for each in taken:
        if (each["spec"].get("servedName") or each["metadata"]["name"]) == name:
            yield f"NameTaken: {ADAPTER_KIND} {each['metadata']['name']} is served as {name}."
    if len(taken) >= most:
        yield f"TooManyAdapters: {len(taken)} older adapters are there, and spec.adapters.max is {most}: raise it."


def _loaded(spec: ModelAdapterSpec, around: AdapterSurroundings, *, most: int) -> Iterator[str]:
    """What workers do."""
    assert around.model_serve is not None, "refused otherwise"
    workers = int((around.model_serve.get("status") or {}).get("readyReplicas") or 0)
    where = f"{workers} worker{'' if workers == 1 else 's'} of {around.model_serve['metadata']['name']}"
    taken = [each for each in around.others if _taken(each)]
    held = sum(1 + _in_rollout(each) for each in taken)
    active = ((around.live or {}).get("status") or {}).get("activeVersion") or {}
    if active and _version(active) == (spec.uri, spec.revision or default_revision(spec.uri)):
        yield f"Nothing is loaded: {spec.uri} is what serves."
        return
    if active and held + 2 > most:
        yield (
            f"NoRoomForRollout: {active['uri']} stays, and the new version waits: {held + 1} of {most} versions are "
            "there (spec.adapters.max)."
        )
        return
    yield f"{where} load{'s' if workers == 1 else ''} {spec.uri} beside what they serve; no pod is made anew."
    if not active:
        yield "It serves once every worker has it, and a probe has shown that it changes something."
    else:
        yield f"{active['uri']} serves until every worker has the new one."
        if spec.rollout.weight < 100:
            share = f"{spec.rollout.weight} % of requests"
            yield f"Then {share} are answered by the new one, until rollout.weight is 100 or uri is set back."
    yield f"{held + 1 + bool(active)} of {most} versions are there then."


def _spec_of(model_serve: Body) -> ModelServeSpec | None:
    try:
        return ModelServe.parse_of_any_release(dict(model_serve))[0].spec
    except InvalidInput:
        return None


def _claim_of(serve: ModelServeSpec) -> str | None:
    """The claim that workers mount for the model."""
    if serve.model.uri.startswith(CLAIM):
        return serve.model.uri.removeprefix(CLAIM).partition("/")[0]
    return serve.storage.pvc_name if serve.storage is not None and serve.model.uri.startswith(HUB) else None


def _taken(body: Body) -> bool:
    """Whether the operator takes it, or has not looked at it yet."""
    conditions = (body.get("status") or {}).get("conditions") or ()
    refused = any(each.get("type") == "Accepted" and each.get("status") == "False" for each in conditions)
    return not refused and not body["metadata"].get("deletionTimestamp")


def _in_rollout(body: Body) -> bool:
    """Whether two versions of it are there."""
    status = body.get("status") or {}
    return bool(status.get("activeVersion") and status.get("nextVersion"))


def _age(body: Body) -> tuple[str, str, str]:
    metadata = body["metadata"]
    return str(metadata.get("creationTimestamp") or ""), str(metadata.get("namespace")), str(metadata["name"])


def _version(shown: Body) -> tuple[str, str | None]:
    return str(shown["uri"]), shown.get("revision") or default_revision(str(shown["uri"]))
