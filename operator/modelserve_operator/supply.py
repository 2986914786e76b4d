"""What the cluster brings to a plan, at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from modelserve.api import PlanStatus
from modelserve_operator.catalogue import Catalogue
from modelserve_operator.inventory import Pool
from modelserve_operator.learned_memory import LearnedMemory


@dataclass(frozen=True)
class Supply:
    """Pools that exist, pools that may grow, the known products, and what was measured on them."""

    pools: tuple[Pool, ...] = ()
    nodes_of: Mapping[Pool, tuple[str, ...]] = field(default_factory=dict)  # names of the nodes of each pool
    idle: tuple[tuple[str, str], ...] = ()  # nodes whose labels name a GPU of which none is allocatable, with its name
    node_pools: tuple[Mapping[str, Any], ...] = ()  # of Karpenter, in the order of their names
    catalogue: Catalogue = field(default_factory=Catalogue)
    learned: LearnedMemory = field(default_factory=LearnedMemory)
    plans: dict[tuple[str, int], PlanStatus] = field(default_factory=dict, compare=False)  # made on it, see plan_for
