"""The probe's arithmetic over a device whose figures the test sets: which bytes go to which term."""

from __future__ import annotations

import pytest
import torch

from modelserve_worker.execution.memory import GPUMemoryProbe

MIB = 1 << 20


class Device:
    """Figures of torch's allocator and of the driver, in bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.total, self.outside, self.reserved, self.peak = 1000 * MIB, 0, 0, 0
        monkeypatch.setattr(torch, "empty", lambda *_, **__: setattr(self, "outside", 500 * MIB))
        for name, answer in (
            ("mem_get_info", lambda _: (self.total - self.outside - self.reserved, self.total)),
            ("memory_reserved", lambda _: self.reserved),
            ("max_memory_reserved", lambda _: self.peak),
            ("empty_cache", lambda: None),
            ("synchronize", lambda _: None),
            ("reset_peak_memory_stats", lambda _: None),
        ):
            monkeypatch.setattr(torch.cuda, name, answer)


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_byte_of_the_device_has_one_name(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    device = Device(monkeypatch)
    probe = GPUMemoryProbe(torch.device("cuda", 0))
    if ranks > 1:
        device.outside += 80 * MIB
        device.reserved = 30 * MIB  # the tensor of the first collective is torch's, not the communicator's
        probe.joined()
    device.reserved = 200 * MIB
    probe.loaded()
    device.outside += 20 * MIB  # kernels that the profile step loads
    device.peak = 260 * MIB
    use = probe.measure(0.9)
    assert (use.weights_bytes, use.activation_bytes) == (200 * MIB, 60 * MIB)
    assert use.overhead == {"context": 520 * MIB} | ({"nccl": 80 * MIB} if ranks > 1 else {})
    assert use.budget_bytes == int(1000 * MIB * 0.9)
    assert use.left_bytes == (900 - 260 - 520 - (80 if ranks > 1 else 0)) * MIB


def test_ranks_name_the_same_terms_even_where_a_communicator_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    Device(monkeypatch)
    probe = GPUMemoryProbe(torch.device("cuda", 0))
    probe.joined()
    probe.loaded()
    assert set(probe.measure(0.9).overhead) == {"context", "nccl"}
