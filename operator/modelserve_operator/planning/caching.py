"""How the ModelCache that a spec names stands, and which commit it has the spec mean. Pure.

A ModelServe with a cache is planned as if `model.revision` were the commit that the cache holds: when that is another
one, the spec has changed, and its new pods come as those of an edit do. A cache that is not there (any more) changes
nothing: the commit is that of the last revision, whose pods run on.
"""

from __future__ import annotations

from modelserve.api import ModelServeSpec
from modelserve_operator.cluster.kinds import MODEL_CACHE
from modelserve_operator.observed.snapshot import Body, Observed
from modelserve_operator.planning.decision import Finding
from modelserve_operator.reasons import Reason
from modelserve_operator.sources import CachedModel, cache_named, cached_model


def with_commit(spec: ModelServeSpec, observed: Observed) -> ModelServeSpec:
    """The spec with the commit that its cache holds, else the one that its last revision serves, as model.revision."""
    if spec.model.cache is None:
        return spec
    held = _held(observed)
    ready = held is not None and held.commit is not None and not _differs(spec, held)
    commit = held.commit if held is not None and ready else _last_commit(spec, observed)
    return spec.model_copy(update={"model": spec.model.model_copy(update={"revision": commit})}) if commit else spec


def cache_missing(spec: ModelServeSpec, observed: Observed) -> Finding | None:
    """Why pods cannot read the cache of a spec, as it was written; None where they can, or it names none.

    `ok` None: it is on its way.
    """
    if spec.model.cache is None:
        return None
    name, body, held = spec.model.cache.name, observed.model_cache, _held(observed)
    if MODEL_CACHE in observed.not_served:
        message = (
            f"model.cache names ModelCache {name}, and this installation keeps none: have it do so (the chart's value "
            "modelCaches.enabled), or leave model.cache out."
        )
        return Finding(False, Reason.CACHE_NOT_FOUND, message)
    if body is None:
        where = f"There is no ModelCache {name} in namespace {observed.namespace}"
        return Finding(None, Reason.CACHE_NOT_FOUND, f"{where}: create it, or leave model.cache out.")
    if held is not None and (differs := _differs(spec, held)):
        return Finding(False, Reason.CACHE_MISMATCH, f"ModelCache {name} {differs}: make both the same.")
    if held is not None and held.commit is not None:
        return None
    return Finding(None, Reason.WAITING_FOR_CACHE, f"ModelCache {name} is not filled yet{_told(body)}.")


def _told(cache: Body) -> str:
    """Its reason; with its words where it gets no further. Progress is the cache's to tell."""
    found = {each["type"]: each for each in (cache.get("status") or {}).get("conditions") or ()}
    if (found.get("Stalled") or {}).get("status") == "True":
        return f": {found['Stalled']['reason']}: {str(found['Stalled']['message']).rstrip('.')}"
    return f": {found['Ready']['reason']}" if "Ready" in found else ""


def _held(observed: Observed) -> CachedModel | None:
    return cached_model(observed.model_cache) if observed.model_cache is not None else None


def _differs(spec: ModelServeSpec, held: CachedModel) -> str:
    """What the cache has that the spec does not ask for, in words; empty where they agree."""
    if held.uri != spec.model.uri:
        return f"has uri {held.uri}, and model.uri is {spec.model.uri}"
    if held.revision != (spec.model.revision or "main"):
        return f"has revision {held.revision}, and model.revision is {spec.model.revision or 'main'}"
    return ""


def _last_commit(spec: ModelServeSpec, observed: Observed) -> str | None:
    """Of the last revision that was committed for the same model in the same cache."""
    cache = spec.model.cache
    same = [
        each
        for each in observed.revisions
        if cache is not None
        and cache_named({"spec": each.spec}) == cache.name
        and each.spec["model"].get("uri") == spec.model.uri
    ]
    last = max(same, key=lambda revision: revision.number, default=None)
    return last.spec["model"].get("revision") if last is not None else None
