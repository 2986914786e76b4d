"""What a worker makes of the GPU it finds: the planned product, another board of it, less memory, another product."""

from __future__ import annotations

import logging

import pytest

from modelserve.engine_args import EngineArgs
from modelserve.hardware import CATALOGUE
from modelserve_worker.startup import rank as startup
from modelserve_worker.startup.accelerator_check import AcceleratorMismatch, DeviceFacts, check_accelerator

GIB = 1 << 30
H100 = DeviceFacts("NVIDIA H100 80GB HBM3", int(79.19 * GIB), (9, 0))
T4 = DeviceFacts("Tesla T4", int(14.57 * GIB), (7, 5))
A100_SLICE = DeviceFacts("NVIDIA A100-SXM4-40GB MIG 1g.10gb+me", 10 * GIB, (8, 0))
H100_SLICE = DeviceFacts("NVIDIA H100 80GB HBM3 MIG 3g.40gb", int(39.5 * GIB), (9, 0))


def _sized(product: str | None, gib: float | None = None) -> EngineArgs:
    memory = None if gib is None else int(gib * GIB)
    return EngineArgs(model="m", accelerator=product, accelerator_memory_bytes=memory)


@pytest.mark.parametrize(
    ("planned", "gib", "found"),
    [
        (None, None, T4),
        ("NVIDIA-H100-80GB-HBM3", 79.19, H100),
        ("NVIDIA-H100-80GB-HBM3", None, H100),
        ("NVIDIA-A100-SXM4-40GB-MIG-1g.10gb.me", 9.5, A100_SLICE),
        ("NVIDIA-H100-80GB-HBM3-MIG-3g.40gb", 39.5, H100_SLICE),
    ],
)
def test_the_planned_product_is_said_and_nothing_more(
    planned: str | None, gib: float | None, found: DeviceFacts, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        check_accelerator(_sized(planned, gib), found)
    (record,) = caplog.records
    assert (record.levelno, found.product in record.getMessage()) == (logging.INFO, True)


@pytest.mark.parametrize(
    ("planned", "gib", "found"),
    [
        ("NVIDIA-H100-80GB-HBM3", 85.0, H100),  # less memory under the right name: the pool is negotiated
        ("NVIDIA-A100-80GB-PCIe", 79.1, DeviceFacts("NVIDIA A100-SXM4-80GB", int(79.2 * GIB), (8, 0))),
        ("NVIDIA-GPU-MIG-3g.40gb", 39.5, H100_SLICE),  # a slice on a node without the product's label
        ("nvidia-rtx-future", 95.0, DeviceFacts("NVIDIA RTX FUTURE", int(95.2 * GIB), (12, 0))),
    ],
)
def test_what_is_near_enough_is_a_warning_with_both_sides(
    planned: str, gib: float, found: DeviceFacts, caplog: pytest.LogCaptureFixture
) -> None:
    check_accelerator(_sized(planned, gib), found)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"sized for {planned} ({gib:.2f} GiB" in record.getMessage()
    assert f"{found.memory_bytes / GIB:.2f} GiB" in record.getMessage()


@pytest.mark.parametrize(
    ("planned", "gib", "found"),
    [
        ("NVIDIA-H100-80GB-HBM3", 79.19, T4),
        ("NVIDIA-A100-80GB-PCIe", 79.1, H100),  # as much memory, another GPU
        ("NVIDIA-H100-NVL", 93.1, H100),  # another board, and less memory
        ("NVIDIA-A100-SXM4-80GB-MIG-3g.40gb", 39.5, H100_SLICE),
        ("NVIDIA-H100-80GB-HBM3", 79.19, H100_SLICE),  # a part of the GPU that was planned
        ("NVIDIA-H100-80GB-HBM3-MIG-4g.40gb", 39.5, H100_SLICE),
        ("NVIDIA-H100-80GB-HBM3-MIG-3g.40gb", 39.5, H100),
        ("nvidia-rtx-future", 60.0, H100),
        ("nvidia-rtx-future", 95.0, H100),
    ],
)
def test_another_product_ends_the_worker_and_says_both_sides(planned: str, gib: float, found: DeviceFacts) -> None:
    with pytest.raises(AcceleratorMismatch) as failure:
        check_accelerator(_sized(planned, gib), found)
    assert f"sized for {planned} ({gib:.2f} GiB" in str(failure.value)
    assert str(found) in str(failure.value)
    assert f"allow {found.product} in accelerators.products" in str(failure.value)


def test_what_was_found_is_said_exactly() -> None:
    assert str(T4) == "Tesla-T4 (14.57 GiB, no MIG slice, compute capability 7.5)"
    assert str(H100_SLICE) == (
        "NVIDIA-H100-80GB-HBM3-MIG-3g.40gb (39.50 GiB, MIG profile 3g.40gb, compute capability 9.0)"
    )


def test_every_product_of_the_catalogue_takes_itself_and_no_other_of_another_memory() -> None:
    gpus = [each for each in CATALOGUE.values() if not each.is_cpu]
    for planned in gpus:
        for found in gpus:
            facts = DeviceFacts(found.product.replace("-", " "), found.visible_bytes, found.compute_capability)
            args = _sized(planned.product, planned.visible_bytes / GIB)
            if found is planned:
                check_accelerator(args, facts)
            elif found.visible_bytes < planned.visible_bytes * 0.97:
                with pytest.raises(AcceleratorMismatch):
                    check_accelerator(args, facts)


def test_a_rank_checks_before_it_reads_or_allocates_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank looks at its own device; the model's directory does not even exist."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    seen: list[str] = []

    def facts(device: object) -> DeviceFacts:
        seen.append(str(device))
        return T4

    monkeypatch.setattr(startup, "device_facts", facts)
    args = _sized("NVIDIA-H100-80GB-HBM3", 79.19).model_copy(update={"tensor_parallel_size": 2, "device": "cuda"})
    with pytest.raises(AcceleratorMismatch, match="Tesla-T4"):
        startup.start_rank(args, rank=1, init_method="tcp://127.0.0.1:1")
    assert seen == ["cuda:1"]
