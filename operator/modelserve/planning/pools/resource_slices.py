"""GPUs that a node offers by dynamic resource allocation alone: ResourceSlices of NVIDIA's driver (resource.k8s.io/v1).

Read are whole GPUs, which such a driver publishes with attributes type `gpu`, productName and cudaComputeCapability,
and with capacity memory. The name is that of GPU feature discovery but for its spaces. MIG devices are left alone.
A node that offers `nvidia.com/gpu` as well is planned by that: it is the same GPUs.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from modelserve.api.schema_types import quantity_of
from modelserve.hardware import ARCH_LABEL, Accelerator, accelerator_from_labels
from modelserve.planning.pools.bodies import mapping
from modelserve.planning.pools.eligibility import Taint
from modelserve.planning.pools.host_capacity import UNKNOWN, HostCapacity
from modelserve.planning.pools.node_labels import INSTANCE_TYPE, PRODUCT_LABEL
from modelserve.planning.pools.offers import AcceleratorOffer, on_nodes
from modelserve.planning.pools.pinning import pinned_terms

DRIVER = "gpu.nvidia.com"
DEVICE_CLASS = "gpu.nvidia.com"
"""As the driver's chart names it. A plan's resource name without a slash is a DeviceClass: no extended resource is."""
OS_LABEL = ("kubernetes.io/os", "linux")
MOST_PER_NODE = 64
_MIB = 1 << 20
_VERSION = re.compile(r"([0-9]{1,3})\.([0-9]{1,3})(\..*)?")


@dataclass(frozen=True, order=True)
class Devices:
    """Like GPUs of one node."""

    product: str  # as GPU feature discovery names it
    memory_mib: int
    compute_capability: tuple[int, int]
    count: int


def is_device_class(resource_name: str | None) -> bool:
    """Whether pods of a plan ask by a claim for devices of that class, and not for an extended resource."""
    return resource_name is not None and "/" not in resource_name


def node_of(resource_slice: Mapping[str, Any]) -> str | None:
    """Node whose GPUs a slice of the driver publishes; None for other drivers, and devices of no one node."""
    spec = mapping(resource_slice.get("spec"))
    name = spec.get("nodeName")
    return name if spec.get("driver") == DRIVER and isinstance(name, str) and name else None


def devices_of(slices: Iterable[Mapping[str, Any]]) -> tuple[Devices, ...]:
    """The whole GPUs of one node's slices; what lacks a product or memory is left out."""
    found: Counter[tuple[str, int, tuple[int, int]]] = Counter()
    for each in slices:
        stated = mapping(each.get("spec")).get("devices")
        for device in stated if isinstance(stated, list) else ():
            if (kind := _kind(mapping(device))) is not None:
                found[kind] += 1
    return tuple(sorted(Devices(*kind, min(count, MOST_PER_NODE)) for kind, count in found.items()))


def together(parts: Iterable[tuple[Devices, ...]]) -> tuple[Devices, ...]:
    """Those of several slices of one node."""
    found: Counter[Devices] = Counter()
    for each in itertools.chain.from_iterable(parts):
        found[replace(each, count=0)] += each.count
    return tuple(sorted(replace(kind, count=min(count, MOST_PER_NODE)) for kind, count in found.items()))


def device_offers(
    devices: Iterable[Devices],
    labels: Mapping[str, str],
    taints: Iterable[Taint],
    catalogue: Mapping[str, Accelerator],
    *,
    host: HostCapacity = UNKNOWN,
) -> tuple[AcceleratorOffer, ...]:
    """What such a node offers. Which GPU it is, the claim says; its nodes are named by the labels that there are."""
    known = tuple((key, labels[key]) for key in (INSTANCE_TYPE,) if key in labels)
    cpus = labels.get(ARCH_LABEL)
    terms = pinned_terms(known or (OS_LABEL,), product=None, architecture=cpus)
    if PRODUCT_LABEL in labels:
        terms = pinned_terms(known, product=labels[PRODUCT_LABEL], architecture=cpus)
    found = []
    for each in devices:
        accelerator = accelerator_from_labels(
            each.product,
            memory_mib=each.memory_mib,
            compute_capability=each.compute_capability if each.compute_capability[0] else None,
            catalogue=catalogue,
        )
        if accelerator is not None:
            kept = tuple(map(str, taints))
            found.append(
                AcceleratorOffer(on_nodes(accelerator, labels), each.count, terms, DEVICE_CLASS, taints=kept, host=host)
            )
    return tuple(found)


def device_selector(product: str) -> str:
    """CEL expression for the whole GPUs of a product, over the attributes of one device."""
    attributes = f'device.attributes["{DRIVER}"]'
    return f'{attributes}.type == "gpu" && {attributes}.productName.replace(" ", "-") == "{product}"'


def _kind(device: Mapping[str, Any]) -> tuple[str, int, tuple[int, int]] | None:
    """(product, memory in MiB, compute capability) of one device; None for a part of a GPU."""
    attributes, capacity = mapping(device.get("attributes")), mapping(device.get("capacity"))
    product = _attribute(attributes, "productName", "string").replace(" ", "-")[:63].rstrip("-._")
    memory = quantity_of(mapping(_named(capacity, "memory")).get("value") or "")
    if _attribute(attributes, "type", "string") != "gpu" or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", product):
        return None
    if memory is None:
        return None
    version = _VERSION.fullmatch(_attribute(attributes, "cudaComputeCapability", "version"))
    capability = (int(version[1]), int(version[2])) if version else (0, 0)
    mebibytes = int(memory) // _MIB
    return (product, mebibytes, capability) if 0 < mebibytes < 1 << 30 else None


def _attribute(attributes: Mapping[str, Any], name: str, kind: str) -> str:
    return str(mapping(_named(attributes, name)).get(kind) or "")


def _named(values: Mapping[str, Any], name: str) -> object:
    """By its name in the driver's own domain, which may be left out."""
    return values.get(name, values.get(f"{DRIVER}/{name}"))
