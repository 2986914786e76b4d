"""Checks that the GPU which this rank finds is the one that its settings were sized for. Torch-free.

Labels that are wrong, late or somebody else's guess can lead a pod to another GPU. Its memory would be seen by the
pool, its speed and its kernels by nobody, so another product ends the worker for good, and the message has both sides.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

from modelserve.engine_args import EngineArgs
from modelserve.errors import InvalidInput
from modelserve.hardware import CATALOGUE
from modelserve.termination import TerminationReason
from modelserve.units import GIB

MEMORY_TOLERANCE = 0.02  # drivers and ECC differ by less, products by more
_BOARD = re.compile(r"-(PCIE|PCIe|SXM\d*|NVL|HBM\d*e?|\d+GB)(?=-|$)")  # forms that one GPU is sold in
_MIG = re.compile(r"-MIG-(.+)$")

logger = logging.getLogger(__name__)


class AcceleratorMismatch(InvalidInput):
    """This machine lacks the device, or the device lacks the format, that EngineArgs ask for."""

    reason = TerminationReason.AcceleratorMismatch


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What a rank sees of its GPU. `name` is the driver's, with the MIG profile where it is a slice."""

    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]

    @property
    def product(self) -> str:
        """The name as GPU feature discovery writes it into the node label."""
        return self.name.strip().replace(" ", "-").replace("+", ".")

    def __str__(self) -> str:
        return _described(self.product, self.memory_bytes, self.compute_capability)


def check_accelerator(args: EngineArgs, found: DeviceFacts) -> None:
    """Log what was found; raise AcceleratorMismatch when it is another product than `args.accelerator`.

    Another board of the same GPU will do where it has no less memory, and so will a GPU of the planned memory where the
    plan's name is not one that a driver gives (a cloud's own). MIG profiles must be equal. Less memory than planned
    under the right name is no mismatch: the pool comes out smaller, which start-up negotiates.
    """
    if args.accelerator is None:
        logger.info("the accelerator is %s", found)
        return
    sized = args.accelerator_memory_bytes
    planned = _described(args.accelerator, sized)
    enough = sized is None or found.memory_bytes >= sized * (1 - MEMORY_TOLERANCE)
    if found.product == args.accelerator:
        if enough:
            logger.info("the accelerator is the planned %s", found)
        else:
            logger.warning("the settings were sized for %s, and the accelerator is %s", planned, found)
        return
    if _slice(found.product) == _slice(args.accelerator) and enough:
        same_gpu = _board_free(found.product) == _board_free(args.accelerator)
        named_by_others = _MIG.sub("", args.accelerator) not in CATALOGUE
        as_large = sized is None or found.memory_bytes <= sized * (1 + MEMORY_TOLERANCE)
        if same_gpu or (named_by_others and as_large):
            logger.warning("the settings were sized for %s, and the accelerator is %s: near enough", planned, found)
            return
    raise AcceleratorMismatch(
        f"the settings were sized for {planned}, and the accelerator that this worker finds is {found}: correct the "
        f"node's labels (nvidia.com/gpu.product, or the cloud's), or allow {found.product} in "
        "accelerators.products so that it is planned for",
        field="accelerator",
    )


def _described(product: str, memory_bytes: int | None, capability: tuple[int, int] | None = None) -> str:
    mig = _slice(product)
    kind = "no MIG slice" if mig is None else f"MIG profile {mig}"
    memory = "" if memory_bytes is None else f"{memory_bytes / GIB:.2f} GiB, "
    of = "" if capability is None else f", compute capability {capability[0]}.{capability[1]}"
    return f"{product} ({memory}{kind}{of})"


def _slice(product: str) -> str | None:
    match = _MIG.search(product)
    return match[1] if match else None


def _board_free(product: str) -> str:
    return _BOARD.sub("", _MIG.sub("", product))
