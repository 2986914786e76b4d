"""What all revisions of a ModelServe share: the Service, the PodDisruptionBudget, and the memory of an inspection."""

from __future__ import annotations

from typing import Any

from modelserve.model.model_facts import FACTS_KEY, AssistantFacts, ModelFacts
from modelserve_operator import labels
from modelserve_operator.manifests.metadata import child_metadata
from modelserve_operator.observed.snapshot import Body
from modelserve_operator.sources import ModelSource, surges_first


def service(model_serve: Body, *, plan_hash: str | None, type_: str = "ClusterIP") -> dict[str, Any]:
    """NAME: port 80 to the workers of one revision, or with None of every one; another moves all new connections."""
    name = model_serve["metadata"]["name"]
    return {
        "metadata": child_metadata(model_serve, name=name, component=labels.WORKER),
        "spec": {
            "type": str(type_),
            "ports": [{"name": "http", "port": 80, "targetPort": "http", "protocol": "TCP"}],
            "selector": labels.selector(name) | ({labels.PLAN_HASH: plan_hash} if plan_hash is not None else {}),
        },
    }


def disruption_budget(model_serve: Body) -> dict[str, Any]:
    """NAME: one worker at a time may be evicted, or with onEviction SurgeFirst none, since the operator moves them.
    Workers that are not ready anyway never block a drain.
    """
    name = model_serve["metadata"]["name"]
    return {
        "metadata": child_metadata(model_serve, name=name, component=labels.WORKER),
        "spec": {
            "maxUnavailable": 0 if surges_first(model_serve) else 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": labels.selector(name)},
        },
    }


def model_facts_config_map(
    model_serve: Body, *, source: ModelSource, facts: ModelFacts | AssistantFacts
) -> dict[str, Any]:
    """NAME-model-HASH: what the inspect Job found, so that it runs once per address and revision."""
    name = labels.model_facts_name(model_serve["metadata"]["name"], source.hash)
    metadata = child_metadata(model_serve, name=name, component=labels.MODEL_FACTS)
    data = {FACTS_KEY: facts.model_dump_json(by_alias=True)}
    return {"metadata": metadata, "immutable": True, "data": data}
