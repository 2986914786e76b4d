"""Accelerators that users add to the catalogue: one YAML entry per product, as the data of a ConfigMap holds them.

    NVIDIA-H300: |
      memoryMiB: 200000
      bandwidthGBps: 6000
      bfloat16TFLOPS: 1500
      computeCapability: "9.0"
      architecture: arm64                  # optional: of the nodes' CPUs; as the product usually has them
      gpusPerNode: 8                       # optional: a pool that may grow from nothing
      nodeSelector: {cloud.example/gpu: h300}

An entry of a product that is known replaces it.
"""

from __future__ import annotations

from collections.abc import Mapping

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.alias_generators import to_camel

from modelserve.api.schema_types import LabelKey, LabelValue, Product
from modelserve.bounded_yaml import load_document
from modelserve.errors import InvalidInput, first_fault
from modelserve.hardware import ARCH_LABEL, CPU_PRODUCT, PCIE_LINK, Accelerator, usual_architecture, visible_bytes
from modelserve.planning.pools.offers import AcceleratorOffer
from modelserve.planning.pools.pinning import pinned_terms

CATALOGUE_NAME = "modelserve-accelerators"  # of the ConfigMap, in the operator's namespace
MAX_ENTRIES = 256
MAX_ENTRY_BYTES = 4096


class CatalogueEntry(BaseModel):
    """Facts of one product, as nvidia-smi and the datasheet state them."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, validate_by_name=False)

    memory_mib: int = Field(alias="memoryMiB", ge=1024, le=1 << 22, description="Memory as nvidia-smi shows it.")
    visible_mib: int | None = Field(default=None, alias="visibleMiB", ge=512, le=1 << 22)
    bandwidth: float = Field(alias="bandwidthGBps", gt=0, le=1e6)
    flops: float = Field(alias="bfloat16TFLOPS", gt=0, le=1e6)
    link: float | None = Field(default=None, alias="linkGBps", gt=0, le=1e5, description="To the other GPUs, one way.")
    compute_capability: str = Field(pattern=r"^[0-9]{1,2}\.[0-9]$")
    architecture: str | None = Field(
        default=None, pattern=r"^[a-z0-9]{1,16}$", description="Of the CPUs of its nodes, as kubernetes.io/arch has it."
    )
    gpus_per_node: int | None = Field(default=None, ge=1, le=64)
    node_selector: dict[LabelKey, LabelValue] = Field(default_factory=dict, max_length=16)


def user_catalogue(data: Mapping[str, str]) -> dict[str, Accelerator]:
    """Accelerators by product, from a ConfigMap's data. Raises InvalidInput that names the entry and the field."""
    return {product: _accelerator(product, entry) for product, entry in _entries(data).items()}


def declared_pools(data: Mapping[str, str]) -> tuple[AcceleratorOffer, ...]:
    """Pools that the entries with `gpusPerNode` declare: they may be empty now. Raises as `user_catalogue`."""
    return tuple(
        _declared(_accelerator(product, entry), entry, entry.gpus_per_node)
        for product, entry in _entries(data).items()
        if entry.gpus_per_node
    )


def _declared(accelerator: Accelerator, entry: CatalogueEntry, count: int) -> AcceleratorOffer:
    known = sorted(entry.node_selector.items())
    terms = pinned_terms(known, product=accelerator.product, architecture=accelerator.architecture)
    return AcceleratorOffer(accelerator, count, terms, declared=True)


def _entries(data: Mapping[str, str]) -> dict[str, CatalogueEntry]:
    if len(data) > MAX_ENTRIES:
        raise InvalidInput(f"the catalogue has {len(data)} entries; at most {MAX_ENTRIES} are read")
    return {str(product): _entry(product, text) for product, text in data.items()}


def _entry(product: str, text: object) -> CatalogueEntry:
    where = f"catalogue entry {str(product)[:64]!r}"
    try:
        TypeAdapter(Product).validate_python(product)
    except ValidationError as error:
        raise InvalidInput(f"{where}: the name must be a node label's value of at most 63 characters") from error
    if product == CPU_PRODUCT:
        raise InvalidInput(f"{where}: the CPU's memory is the container's limit; it is no catalogue entry")
    if isinstance(text, str):
        if len(text.encode()) > MAX_ENTRY_BYTES:
            raise InvalidInput(f"{where} takes {len(text.encode()):,} bytes; at most {MAX_ENTRY_BYTES:,} are read")
        try:
            text = load_document(text)
        except InvalidInput as error:
            raise InvalidInput(f"{where}: {error}") from error
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise InvalidInput(f"{where} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(text, dict):
        raise InvalidInput(f"{where} must be a mapping with memoryMiB, bandwidthGBps, bfloat16TFLOPS, ...")
    try:
        return CatalogueEntry.model_validate(text)
    except ValidationError as error:
        field, message = first_fault(error)
        raise InvalidInput(f"{where}: {field}: {message}", field=field) from error


def _accelerator(product: str, entry: CatalogueEntry) -> Accelerator:
    major, minor = entry.compute_capability.split(".")
    seen = entry.visible_mib << 20 if entry.visible_mib else visible_bytes(entry.memory_mib)
    return Accelerator(
        product=product,
        memory_mib=entry.memory_mib,
        visible_bytes=min(seen, entry.memory_mib << 20),
        bandwidth=entry.bandwidth * 1e9,
        flops=entry.flops * 1e12,
        compute_capability=(int(major), int(minor)),
        link=entry.link * 1e9 if entry.link else PCIE_LINK,
        architecture=entry.architecture or entry.node_selector.get(ARCH_LABEL) or usual_architecture(product),
    )
