"""The catalogue and the facts built from node labels."""

from __future__ import annotations

import pytest

from modelserve.hardware import CATALOGUE, CPU_PRODUCT, accelerator_from_labels, visible_bytes
from modelserve.planning.pools.offers import offers_from_nodes


def test_measured_memory() -> None:
    assert round(CATALOGUE["NVIDIA-H200"].visible_bytes / 2**30, 1) == 139.8
    assert round(CATALOGUE["NVIDIA-H100-80GB-HBM3"].visible_bytes / 2**30, 2) == 79.19


def test_the_rule_for_unmeasured_memory_is_just_below_the_measured() -> None:
    for product in ("NVIDIA-H200", "NVIDIA-H100-PCIe"):
        record = CATALOGUE[product]
        assert 0.996 < visible_bytes(record.memory_mib) / record.visible_bytes <= 1


def test_every_gpu_is_complete() -> None:
    for record in CATALOGUE.values():
        if record.product != CPU_PRODUCT:
            assert 0 < record.visible_bytes < record.memory_mib << 20, record.product
            assert record.compute_capability >= (7, 5), record.product
        assert min(record.bandwidth, record.flops) > 0, record.product


def test_labels_of_a_known_product_agree_or_win() -> None:
    assert accelerator_from_labels("NVIDIA-H200", memory_mib=143_771) is CATALOGUE["NVIDIA-H200"]
    slice_of_it = accelerator_from_labels("NVIDIA-H200", memory_mib=71_000, compute_capability=(9, 0))
    assert slice_of_it is not None
    assert slice_of_it.visible_bytes < 71_000 << 20


def test_an_unknown_product_is_built_from_its_labels() -> None:
    made = accelerator_from_labels("NVIDIA-H300", memory_mib=200_000, compute_capability=(9, 0))
    assert made is not None
    assert (made.product, made.memory_mib, made.compute_capability) == ("NVIDIA-H300", 200_000, (9, 0))
    assert made.bandwidth == CATALOGUE["NVIDIA-H200"].bandwidth
    assert accelerator_from_labels("NVIDIA-H300") is None


def _node(
    product: str | None, *, count: str | None = "2", memory: str | None = None, **labels: str
) -> dict[str, object]:
    own = {"nvidia.com/gpu.product": product, "nvidia.com/gpu.memory": memory, **labels}
    return {
        "metadata": {"labels": {key: value for key, value in own.items() if value is not None}},
        "status": {"allocatable": {"nvidia.com/gpu": count} if count else {}},
    }


def test_offers_of_nodes_are_one_per_product_and_count() -> None:
    nodes = [
        _node("NVIDIA-L4"),
        _node("NVIDIA-L4"),
        _node("NVIDIA-L4", count="4"),
        _node("NVIDIA-A10G", count=None, **{"nvidia.com/gpu.count": "8"}),
        _node(None),
        _node("NVIDIA-L40S", count=None),
        _node("Future", memory="not a number"),
        {"metadata": {}},
    ]
    assert [(offer.accelerator, offer.count) for offer in offers_from_nodes(nodes)] == [
        (CATALOGUE["NVIDIA-A10G"], 8),
        (CATALOGUE["NVIDIA-L4"], 2),
        (CATALOGUE["NVIDIA-L4"], 4),
    ]


@pytest.mark.parametrize("capability", [(0, 0), None])
def test_an_unlabelled_capability_is_unknown(capability: tuple[int, int] | None) -> None:
    made = accelerator_from_labels("Future", memory_mib=100_000, compute_capability=capability)
    assert made is not None
    assert made.compute_capability == (0, 0)
