"""What NetworkPolicies (networking.k8s.io/v1) say about a connection. The test cluster's bridge enforces none."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Policy = Mapping[str, Any]


@dataclass(frozen=True)
class Peer:
    """One side of a connection. Addresses of nodes and of the API server are no pods: `labels` None."""

    address: str
    namespace: str = ""
    labels: Mapping[str, str] | None = None
    namespace_labels: Mapping[str, str] | None = None


def allowed(policies: Iterable[Policy], *, source: Peer, target: Peer, port: int, protocol: str = "TCP") -> bool:
    """Whether every side that policies select lets the connection through."""
    known = list(policies)
    sides = (("Egress", source, target), ("Ingress", target, source))
    return all(_passes(known, direction, own, other, port, protocol) for direction, own, other in sides)


def _passes(policies: list[Policy], direction: str, own: Peer, other: Peer, port: int, protocol: str) -> bool:
    selecting = [each for each in policies if direction in each["spec"]["policyTypes"] and _selects(each, own)]
    if not selecting:
        return True
    rules = [
        (each["metadata"]["namespace"], rule)
        for each in selecting
        for rule in each["spec"].get(direction.lower()) or ()
    ]
    peers = "to" if direction == "Egress" else "from"
    return any(
        _port_matches(rule.get("ports"), port, protocol) and _peer_matches(rule.get(peers), other, namespace)
        for namespace, rule in rules
    )


def _selects(policy: Policy, peer: Peer) -> bool:
    same = peer.labels is not None and policy["metadata"]["namespace"] == peer.namespace
    return same and _labels_match(policy["spec"]["podSelector"], peer.labels or {})


def _port_matches(ports: Any, port: int, protocol: str) -> bool:
    return not ports or any(
        each.get("protocol", "TCP") == protocol and each.get("port") in (None, port) for each in ports
    )


def _peer_matches(peers: Any, other: Peer, namespace: str) -> bool:
    return not peers or any(_one_matches(each, other, namespace) for each in peers)


def _one_matches(peer: Mapping[str, Any], other: Peer, namespace: str) -> bool:
    if "ipBlock" in peer:
        block, address = peer["ipBlock"], ipaddress.ip_address(other.address)
        excluded = any(address in ipaddress.ip_network(each) for each in block.get("except") or ())
        return address in ipaddress.ip_network(block["cidr"]) and not excluded
    if other.labels is None:
        return False
    if "namespaceSelector" in peer:
        if not _labels_match(peer["namespaceSelector"], other.namespace_labels or {}):
            return False
    elif other.namespace != namespace:
        return False
    return _labels_match(peer.get("podSelector") or {}, other.labels)


def _labels_match(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    if any(labels.get(key) != value for key, value in (selector.get("matchLabels") or {}).items()):
        return False
    return all(_expression(each, labels) for each in selector.get("matchExpressions") or ())


def _expression(each: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    value = labels.get(each["key"])
    match each["operator"]:
        case "In":
            return value in each["values"]
        case "NotIn":
            return value not in each["values"]
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
    raise ValueError(f"unknown operator {each['operator']}")
