"""GPUs that only ResourceSlices tell of: what is read of a slice, and what it offers."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from modelserve.hardware import CATALOGUE
from modelserve.planning.pools.resource_slices import (
    Devices,
    device_offers,
    devices_of,
    is_device_class,
    node_of,
    together,
)


def gpu(index: int = 0, **changes: Any) -> dict[str, Any]:
    """A device as NVIDIA's driver publishes it."""
    attributes = {
        "type": {"string": "gpu"},
        "uuid": {"string": f"GPU-{index}"},
        "productName": {"string": "NVIDIA H100 80GB HBM3"},
        "architecture": {"string": "Hopper"},
        "cudaComputeCapability": {"version": "9.0.0"},
        "driverVersion": {"version": "580.95.5"},
    }
    capacity = {"memory": {"value": "81559Mi"}}
    return {"name": f"gpu-{index}", "attributes": {**attributes, **changes}, "capacity": capacity}


def resource_slice(*devices: dict[str, Any], node: str = "a", driver: str = "gpu.nvidia.com") -> dict[str, Any]:
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": driver, "nodeName": node, "pool": pool, "devices": list(devices)}
    return {"metadata": {"name": f"{node}-{driver}-x"}, "spec": spec}


def test_like_gpus_are_counted_over_the_slices_of_a_node() -> None:
    slices = [resource_slice(gpu(0), gpu(1)), resource_slice(gpu(2))]
    assert devices_of(slices) == (Devices("NVIDIA-H100-80GB-HBM3", 81_559, (9, 0), 3),)
    assert together(devices_of([each]) for each in slices) == devices_of(slices)


def test_names_may_have_the_drivers_domain() -> None:
    device = gpu()
    device["attributes"] = {f"gpu.nvidia.com/{name}": value for name, value in device["attributes"].items()}
    device["capacity"] = {"gpu.nvidia.com/memory": device["capacity"]["memory"]}
    assert devices_of([resource_slice(device)]) == (Devices("NVIDIA-H100-80GB-HBM3", 81_559, (9, 0), 1),)


@pytest.mark.parametrize(
    "device",
    [
        gpu(type={"string": "mig"}),
        gpu(productName={"int": 3}),
        {**gpu(), "capacity": {}},
        {**gpu(), "capacity": {"memory": {"value": "much"}}},
        {**gpu(), "attributes": None},
        {"name": "bare"},
    ],
)
def test_what_is_no_whole_gpu_with_a_size_is_left_out(device: dict[str, Any]) -> None:
    assert devices_of([resource_slice(device, gpu())]) == devices_of([resource_slice(gpu())])


@pytest.mark.parametrize("spec", [None, {}, {"devices": "x"}, {"devices": [None, 3]}])
def test_odd_slices_offer_nothing(spec: Any) -> None:
    assert devices_of([{"metadata": {"name": "odd"}, "spec": spec}]) == ()
    assert node_of({"spec": spec}) is None


def test_other_drivers_and_devices_of_no_one_node_are_not_ours() -> None:
    assert node_of(resource_slice(gpu())) == "a"
    assert node_of(resource_slice(gpu(), driver="dra.example.com")) is None
    shared = copy.deepcopy(resource_slice(gpu()))
    del shared["spec"]["nodeName"]
    assert node_of({**shared, "spec": {**shared["spec"], "allNodes": True}}) is None


def test_an_offer_asks_by_a_claim_and_has_a_term() -> None:
    """A known product has the catalogue's facts, another those that the driver tells."""
    (offer,) = device_offers(devices_of([resource_slice(gpu(0), gpu(1))]), {}, (), CATALOGUE)
    assert offer.accelerator is CATALOGUE["NVIDIA-H100-80GB-HBM3"]
    assert (offer.count, offer.largest_replica) == (2, 2)
    assert is_device_class(offer.resource_name)
    assert not is_device_class("nvidia.com/gpu")
    assert not is_device_class(None)
    ((requirement,),) = [term.match_expressions for term in offer.node_selector_terms]
    assert (requirement.key, requirement.values) == ("kubernetes.io/os", ("linux",))
    unknown = resource_slice(gpu(productName={"string": "NVIDIA H300 Next"}))
    (offer,) = device_offers(devices_of([unknown]), {"node.kubernetes.io/instance-type": "big"}, (), CATALOGUE)
    assert (offer.accelerator.product, offer.accelerator.memory_mib) == ("NVIDIA-H300-Next", 81_559)
    assert offer.node_selector_terms[0].match_expressions[0].key == "node.kubernetes.io/instance-type"
