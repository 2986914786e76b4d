"""The probe's arithmetic over a device whose figures the test sets: which bytes go to which term."""

from __future__ import annotations

import pytest
import torch

from modelserve_worker.startup.memory import GPUMemoryProbe

MIB = 1 << 20


class Device:
    """Figures of torch's allocator and of the driver, in bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.total, self.outside, self.reserved, self.peak = 1000 * MIB, 0, 0, 0
        self.context = 500 * MIB
        monkeypatch.setattr(torch, "empty", lambda *_, **__: setattr(self, "outside", self.context))
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
        probe.joined(peer_bytes=30 * MIB)
    device.reserved = 200 * MIB
    probe.loaded()
    device.outside += 20 * MIB  # kernels that the profile step loads
    device.peak = 265 * MIB
    use = probe.measure(0.9, scratch_bytes=5 * MIB, graphs_bytes=40 * MIB, beside_graphs_bytes=3 * MIB)
    assert (use.weights_bytes, use.activation_bytes) == (200 * MIB, 63 * MIB)
    assert use.overhead == {"context": 520 * MIB, "other_processes": 0, "graphs": 40 * MIB} | (
        {"nccl": 50 * MIB, "peers": 30 * MIB} if ranks > 1 else {}
    )
    assert use.budget_bytes == int(1000 * MIB * 0.9)
    assert use.left_bytes == (900 - 263 - 520 - 40 - (80 if ranks > 1 else 0)) * MIB


def test_ranks_name_the_same_terms_even_where_a_communicator_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    Device(monkeypatch)
    probe = GPUMemoryProbe(torch.device("cuda", 0))
    probe.joined(peer_bytes=0)
    probe.loaded()
    overhead = probe.measure(0.9, scratch_bytes=0, graphs_bytes=0, beside_graphs_bytes=0).overhead
    assert set(overhead) == {"context", "other_processes", "graphs", "nccl", "peers"}


@pytest.mark.parametrize("freed", [0, 300 * MIB])
def test_what_others_hold_is_told_apart_and_is_no_context(monkeypatch: pytest.MonkeyPatch, freed: int) -> None:
    device = Device(monkeypatch)
    device.context = 800 * MIB  # 500 of ours, 300 that were there before
    probe = GPUMemoryProbe(torch.device("cuda", 0), used_before=300 * MIB)
    probe.loaded()
    device.outside -= freed  # the other process ended meanwhile
    use = probe.measure(0.9, scratch_bytes=0, graphs_bytes=0, beside_graphs_bytes=0)
    assert use.overhead == {"context": 500 * MIB, "other_processes": 300 * MIB - freed, "graphs": 0}
    assert use.left_bytes == (900 - 800) * MIB + freed


def test_graphs_are_what_the_capture_took_from_the_device_wherever_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    probe = GPUMemoryProbe(torch.device("cuda", 0))
    device.reserved = 100 * MIB
    kept = 30 * MIB  # blocks that torch only keeps for later

    def release() -> None:
        nonlocal kept
        device.reserved, kept = device.reserved - kept, 0

    monkeypatch.setattr(torch.cuda, "empty_cache", release)

    def capture() -> None:
        nonlocal kept
        device.outside += 7 * MIB  # the driver's nodes
        device.reserved += 50 * MIB  # the graphs' pool
        device.reserved, kept = device.reserved + 11 * MIB, 11 * MIB  # the run before the capture

    assert probe.captured(capture) == 57 * MIB
    assert probe.captured(lambda: None) == 0
