"""Accelerator catalogue: facts of each product, under the name that GPU feature discovery gives it on a node.

Memory is the total that nvidia-smi and the node label show, in MiB; a process sees a little less (`visible_bytes`).
Bandwidth and dense bfloat16 rates are the vendors' datasheet figures; RTX rates are those with float32 accumulation,
and the T4's is float16, since it has no bfloat16 units. A product that is not listed is described by its node labels.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

CPU_PRODUCT = "CPU"
GPU_RESOURCE = "nvidia.com/gpu"
_MIB = 1 << 20
# What GPUs compute with, by compute capability: the planner refuses by these, and so does the worker.
LEAST_CAPABILITY = (7, 5)
BFLOAT16_CAPABILITY = (8, 0)
FP8_E4M3_CAPABILITY = (8, 9)

# Threads that one multiprocessor holds (CUDA C++ Programming Guide, technical specifications by compute capability).
_THREADS = {(7, 5): 1024, (8, 0): 2048, (8, 6): 1536, (8, 9): 1536, (9, 0): 2048, (10, 0): 2048, (12, 0): 1536}
MOST_THREADS = max(_THREADS.values())

_PCIE_ALONE = ((7, 5), (8, 6), (8, 7), (8, 9), (12, 0), (12, 1))  # capabilities that no part with NVLink has
ARCH_LABEL = "kubernetes.io/arch"  # kubelets, clouds and Karpenter set it
AMD64, ARM64 = "amd64", "arm64"  # as it names them
# Images of the worker are built for these where nobody says otherwise.
IMAGE_ARCHITECTURES = (AMD64,)
# Ranks pass steps through shared memory in the order of stores that these keep: the planner refuses several GPUs a
# replica elsewhere, and so does the worker.
RANK_ARCHITECTURES = (AMD64,)
_GRACE = re.compile(r"NVIDIA-G[BH][0-9]")  # GPUs that are one module with Arm cores: GH200, GB200, GB300, GB10

PCIE_LINK = 25e9  # bytes/s that PCIe 4.0 x16 reaches; NVLink figures are the datasheets', one way


@dataclass(frozen=True)
class Accelerator:
    """One GPU (or the CPU of a node, which brings no memory of its own: the container's limit counts)."""

    product: str
    memory_mib: int
    visible_bytes: int  # device memory as the worker sees it
    bandwidth: float  # bytes/s, datasheet
    flops: float  # dense bfloat16 FLOP/s, datasheet
    compute_capability: tuple[int, int]
    link: float = PCIE_LINK  # bytes/s to the other GPUs of a node, one way
    multiprocessors: int = 0  # 0: not known
    architecture: str = AMD64  # of the CPUs of its nodes, as kubernetes.io/arch names it; "": any

    @property
    def is_cpu(self) -> bool:
        return self.product == CPU_PRODUCT

    @property
    def resident_threads(self) -> int:
        """Most threads that are on it at once; where nobody knows its multiprocessors, those of the largest GPU of its
        compute capability, or of any."""
        of_capability = [each for each in _PRODUCTS if each.compute_capability == self.compute_capability]
        most = max(each.multiprocessors for each in of_capability or _PRODUCTS)
        return (self.multiprocessors or most) * _THREADS.get(self.compute_capability, MOST_THREADS)


def usual_architecture(product: str) -> str:
    """Of the CPUs that a GPU product comes with, where no node says it."""
    return ARM64 if _GRACE.match(product) else AMD64


def visible_bytes(memory_mib: int) -> int:
    """Device memory a process sees, for a product that was not measured: the driver keeps 0.5 GiB and 0.25 %.

    Measured: 139.8 GiB of 143,771 MiB (H200), 79.19 GiB of 81,559 MiB (H100). The rule is below both by at most 0.3 %.
    """
    return max(1, memory_mib * _MIB * 9975 // 10_000 - 512 * _MIB)


def _gpu(
    product: str,
    memory_mib: int,
    gigabytes_per_s: float,
    teraflops: float,
    capability: str,
    multiprocessors: int,
    *,
    visible_gib: float = 0.0,
    nvlink: float = 0.0,
) -> Accelerator:
    major, minor = capability.split(".")
    return Accelerator(
        product=product,
        memory_mib=memory_mib,
        visible_bytes=int(visible_gib * 1024) * _MIB if visible_gib else visible_bytes(memory_mib),
        bandwidth=gigabytes_per_s * 1e9,
        flops=teraflops * 1e12,
        compute_capability=(int(major), int(minor)),
        link=nvlink * 1e9 or PCIE_LINK,
        multiprocessors=multiprocessors,
        architecture=usual_architecture(product),
    )


_PRODUCTS = (
    _gpu("Tesla-T4", 15_360, 320, 65, "7.5", 40),
    _gpu("NVIDIA-A10", 23_028, 600, 125, "8.6", 72),
    _gpu("NVIDIA-A10G", 23_028, 600, 70, "8.6", 80),
    _gpu("NVIDIA-A30", 24_576, 933, 165, "8.0", 56),
    _gpu("NVIDIA-A40", 46_068, 696, 150, "8.6", 84),
    _gpu("NVIDIA-A100-PCIE-40GB", 40_960, 1555, 312, "8.0", 108),
    _gpu("NVIDIA-A100-SXM4-40GB", 40_960, 1555, 312, "8.0", 108, nvlink=300),
    _gpu("NVIDIA-A100-80GB-PCIe", 81_920, 1935, 312, "8.0", 108),
    _gpu("NVIDIA-A100-SXM4-80GB", 81_920, 2039, 312, "8.0", 108, nvlink=300),
    _gpu("NVIDIA-L4", 23_034, 300, 121, "8.9", 58),
    _gpu("NVIDIA-L40", 46_068, 864, 181, "8.9", 142),
    _gpu("NVIDIA-L40S", 46_068, 864, 362, "8.9", 142),
    _gpu("NVIDIA-GeForce-RTX-3090", 24_576, 936, 71, "8.6", 82),
    _gpu("NVIDIA-GeForce-RTX-4090", 24_564, 1008, 165, "8.9", 128),
    _gpu("NVIDIA-GeForce-RTX-5090", 32_607, 1792, 209, "12.0", 170),
    _gpu("NVIDIA-RTX-A6000", 49_140, 768, 155, "8.6", 84),
    _gpu("NVIDIA-RTX-6000-Ada-Generation", 49_140, 960, 364, "8.9", 142),
    _gpu("NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition", 97_887, 1597, 503, "12.0", 188),
    _gpu("NVIDIA-H100-PCIe", 81_559, 2039, 756, "9.0", 114, visible_gib=79.19),
    _gpu("NVIDIA-H100-80GB-HBM3", 81_559, 3350, 989, "9.0", 132, visible_gib=79.19, nvlink=450),
    _gpu("NVIDIA-H100-NVL", 95_830, 3938, 835, "9.0", 132, nvlink=300),
    _gpu("NVIDIA-GH200-480GB", 97_871, 4000, 989, "9.0", 132, nvlink=450),
    _gpu("NVIDIA-H200", 143_771, 4800, 989, "9.0", 132, visible_gib=139.8, nvlink=450),
    _gpu("NVIDIA-B200", 183_359, 8000, 2250, "10.0", 148, nvlink=900),
)
# Two channels of DDR4 and eight AVX2 cores: only the order of magnitude matters, to explain that decode is slow.
CPU = Accelerator(
    CPU_PRODUCT, memory_mib=0, visible_bytes=0, bandwidth=40e9, flops=0.5e12, compute_capability=(0, 0), architecture=""
)
CATALOGUE = {record.product: record for record in (*_PRODUCTS, CPU)}


def joined_by_nvlink(product: str, compute_capability: tuple[int, int]) -> bool:
    """Whether GPUs of a product are taken to be joined by NVLink. The planner and the worker both ask this, of the same
    two facts. Bridges that join two boards of a PCIe product do not count, and a product that the catalogue does not
    have is taken to be joined where its generation has such parts."""
    known = CATALOGUE.get(product)
    return compute_capability not in _PCIE_ALONE if known is None else known.link > PCIE_LINK


def accelerator_from_labels(
    product: str,
    *,
    memory_mib: int | None = None,
    compute_capability: tuple[int, int] | None = None,
    catalogue: Mapping[str, Accelerator] = CATALOGUE,
) -> Accelerator | None:
    """Facts of the product a node's labels name; None when it is unknown and its memory is not labelled.

    A memory label that differs by more than 2 % from the catalogue (a MIG slice, a smaller board of the same name) wins
    over it. The rates of an unlisted product are those of the listed one nearest in memory, of the same generation
    where there is one; they rank candidates, they never decide whether something fits.
    """
    known = catalogue.get(product)
    if known is not None and (memory_mib is None or abs(memory_mib - known.memory_mib) * 50 <= known.memory_mib):
        return known
    if memory_mib is None:
        return None
    listed = [record for record in catalogue.values() if not record.is_cpu]
    same_generation = [
        record for record in listed if compute_capability and record.compute_capability[0] == compute_capability[0]
    ]
    nearest = known or min(
        same_generation or listed or _PRODUCTS, key=lambda record: abs(record.memory_mib - memory_mib)
    )
    return replace(
        nearest,
        product=product,
        memory_mib=memory_mib,
        visible_bytes=visible_bytes(memory_mib),
        compute_capability=compute_capability or (known.compute_capability if known else (0, 0)),
        architecture=known.architecture if known else usual_architecture(product),
    )
