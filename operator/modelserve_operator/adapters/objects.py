"""The ConfigMap of a ModelServe that its workers mount: the set of adapters, for those that start while no operator
runs, and the digest of the key that sets are taken by. Pure.

It holds no secret: a private adapter comes to a worker that starts with the operator's next call.
"""

from __future__ import annotations

import json
from typing import Any

from modelserve_operator import labels
from modelserve_operator.adapters.decision import AdapterDecision
from modelserve_operator.adapters.snapshot import Body
from modelserve_operator.manifests.metadata import child_metadata

SET_KEY, KEYS_KEY = "adapters.json", "management-keys"


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
