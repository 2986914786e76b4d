"""Checks what ModelServes of a namespace may have the operator write, by rules of the installation. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Annotated

from pydantic import Field, StringConstraints

from modelserve.api import ModelServeSpec
from modelserve.api.gateway import GatewaySpec
from modelserve.api.schema_types import ApiModel

Pattern = Annotated[str, StringConstraints(min_length=1, max_length=512, pattern=r"^[A-Za-z0-9._:/@*-]+$")]
Patterns = Annotated[tuple[Pattern, ...], Field(max_length=256)]
ANY = ("*",)
MOST_BUFFERED = 100  # workers' room beside those that run: a typo must not buy a thousand nodes
MOST_REPLICAS = 10_000  # more pods than that, one ModelServe's alone, are a typo too


class AllowRule(ApiModel):
    """Of some namespaces. `*` stands for any text, in a name with slashes for any within the part before the first."""

    namespaces: Annotated[tuple[Pattern, ...], Field(min_length=1, max_length=1024)]
    replicas: int = Field(default=MOST_REPLICAS, ge=0, le=1 << 20)
    buffer_replicas: int = Field(default=MOST_BUFFERED, ge=0, le=1 << 20)
    gateways: Patterns = ANY  # NAMESPACE/NAME, or NAME of the ModelServe's own namespace
    hostnames: Patterns = ANY  # `*.example.com`: every name below it
    images: Patterns = ANY
    adapters: Patterns = ANY  # addresses of ModelAdapters
    priority_classes: Patterns = ANY
    service_accounts: Patterns = ANY


_NOTHING = AllowRule(
    namespaces=ANY,
    buffer_replicas=0,
    gateways=(),
    hostnames=(),
    images=(),
    adapters=(),
    priority_classes=(),
    service_accounts=(),
)


def rule_of(namespace: str, rules: Sequence[AllowRule]) -> AllowRule:
    """The first that names it; where none does, nothing that there are rules for is allowed."""
    return next((each for each in rules if _matches(namespace, each.namespaces)), _NOTHING)


def not_allowed(spec: ModelServeSpec, namespace: str, rules: Sequence[AllowRule]) -> str | None:
    """The first field that asks for more, its value, and what is allowed; None where nothing does."""
    for field, value, allowed in _excesses(spec, namespace, rule_of(namespace, rules)):
        return (
            f"{field} is {value}; in namespace {namespace} this installation allows {allowed}. Change it, or have the "
            "installation allow it (the chart's value allowed). What runs stays as it is"
        )
    return None


def address_not_allowed(uri: str, namespace: str, rules: Sequence[AllowRule]) -> str | None:
    """The address of a ModelAdapter, and what is allowed in its place; None where it is allowed."""
    allowed = rule_of(namespace, rules).adapters
    if _matches(uri, allowed):
        return None
    return (
        f"{uri}; for adapters of namespace {namespace} this installation allows {_told(allowed)} (the chart's value "
        "allowed)"
    )


def _excesses(spec: ModelServeSpec, namespace: str, rule: AllowRule) -> Iterator[tuple[str, str, str]]:
    if spec.replicas > rule.replicas:
        yield "spec.replicas", f"{spec.replicas:,}", f"{rule.replicas:,} at most"
    buffer = spec.capacity_buffer
    if buffer is not None and (buffer.replicas or 0) > rule.buffer_replicas:
        yield "spec.capacityBuffer.replicas", f"{buffer.replicas:,}", f"{rule.buffer_replicas:,} at most"
    elif buffer is not None and not rule.buffer_replicas:
        yield "spec.capacityBuffer", "set", "none"
    if spec.gateway is not None:
        yield from _routes(spec.gateway, namespace, rule)
    for field, value, patterns in (
        ("spec.image", spec.image, rule.images),
        ("spec.pod.priorityClassName", spec.pod.priority_class_name, rule.priority_classes),
        ("spec.pod.serviceAccountName", spec.pod.service_account_name, rule.service_accounts),
    ):
        if value is not None and not _matches(value, patterns):
            yield field, value, _told(patterns)


def _routes(gateway: GatewaySpec, namespace: str, rule: AllowRule) -> Iterator[tuple[str, str, str]]:
    allowed = [each if "/" in each or each == "*" else f"{namespace}/{each}" for each in rule.gateways]
    for number, parent in enumerate(gateway.parent_refs):
        named = f"{parent.namespace or namespace}/{parent.name}"
        if not _matches(named, allowed):
            yield f"spec.gateway.parentRefs[{number}]", named, _told(allowed)
    for number, name in enumerate(gateway.hostnames):
        if not any(_covers(each, name) for each in rule.hostnames):
            yield f"spec.gateway.hostnames[{number}]", name, _told(rule.hostnames)
    if not gateway.hostnames and "*" not in rule.hostnames:
        yield "spec.gateway.hostnames", "left out, which means all of the listeners'", _told(rule.hostnames)


def _matches(text: str, patterns: Sequence[str]) -> bool:
    """`*` does not reach over the first slash: a registry's name must not be found in the path of another's image."""
    head, _, tail = text.partition("/")
    split = (each.partition("/") for each in patterns)
    return "*" in patterns or any(fnmatchcase(head, first) and fnmatchcase(tail, rest) for first, _, rest in split)


def _covers(pattern: str, name: str) -> bool:
    """Whether all that a host name of a route, perhaps `*.x`, stands for is allowed by one that may begin with `*`."""
    return pattern in ("*", name) or (pattern.startswith("*.") and name.endswith(pattern[1:]))


def _told(patterns: Sequence[str]) -> str:
    return ", ".join(patterns) or "none"
