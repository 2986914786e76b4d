"""Memory and processors of a node, which bind pods as its GPUs do. Pure.

What a node may give to pods is its `allocatable`; what daemons on it have taken of that is nobody's to know before a
pod is placed. A node that does not say, as one that does not exist yet, refuses nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal

from modelserve.api.schema_types import MAX_BYTES, quantity_of
from modelserve.api.status import LimitedBy
from modelserve.planning.pools.pod_resources import HostRequest
from modelserve.units import GIB

_STEPS = 64  # to the power of two below: settled figures are at most 1.6 % below what a node says
_CPU_STEP = 100  # thousandths


@dataclass(frozen=True, order=True)
class HostCapacity:
    """0 where it is not known. `cpu_millis`: thousandths of a processor."""

    memory_bytes: int = 0
    cpu_millis: int = 0

    def lacks_memory(self, asked: HostRequest) -> bool:
        return 0 < self.memory_bytes < asked.memory_bytes

    def lacks_cpu(self, asked: HostRequest) -> bool:
        return 0 < self.cpu_millis < asked.cpu * 1000

    def lacks(self, asked: HostRequest) -> LimitedBy | None:
        """What of this node a pod asks more of than there is, memory first."""
        if self.lacks_memory(asked):
            return "HostMemory"
        return "Cpu" if self.lacks_cpu(asked) else None

    def shown(self) -> dict[str, str]:
        """As a node's `allocatable` has it; what is not known is left out."""
        memory = {"memory": str(self.memory_bytes)} if self.memory_bytes else {}
        return memory | ({"cpu": f"{self.cpu_millis}m"} if self.cpu_millis else {})


UNKNOWN = HostCapacity()


def host_capacity(allocatable: Mapping[str, object]) -> HostCapacity:
    """What a node's status says; what is no quantity counts as not known."""
    memory, cpu = (_quantity(allocatable.get(name)) for name in ("memory", "cpu"))
    return HostCapacity(min(int(memory), MAX_BYTES), min(int(cpu * 1000), 1 << 30))


def largest(found: Iterable[HostCapacity]) -> HostCapacity:
    """The most of each that any node has, so that nothing is refused which some node might take; not known where one
    of them is not."""
    nodes = tuple(found)
    memory, cpu = [each.memory_bytes for each in nodes], [each.cpu_millis for each in nodes]
    return HostCapacity(max(memory) if all(memory) else 0, max(cpu) if all(cpu) else 0)


def settled(found: HostCapacity, known: HostCapacity = UNKNOWN) -> HostCapacity:
    """In steps, rounded down, so that nodes of a kind are alike and the few KiB by which a node's figure moves are no
    news. What was settled before stays while the figure is within half a step of what that stands for."""
    unit = 1 << max(0, found.memory_bytes.bit_length() - _STEPS.bit_length())
    return HostCapacity(
        _step(found.memory_bytes, known.memory_bytes, unit), _step(found.cpu_millis, known.cpu_millis, _CPU_STEP)
    )


def _step(found: int, known: int, unit: int) -> int:
    if known and known - unit // 2 <= found < known + unit + unit // 2:
        return known
    return found // unit * unit


def _quantity(value: object) -> Decimal:
    found = quantity_of(value) if len(str(value)) <= 32 else None
    return max(Decimal(0), found or Decimal(0))


def gib(size: int) -> str:
    """GiB with two digits."""
    return f"{size / GIB:,.2f} GiB"
