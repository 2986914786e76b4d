"""Revisions of release 0.1.0, which kept them in ConfigMaps, are imported once. Pure.

Whoever may write ConfigMaps could write such a one, so three things vouch for it: its owner is this ModelServe, a
Deployment of it runs just its template, and the status, which only the operator writes, names the wanted revision.
Once a revision was committed in a ControllerRevision, no ConfigMap is looked at any more.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import yaml
from pydantic import ValidationError

from modelserve.api import ModelServe, ModelServeSpec, PlanStatus
from modelserve.api.unknown_fields import without_unknown
from modelserve.errors import InvalidInput
from modelserve_operator import labels
from modelserve_operator.cluster import diff
from modelserve_operator.revisions.history import History, Unreadable, owned_by, refusal, stray_config_maps
from modelserve_operator.revisions.revision import ENGINE_FILE, Body, Provenance, Revision, Worker, bare
from modelserve_operator.revisions.spec_inputs import canonical_spec, spec_inputs

RELEASE = "0.1.0"
_SPEC_HASH = f"{labels.GROUP}/spec-hash"
_COMMITTED_AT = f"{labels.GROUP}/committed-at"
_SPEC_FIELDS = (
    "model", "drafter", "image", "apiKeySecretRef", "context", "workload", "objective", "parallelism", "engine",
    "kvCache", "accelerators", "storage", "pod",
)  # fmt: skip


@dataclass(frozen=True)
class _Found:
    revision: Revision
    spec_hash: str
    committed_at: str


def with_imported(
    history: History, model_serve: Body, config_maps: Iterable[Body], deployments: Mapping[str, Body]
) -> History:
    """The history with what 0.1.0 left, and with refusals of every other ConfigMap that is labelled as a revision.

    `deployments`: those of this ModelServe, by hash.
    """
    metadata = model_serve["metadata"]
    name, uid = metadata["name"], metadata["uid"]
    known = {labels.revision_name(name, each) for each in history.stored} | {each.name for each in history.unreadable}
    strays = list(stray_config_maps(config_maps, known))
    if any(not revision.provenance.imported_from for revision in history.revisions):
        return _refusing(history, strays, "revisions are ControllerRevisions, and there is none of this name")
    found, unreadable = [], []
    for body in strays:
        own = body["metadata"]["name"]
        runs = deployments.get(labels.label_of(body, labels.PLAN_HASH) or "")
        if not owned_by(body, uid):
            history = _refusing(history, [body], "its owner is not this ModelServe")
        elif runs is None or runs["metadata"]["name"] != own:
            history = _refusing(history, [body], "no Deployment of it runs")
        else:
            try:
                found.append(_read(body, runs))
            except ValueError as error:
                unreadable.append(Unreadable("ConfigMap", own, str(error), blocks=True))
    wanted = str((model_serve.get("status") or {}).get("revision"))
    names = {labels.revision_name(name, each.revision.hash) for each in found}
    if found and wanted not in names | known:
        why = f"it is of release {RELEASE}, and status.revision names none of its revisions"
        unreadable += [Unreadable("ConfigMap", each, why, blocks=True) for each in sorted(names)]
        found = []
    spec = _spec(model_serve)
    ordered = sorted(found, key=lambda each: (wanted.endswith(each.revision.hash), each.committed_at))
    imported = [
        replace(
            each.revision,
            number=history.last_number + place,
            inputs=spec_inputs(spec) if spec is not None and each.spec_hash == spec_hash(spec) else None,
            spec=canonical_spec(spec) if spec is not None and each.spec_hash == spec_hash(spec) else {},
        )
        for place, each in enumerate(ordered, start=1)
    ]
    return replace(
        history,
        revisions=(*history.revisions, *imported),
        unreadable=(*history.unreadable, *unreadable),
    )


def spec_hash(spec: ModelServeSpec) -> str:
    """What 0.1.0 compared specs by: all fields that it had, defaults included, but replicas, plan and surge rules."""
    document = {key: value for key, value in spec.to_json().items() if key in _SPEC_FIELDS}
    return labels.short_hash({**document, "rollout": {"drainSeconds": spec.rollout.drain_seconds}})


def _spec(model_serve: Body) -> ModelServeSpec | None:
    try:
        return ModelServe.parse_of_any_release(model_serve)[0].spec
    except InvalidInput:
        return None


def _refusing(history: History, bodies: Iterable[Body], why: str) -> History:
    refused = tuple(refusal("ConfigMap", body["metadata"]["name"], why) for body in bodies)
    return replace(history, refused=(*history.refused, *refused))


def _read(body: Body, deployment: Body) -> _Found:
    """Raises ValueError, with why for people."""
    data = body.get("data") or {}
    try:
        template = json.loads(data["template.json"])
        plan, _ = without_unknown(PlanStatus, json.loads(data["plan.json"]))
        engine = yaml.safe_load(data[ENGINE_FILE])
        (worker,) = [each for each in template["spec"]["containers"] if each["name"] == "worker"]
        revision = Revision(
            hash=str(labels.label_of(body, labels.PLAN_HASH)),
            plan=bare(PlanStatus.model_validate(plan)),
            engine=dict(engine),
            template=template,
            weight_bytes=int(json.loads(data["revision.json"])["weightBytes"]),
            worker=Worker(str(worker["image"]), RELEASE),
            inputs=None,
            provenance=Provenance(renderer=RELEASE, planner=RELEASE, imported_from=RELEASE),
        )
    except (KeyError, TypeError, ValueError, ValidationError, yaml.YAMLError) as error:
        raise ValueError(f"it is of release {RELEASE} and cannot be read: {type(error).__name__}") from error
    if not diff.covers(deployment["spec"]["template"], template):
        raise ValueError(f"it is of release {RELEASE}, and its Deployment runs another template")
    at: Any = labels.annotation_of(body, _COMMITTED_AT) or body["metadata"].get("creationTimestamp") or ""
    return _Found(revision, labels.label_of(body, _SPEC_HASH) or "", str(at))
