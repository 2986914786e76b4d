"""The accelerators that plans may use: the shipped catalogue with the cluster's own entries on top. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from modelserve.catalogue import declared_pools, user_catalogue
from modelserve.errors import InvalidInput
from modelserve.hardware import CATALOGUE, Accelerator
from modelserve.planning import AcceleratorOffer


@dataclass(frozen=True, eq=False)  # one object per state of the ConfigMap, so that offers can be kept by it
class Catalogue:
    """`accelerators` by product; `declared` pools may be empty now; `faults` says of an entry why it is ignored."""

    accelerators: Mapping[str, Accelerator] = field(default_factory=lambda: CATALOGUE)
    declared: tuple[AcceleratorOffer, ...] = ()
    faults: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Catalogue:
        """Read a ConfigMap's data entry by entry: a bad one is ignored by itself."""
        accelerators, faults = dict(CATALOGUE), {}
        declared: list[AcceleratorOffer] = []
        for product, text in sorted(data.items()):
            try:
                accelerators |= user_catalogue({product: text})
                declared += declared_pools({product: text})
            except InvalidInput as error:
                faults[product] = str(error)
        return cls(accelerators, tuple(declared), faults)
