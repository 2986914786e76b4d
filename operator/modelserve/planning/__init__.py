"""Plans: which accelerator, how many, how long a context, in what cache format; the arithmetic of each candidate."""

from modelserve.planning.engine_settings import ENGINE_VERSION, engine_args_for, plan_hash, served_name
from modelserve.planning.planner import plan
from modelserve.planning.pools.node_pools import offers_from_node_pool
from modelserve.planning.pools.offers import AcceleratorOffer, offers_from_nodes

__all__ = [
    "ENGINE_VERSION",
    "AcceleratorOffer",
    "engine_args_for",
    "offers_from_node_pool",
    "offers_from_nodes",
    "plan",
    "plan_hash",
    "served_name",
]
