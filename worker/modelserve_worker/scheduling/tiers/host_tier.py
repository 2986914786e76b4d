"""The tier of host memory: its copies travel with the device's steps (cache/host_memory.py)."""

from __future__ import annotations

from functools import partial

from modelserve_worker.host_pages import HostProgress
from modelserve_worker.scheduling.tiers.tier import StepCopies, Tier, TierOf


class HostTier(Tier):
    """The device copies between the pool and host memory, and says how far it has come."""

    name = "host"
    place = "host memory"

    def heard(self, device: HostProgress) -> HostProgress:
        return device

    def send(self, step: int, copies: StepCopies) -> StepCopies:  # noqa: ARG002 - the batch says which it is
        return copies


def host_tiers(capacity_bytes: int) -> list[TierOf]:
    """The tiers of a worker with so many bytes of host memory for one rank: one, or none."""
    return [partial(HostTier, capacity_bytes=capacity_bytes)] if capacity_bytes else []
