"""Which ModelAdapters a ModelServe takes, the oldest first, and why it does not take the others. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from modelserve.api import ModelServeSpec
from modelserve.api.model_adapter import ADAPTER_KIND
from modelserve.api.modelserve import KIND
from modelserve.planning.engine_settings import served_name
from modelserve.reference_grant import grants
from modelserve_operator.adapters.reasons import AdapterReason
from modelserve_operator.adapters.snapshot import Adapter, AdapterSnapshot
from modelserve_operator.allowed import AllowRule, address_not_allowed
from modelserve_operator.sources import MODELS_PATH, PVC_PREFIX, model_source


@dataclass(frozen=True)
class Refusal:
    """Why an adapter is not taken. `held`: what workers have of it stays, since that says nothing of it."""

    reason: AdapterReason
    message: str
    held: bool = False


def refusals(snapshot: AdapterSnapshot, rules: Sequence[AllowRule]) -> dict[str, Refusal]:
    """By uid, of the adapters that are not taken. Those that are being deleted are neither taken nor refused.

    An adapter takes one place of `spec.adapters.max`, and a name; younger ones get what older ones leave.
    """
    found: dict[str, Refusal] = {}
    names: dict[str, Adapter] = {}
    taken = 0
    for adapter in in_order(snapshot):
        refusal = next(_faults(adapter, snapshot, rules), None)
        if refusal is None and snapshot.spec is not None and snapshot.spec.adapters is not None:
            refusal = _no_place(adapter, snapshot.spec, names, taken, most=snapshot.spec.adapters.max)
        if refusal is not None:
            found[adapter.uid] = refusal
            continue
        taken += 1
        names[adapter.served_name] = adapter
    return found


def in_order(snapshot: AdapterSnapshot) -> tuple[Adapter, ...]:
    """Those that are not being deleted, the oldest first."""
    return tuple(sorted((each for each in snapshot.adapters if not each.leaving), key=lambda each: each.age))


def worker_address(adapter: Adapter, spec: ModelServeSpec) -> str | None:
    """Where workers find its files: its address, or the directory of a claim that they mount; None: of another one."""
    assert adapter.spec is not None, "an invalid one is not taken"
    uri = adapter.spec.uri
    if not uri.startswith(PVC_PREFIX):
        return uri
    claim, _, path = uri.removeprefix(PVC_PREFIX).partition("/")
    return f"{MODELS_PATH}/{path}" if model_source(spec).claim == claim else None


def _faults(adapter: Adapter, snapshot: AdapterSnapshot, rules: Sequence[AllowRule]) -> Iterator[Refusal]:
    """What is wrong with it by itself. Who has no grant learns nothing of the other namespace."""
    if adapter.spec is None:
        yield Refusal(AdapterReason.INVALID_SPEC, adapter.fault)
        return
    yield from _not_granted(adapter, snapshot)
    where = "/".join(snapshot.key)
    if snapshot.model_serve is None:
        yield Refusal(AdapterReason.MODEL_NOT_FOUND, f"There is no ModelServe {where}: create it, or delete this.")
        return
    if snapshot.spec is None:
        message = f"The spec of ModelServe {where} cannot be read; its condition Accepted says why. What its workers "
        yield Refusal(AdapterReason.MODEL_INVALID, f"{message}serve stays.", held=True)
        return
    if snapshot.spec.adapters is None:
        message = f"ModelServe {where} serves no adapters: set its spec.adapters.max, which makes new pods."
        yield Refusal(AdapterReason.NOT_ENABLED, message)
        return
    if excess := address_not_allowed(adapter.spec.uri, adapter.key.namespace, rules):
        yield Refusal(AdapterReason.NOT_ALLOWED, f"spec.uri is {excess}.")
    yield from _out_of_reach(adapter, snapshot, snapshot.spec)


def _out_of_reach(adapter: Adapter, snapshot: AdapterSnapshot, spec: ModelServeSpec) -> Iterator[Refusal]:
    assert adapter.spec is not None, "looked at before"
    uri = adapter.spec.uri
    if uri.startswith(PVC_PREFIX) and adapter.key.namespace != snapshot.key.namespace:
        message = f"{uri} names a claim of another namespace: use hf:// or s3://, or a ModelAdapter beside the claim."
        yield Refusal(AdapterReason.CLAIM_NOT_MOUNTED, message)
    elif worker_address(adapter, spec) is None:
        there = model_source(spec).claim
        mounted = f"they mount {there}" if there else "they mount none"
        message = f"Workers do not mount the claim of {uri} ({mounted}): put its files on a claim of the ModelServe."
        yield Refusal(AdapterReason.CLAIM_NOT_MOUNTED, message)
    if adapter.secret_fault is not None:
        yield Refusal(AdapterReason.SECRET_UNREADABLE, adapter.secret_fault)


def _not_granted(adapter: Adapter, snapshot: AdapterSnapshot) -> Iterator[Refusal]:
    namespace = adapter.key.namespace
    if namespace == snapshot.key.namespace:
        return
    if not snapshot.grants_served:
        message = (
            "The cluster serves no ReferenceGrant (gateway.networking.k8s.io), or the operator may not list it, so no "
            "adapter of another namespace is taken: install its CRD, or move this to namespace "
            f"{snapshot.key.namespace}."
        )
        yield Refusal(AdapterReason.REFERENCE_NOT_GRANTED, message)
    elif not any(grants(body, namespace, snapshot.key.name) for body in snapshot.grants):
        message = (
            f"Namespace {snapshot.key.namespace} has no ReferenceGrant from {ADAPTER_KIND}s of namespace {namespace} "
            f"to {KIND} {snapshot.key.name}: have its owners make one."
        )
        yield Refusal(AdapterReason.REFERENCE_NOT_GRANTED, message)


def _no_place(
    adapter: Adapter, spec: ModelServeSpec, names: Mapping[str, Adapter], taken: int, *, most: int
) -> Refusal | None:
    name, holder = adapter.served_name, names.get(adapter.served_name)
    if name == served_name(spec):
        return Refusal(AdapterReason.NAME_TAKEN, f"The model itself is served as {name}: set another spec.servedName.")
    if holder is not None:
        near = holder.key.namespace == adapter.key.namespace
        who = f"ModelAdapter {holder.key.name}" if near else "An older ModelAdapter of another namespace"
        return Refusal(AdapterReason.NAME_TAKEN, f"{who} is served as {name}: make one with another spec.servedName.")
    if taken >= most:
        message = f"spec.adapters.max of the ModelServe is {most}, and so many older adapters are there: raise it, or "
        return Refusal(AdapterReason.TOO_MANY, f"{message}delete one of them.")
    return None
