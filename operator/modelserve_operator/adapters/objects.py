"""Objects beside a ModelServe that are of its adapters: a ConfigMap and an InferenceModelRewrite. Pure.

Workers mount the ConfigMap: it has the set of adapters, for those that start while no operator runs, and the digest of
the key that sets are taken by. It holds no secret: private adapters come to such workers with the operator's next call.
"""

from __future__ import annotations

import json
from typing import Any

from modelserve_operator import labels
from modelserve_operator.adapters.decision import AdapterDecision
from modelserve_operator.adapters.snapshot import Body
from modelserve_operator.cluster.kinds import INFERENCE_POOL
from modelserve_operator.manifests.metadata import child_metadata

SET_KEY, KEYS_KEY = "adapters.json", "management-keys"


def model_rewrite(model_serve: Body, decision: AdapterDecision) -> dict[str, Any] | None:
    """InferenceModelRewrite NAME-adapters, by which an endpoint picker splits requests for adapters with two versions;
    None where there is nothing to split, or no picker.

    A rule is there only while both versions are Ready on every worker, and all of them take NAME@ID for a version:
    otherwise the workers split alone.
    """
    spec, workers = decision.snapshot.spec, decision.snapshot.counted
    if spec is None or spec.gateway is None or spec.gateway.endpoint_picker is None:
        return None
    if not workers or not all(worker.names_versions for worker in workers):
        return None
    rules = []
    for taken in decision.taken:
        found, name = taken.versions, taken.adapter.served_name
        if found.coming is None or found.active is None or not 0 < found.weight < 100:
            continue
        shares = ((found.active, 100 - found.weight), (found.coming, found.weight))
        if all(worker.serves(name, version.id) for worker in workers for version, _ in shares):
            targets = [{"modelRewrite": f"{name}@{version.id}", "weight": share} for version, share in shares]
            rules.append({"matches": [{"model": {"type": "Exact", "value": name}}], "targets": targets})
    if not rules:
        return None
    name = model_serve["metadata"]["name"]
    pool = {"group": INFERENCE_POOL.group, "kind": INFERENCE_POOL.kind, "name": name}
    return {
        "metadata": child_metadata(model_serve, name=labels.adapters_name(name), component=labels.ADAPTERS),
        "spec": {"poolRef": pool, "rules": rules},
    }


def adapters_config_map(model_serve: Body, decision: AdapterDecision) -> dict[str, Any]:
    """ConfigMap NAME-adapters."""
    name = model_serve["metadata"]["name"]
    desired = decision.desired(None, secrets=False)
    return {
        "metadata": child_metadata(model_serve, name=labels.adapters_name(name), component=labels.ADAPTERS),
        "data": {
            SET_KEY: json.dumps(desired, sort_keys=True, separators=(",", ":")),
            KEYS_KEY: f"sha256:{decision.snapshot.key_digest}\n",
        },
    }
