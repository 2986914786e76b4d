"""Prefix caching on or off, and host memory for it: from the spec to the plan, its hash and the worker's settings."""

from __future__ import annotations

from typing import Any

import pytest

from modelserve.api import ModelServeSpec, PlanStatus
from modelserve.errors import InvalidInput
from modelserve.hardware import CATALOGUE
from modelserve.planning import AcceleratorOffer, engine_args_for, plan
from modelserve.published import published_model
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout, cache_geometry
from modelserve.sizing.prefixes import prefix_bytes, window_bytes

URI = "hf://google/gemma-4-31B-it"
FACTS = published_model(URI)
assert FACTS is not None
OFFERS = [AcceleratorOffer(CATALOGUE["NVIDIA-H200"], 2)]


def _spec(**fields: Any) -> ModelServeSpec:
    return ModelServeSpec.model_validate({"model": {"uri": URI}, **fields})


def _planned(**fields: Any) -> PlanStatus:
    return plan(_spec(**fields), FACTS.architecture, OFFERS)


def _settings(**fields: Any) -> dict[str, Any]:
    arguments = engine_args_for(_planned(**fields), _spec(**fields), model_directory="/m")
    return arguments.model_dump(by_alias=True, exclude_unset=True)


def test_what_is_left_out_is_the_workers_to_choose() -> None:
    assert not {"prefixCaching", "hostCacheBytes"} & set(_settings())
    assert _planned().host_cache_bytes is None


@pytest.mark.parametrize("asked", [True, False])
def test_prefix_caching_reaches_the_worker_and_is_another_plan(asked: bool) -> None:
    assert _settings(engine={"prefixCaching": asked})["prefixCaching"] is asked
    hashes = {_planned(**fields).hash for fields in ({}, *({"engine": {"prefixCaching": on}} for on in (True, False)))}
    assert len(hashes) == 3, "off is not what is left out, whatever the first release did by default"


def test_host_memory_reaches_worker_and_plan_and_is_explained() -> None:
    asked = {"kvCache": {"hostMemory": "64Gi"}}
    planned = _planned(**asked)
    assert _settings(**asked)["hostCacheBytes"] == planned.host_cache_bytes == 64 << 30
    assert planned.hash != _planned().hash
    geometry = cache_geometry(
        FACTS.architecture, dtype=KVCacheDtype.BFLOAT16, layout=KVCacheLayout.V_ONLY, tensor_parallel_size=1
    )
    windows = (64 << 30) // window_bytes(geometry)
    assert planned.message is not None
    assert "64.00 GiB of host memory, in the pod's request and limit, keep" in planned.message
    assert f"the last windows of {windows}," in planned.message
    assert planned.per_gpu == _planned().per_gpu


def test_host_memory_too_small_for_any_and_on_the_cpu_says_so() -> None:
    assert "too little for any" in (_planned(kvCache={"hostMemory": "512Mi"}).message or "")
    on_cpu = {"accelerators": {"products": ["CPU"]}, "pod": {"resources": {"limits": {"memory": "200Gi"}}}}
    planned = _planned(kvCache={"hostMemory": "8Gi"}, **on_cpu)
    assert planned.fits
    assert planned.host_cache_bytes is None
    assert "kvCache.hostMemory is for GPUs" in (planned.message or "")


@pytest.mark.parametrize(("asked", "limit"), [("64Gi", "64Gi"), ("9000000P", None)])
def test_host_memory_that_no_pod_can_have_is_refused(asked: str, limit: str | None) -> None:
    pod = {"resources": {"limits": {"memory": limit}}} if limit else {}
    with pytest.raises(InvalidInput, match="hostMemory") as raised:
        _planned(kvCache={"hostMemory": asked}, pod=pod)
    assert raised.value.field == "spec.kvCache.hostMemory"


def test_two_ranks_have_a_half_of_a_window_each() -> None:
    one, two = (
        cache_geometry(
            FACTS.architecture, dtype=KVCacheDtype.BFLOAT16, layout=KVCacheLayout.V_ONLY, tensor_parallel_size=ranks
        )
        for ranks in (1, 2)
    )
    assert window_bytes(one) == 2 * window_bytes(two)
    assert prefix_bytes(one, 65) == 2 * one.global_page.page_bytes


def test_a_worker_of_the_first_release_is_not_told_of_host_memory() -> None:
    arguments = engine_args_for(
        _planned(kvCache={"hostMemory": "8Gi"}), _spec(kvCache={"hostMemory": "8Gi"}), model_directory="/m"
    )
    assert arguments.dialect("0.2.0")["hostCacheBytes"] == 8 << 30
    assert "hostCacheBytes" not in arguments.dialect("0.1.0")


def test_a_port_for_events_reaches_the_worker_and_is_another_plan() -> None:
    asked = {"engine": {"kvEventsPort": 15_557}}
    assert _settings(**asked)["kvEventsEndpoint"] == "tcp://*:15557"
    assert _planned(**asked).hash != _planned().hash
    with pytest.raises(ValueError, match="kvEventsPort is 15557"):
        _spec(engine={"kvEventsPort": 15_557, "prefixCaching": False})
