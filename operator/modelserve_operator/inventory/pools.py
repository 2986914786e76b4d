"""GPU pools: sets of nodes that are alike in everything a plan may depend on. Pure.

Readiness, cordons and free capacity are no part of a pool: a plan must not change because a node restarts or because
our own pods moved in. What labels mean is the core's business (`modelserve.planning.pools.node_labels`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from modelserve.hardware import GPU_RESOURCE
from modelserve.planning import AcceleratorOffer, offers_from_nodes
from modelserve.planning.pools.eligibility import HOSTNAME_LABEL, LEAVING_TAINTS, Taint, lasting_taints, named, unmet
from modelserve.planning.pools.host_capacity import UNKNOWN, HostCapacity, host_capacity, settled
from modelserve.planning.pools.node_labels import named_gpu, node_gpus, whole
from modelserve.planning.pools.resource_slices import Devices, device_offers, devices_of, node_of, together
from modelserve_operator.inventory.catalogue import Catalogue

_PER_NODE_LABELS = frozenset({HOSTNAME_LABEL, "nvidia.com/gfd.timestamp"})  # would make a pool of every node
_GPU_VENDOR = GPU_RESOURCE.partition("/")[0] + "/"

Body = Mapping[str, Any]


@dataclass(frozen=True, order=True)
class Pool:
    """Nodes with the same labels, taints, GPU resources (by name: whole GPUs and MIG slices) and size."""

    labels: tuple[tuple[str, str], ...]
    taints: tuple[Taint, ...] = ()
    resources: tuple[tuple[str, str], ...] = ()
    devices: tuple[Devices, ...] = ()  # of nodes whose GPUs only ResourceSlices tell of
    host: HostCapacity = UNKNOWN  # allocatable memory and processors of each node, in steps

    def unmet(self, *, selector: Mapping[str, str], tolerations: Iterable[Body]) -> Iterator[str]:
        """What keeps pods with this selector and these tolerations off its nodes; host names are no part of a pool."""
        wanted = {key: value for key, value in selector.items() if key != HOSTNAME_LABEL}
        return unmet(dict(self.labels), self.taints, selector=wanted, tolerations=tolerations)


@lru_cache(maxsize=8192)  # every reconcile asks for every pool
def pool_offers(pool: Pool, catalogue: Catalogue) -> tuple[AcceleratorOffer, ...]:
    """What one node of the pool offers; several with mixed MIG, none for an unknown product without memory."""
    if pool.devices:
        return device_offers(pool.devices, dict(pool.labels), pool.taints, catalogue.accelerators, host=pool.host)
    allocatable = dict(pool.resources) | pool.host.shown()
    node = {"metadata": {"labels": dict(pool.labels)}, "status": {"allocatable": allocatable}}
    return offers_from_nodes([node], catalogue.accelerators)


@dataclass(frozen=True)
class PassingTaints:
    """Keys of taints that do not last, beside the well-known ones: of nodes that start, and of those that leave."""

    starting: tuple[str, ...] = ()
    leaving: tuple[str, ...] = ()

    def leaves(self, node: Body) -> bool:
        """Whether it is cordoned, as by a drain, or its pods will have to go for another reason."""
        spec = node.get("spec") or {}
        keys = (*LEAVING_TAINTS, *self.leaving)
        return bool(spec.get("unschedulable") or any(named(each.get("key"), keys) for each in spec.get("taints") or ()))


WELL_KNOWN = PassingTaints()


def pool_of(
    node: Body,
    devices: tuple[Devices, ...] = (),
    *,
    passing: PassingTaints = WELL_KNOWN,
    known: HostCapacity = UNKNOWN,
) -> Pool | None:
    """The pool a node belongs to; None for a node without a GPU that its labels, or `devices`, name. `known`: its
    memory and processors as they were settled before.

    Labels may name GPUs that only slices offer: then the node has none of the device plugin's, whatever they count.
    """
    labels = node["metadata"].get("labels") or {}
    allocatable = (node.get("status") or {}).get("allocatable") or {}
    by_plugin = any(whole(count) for name, count in allocatable.items() if name.startswith(_GPU_VENDOR))
    if by_plugin or not devices:
        devices = ()
        if not any(gpus.count for gpus in node_gpus(labels, allocatable)):
            return None
    return Pool(
        labels=tuple(sorted((key, value) for key, value in labels.items() if key not in _PER_NODE_LABELS)),
        taints=lasting_taints(node.get("spec") or {}, passing=(*passing.starting, *passing.leaving)),
        resources=tuple(
            sorted((name, str(count)) for name, count in allocatable.items() if name.startswith(_GPU_VENDOR))
        ),
        devices=devices,
        host=settled(host_capacity(allocatable), known),
    )


@dataclass(frozen=True)
class Place:
    """What of a node plans are made from."""

    pool: Pool | None
    named: str | None  # the GPU in its labels, be it allocatable or not
    host: str | None  # of a node in a pool: its host name as a selector may have it

    @classmethod
    def of(
        cls, node: Body, devices: tuple[Devices, ...], passing: PassingTaints, *, before: Place | None = None
    ) -> Place:
        """`before`: what it was made from when the node was last heard of."""
        known = before.pool.host if before is not None and before.pool is not None else UNKNOWN
        labels, pool = node["metadata"].get("labels") or {}, pool_of(node, devices, passing=passing, known=known)
        return cls(pool=pool, named=named_gpu(labels), host=labels.get(HOSTNAME_LABEL) if pool is not None else None)


def _without_news(node: Body) -> Body:
    """What of a node its place is made from, and what decides which pods it takes."""
    return {
        "metadata": {"name": node["metadata"]["name"], "labels": node["metadata"].get("labels")},
        "spec": {"taints": (node.get("spec") or {}).get("taints")},
        "status": {"allocatable": (node.get("status") or {}).get("allocatable")},
    }


_NO_PLACE = Place(None, None, None)


class Inventory:
    """Every node, reduced to its place."""

    def __init__(self, passing: PassingTaints = WELL_KNOWN) -> None:
        self._passing = passing
        self._places: dict[str, Place] = {}
        self._bodies: dict[str, Body] = {}  # of each node what does not change by the minute
        self._slices: dict[str, str] = {}  # nodes of ResourceSlices, by the slices' names
        self._published: dict[str, dict[str, tuple[Devices, ...]]] = {}  # by node and slice
        self._devices: dict[str, tuple[Devices, ...]] = {}  # by node
        self.leaving: set[str] = set()  # nodes whose pods will have to go
        self._pools: tuple[Pool, ...] | None = ()  # None: to be worked out again
        self._nodes_of: dict[Pool, tuple[str, ...]] | None = None
        self._idle: tuple[tuple[str, str], ...] | None = None

    def hear(self, node: Body, *, deleted: bool) -> bool:
        """Note a node's state. Whether a plan may come out differently; heartbeats bring nothing."""
        name = node["metadata"]["name"]
        before = self._places.get(name, _NO_PLACE)
        devices = self._devices.get(name, ())
        after = _NO_PLACE if deleted else Place.of(node, devices, self._passing, before=before)
        (self.leaving.add if self._passing.leaves(node) and not deleted else self.leaving.discard)(name)
        if deleted:
            self._places.pop(name, None)
            self._bodies.pop(name, None)
        else:
            self._places[name] = after
            self._bodies[name] = _without_news(node)
        return self._changed(before, after)

    def hear_slice(self, body: Body, *, deleted: bool) -> bool:
        """Note a ResourceSlice. Whether a plan may come out differently."""
        name, node = body["metadata"]["name"], None if deleted else node_of(body)
        before = self._slices.pop(name, None)
        if before is not None:
            del self._published[before][name]
        if node is not None:
            self._slices[name] = node
            self._published.setdefault(node, {})[name] = devices_of([body])
        changed = [self._place_again(each) for each in (node, before) if each is not None]
        return any(changed)

    def _place_again(self, name: str) -> bool:
        """A node's slices have changed."""
        found = together(self._published[name].values())
        if found == self._devices.get(name, ()):
            return False
        self._devices[name] = found
        node = self._bodies.get(name)
        if node is None:  # it is heard of when it is
            return False
        before = self._places.get(name, _NO_PLACE)
        after = Place.of(node, found, self._passing, before=before)
        self._places[name] = after
        return self._changed(before, after)

    def alike(self, names: Iterable[str | None]) -> set[str]:
        """Names of the nodes of the pools that these nodes are of."""
        known = (self._places.get(name) for name in names if name is not None)
        pools = {place.pool for place in known if place is not None and place.pool is not None}
        return {name for pool in pools for name in self.nodes_of()[pool]}

    def node(self, name: str) -> tuple[Body, int] | None:
        """Labels, taints and allocatable resources of a node, and how many whole GPUs its ResourceSlices tell of."""
        body = self._bodies.get(name)
        return None if body is None else (body, sum(each.count for each in self._devices.get(name, ())))

    def slices(self) -> set[str]:
        """ResourceSlices of the driver that are known."""
        return set(self._slices)

    def _changed(self, before: Place, after: Place) -> bool:
        if before == after:
            return False
        self._nodes_of = self._idle = self._pools = None
        return True

    def names(self) -> set[str]:
        """Nodes that are known."""
        return set(self._places)

    def nodes_of(self) -> dict[Pool, tuple[str, ...]]:
        """Names of the nodes of each pool."""
        if self._nodes_of is not None:
            return self._nodes_of
        found: dict[Pool, list[str]] = {}
        for name, place in sorted(self._places.items()):
            if place.pool is not None:
                found.setdefault(place.pool, []).append(name)
        self._nodes_of = {pool: tuple(names) for pool, names in found.items()}
        return self._nodes_of

    def hosts(self) -> dict[str, str]:
        """Nodes in pools by their host names, which need not be their own."""
        return {
            place.host: name for name, place in sorted(self._places.items()) if place.pool is not None and place.host
        }

    def idle(self) -> tuple[tuple[str, str], ...]:
        """Nodes whose labels name a GPU of which none is allocatable, with its name."""
        if self._idle is None:
            places = sorted(self._places.items())
            self._idle = tuple((name, place.named) for name, place in places if place.named and place.pool is None)
        return self._idle

    def pools(self) -> tuple[Pool, ...]:
        """The distinct pools, in a fixed order."""
        if self._pools is None:
            self._pools = tuple(sorted({place.pool for place in self._places.values() if place.pool is not None}))
        return self._pools
