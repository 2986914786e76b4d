"""The supply of a plan: what the cluster offers it at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from modelserve.api import PlanStatus
from modelserve.api.status import SpeedFactors
from modelserve.model.model_facts import AssistantFacts, ModelFacts
from modelserve.planning import AcceleratorOffer
from modelserve.planning.pools.eligibility import HOSTNAME_LABEL
from modelserve.quality.cache_quality import CacheQuality
from modelserve_operator.inventory.catalogue import Catalogue
from modelserve_operator.inventory.measurements import Measurements
from modelserve_operator.inventory.pools import Pool

# The spec as text; what was measured of speed; the namespace whose own measurements count. With a drafter: the name of
# the model, facts that no release ships, what was measured of drafts. CPUs that the image is built for. What 8-bit
# caches cost the weights, by accelerator, and on which the committed plan has one that nobody named.
Paired = tuple[str, tuple[tuple[str, AssistantFacts], ...], tuple[tuple[str, float], ...]]
Cached = tuple[tuple[tuple[str, CacheQuality], ...], str]
PlanKey = tuple[str, ModelFacts, tuple[SpeedFactors, ...], str, Paired | None, tuple[str, ...], Cached]
MOST_PLANS = 1024  # of some 20 KiB each
MOST_KINDS = 64  # of pods, by what they select and tolerate


@dataclass(frozen=True)
class Offered:
    """What pools offer to one kind of pods, and the plans that were made from it: by what it was made of."""

    offers: tuple[AcceleratorOffer, ...]
    plans: dict[PlanKey, PlanStatus] = field(default_factory=dict, compare=False)

    def keep(self, key: PlanKey, plan: PlanStatus) -> None:
        """Remember a plan, in place of the oldest when there are MOST_PLANS."""
        if len(self.plans) >= MOST_PLANS:
            del self.plans[next(iter(self.plans))]
        self.plans[key] = plan


@dataclass(frozen=True)
class Supply:
    """Pools that exist, pools that may grow, the known products, and what was measured on them."""

    pools: tuple[Pool, ...] = ()
    nodes_of: Mapping[Pool, tuple[str, ...]] = field(default_factory=dict)  # names of the nodes of each pool
    hosts: Mapping[str, str] = field(default_factory=dict)  # names of nodes by their host names
    idle: tuple[tuple[str, str], ...] = ()  # nodes whose labels name a GPU of which none is allocatable, with its name
    node_pools: tuple[Mapping[str, Any], ...] = ()  # of Karpenter, in the order of their names
    catalogue: Catalogue = field(default_factory=Catalogue)
    learned: Measurements = field(default_factory=Measurements)
    offered: dict[str, Offered] = field(default_factory=dict, compare=False)  # by kind of pods, see plan_for
    offered_before: Mapping[str, Offered] = field(default_factory=dict, compare=False)  # kept where it is still right

    def seen_from(self, namespace: str) -> Supply:
        """The supply with what counts in one namespace of what was measured; plans are kept together."""
        return replace(self, learned=self.learned.seen_from(namespace))

    def pools_for(self, selector: Mapping[str, str]) -> tuple[Pool, ...]:
        """All pools or, where the selector names a host, the pool of that node."""
        if HOSTNAME_LABEL not in selector:
            return self.pools
        node = self.hosts.get(selector[HOSTNAME_LABEL])
        return tuple(pool for pool, names in self.nodes_of.items() if node in names)

    def keep(self, kind: str, offered: Offered) -> None:
        """Remember what one kind of pods is offered, in place of the oldest when there are MOST_KINDS."""
        if len(self.offered) >= MOST_KINDS:
            del self.offered[next(iter(self.offered))]
        self.offered[kind] = offered

    def succeeding(self, before: Supply) -> Supply:
        """This supply, with the plans of an earlier one that a change of pools, or of speeds, may have left right."""
        same = self.catalogue == before.catalogue and self.learned.proposing == before.learned.proposing
        return replace(self, offered_before=before.offered or before.offered_before) if same else self
