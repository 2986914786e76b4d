"""Names, labels and annotations of everything the operator owns."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

GROUP = "serving.modelserve.dev"
FIELD_MANAGER = "modelserve"

MANAGED_BY = "app.kubernetes.io/managed-by"
APP_NAME = "app.kubernetes.io/name"
COMPONENT = "app.kubernetes.io/component"
NAME = f"{GROUP}/name"
PLAN_HASH = f"{GROUP}/plan-hash"  # hash of a revision

APPROVE_PLAN = f"{GROUP}/approve-plan"  # on the ModelServe, by the user: the hash of the proposed plan to commit
RETRY = f"{GROUP}/retry"  # on the ModelServe, by the user: another value has what failed tried again at once
APPLIED_HASH = f"{GROUP}/applied-hash"  # on every child: hash of what was applied, so that dropped fields are noticed
ADMITTED = f"{GROUP}/admitted"  # on a child: digest of what admission makes of our own writes, which stays
ATTEMPTS = f"{GROUP}/attempts"  # on an inspect Job: how many of its kind were made in a row, itself counted
MADE_FROM = f"{GROUP}/made-from"  # on an inspect Job: digest of what the spec makes of it, so that an edit is noticed
HELD = f"{GROUP}/held"  # on a worker: whether the two below keep autoscalers from ending it; of those we set alone
DO_NOT_DISRUPT = "karpenter.sh/do-not-disrupt"
SAFE_TO_EVICT = "cluster-autoscaler.kubernetes.io/safe-to-evict"
ENGINE_TYPE = "llm-d.ai/engine-type"  # on worker pods: whose names of metrics endpoint pickers look for
KUEUE = "kueue.x-k8s.io/"
QUEUE_NAME = f"{KUEUE}queue-name"
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"  # Kubernetes' own: pods of lower cost go first
MODEL_COMMIT = f"{GROUP}/model-commit"  # on a ControllerRevision: commit of the Hub that its pods serve
DRAFTER_COMMIT = f"{GROUP}/drafter-commit"  # the same of its drafter
DRAFTER_COMMITS = f"{GROUP}/drafter-commits"  # of two, in the plan's order, with a comma between
UNDONE = f"{GROUP}/undone"  # on a ControllerRevision: it replaced another by itself, failed, and was given up for it
TERMINAL_FAILURE = (
    f"{GROUP}/terminal-failure"  # on a Deployment: the record of the failure that stopped its growth, as JSON
)

CACHE = f"{GROUP}/cache"  # on Jobs of a ModelCache, their pods and its claim: its name
CACHE_TASK = f"{GROUP}/cache-task"  # on such a Job: fill or free
ASKED = f"{GROUP}/asked"  # on such a Job: digest of what it is to fetch
FREE_CACHE = f"{GROUP}/free"  # finalizer of a ModelCache: its bytes go before it does
DRAIN_ADAPTER = f"{GROUP}/drain"  # finalizer of a ModelAdapter: workers finish what they answer with it

WATCH_SELECTOR = f"{MANAGED_BY}={FIELD_MANAGER}"

WORKER = "worker"
INSPECTION = "inspection"
REVISION = "revision"
MODEL_FACTS = "model-facts"
COMMIT = "model-commit"
CALIBRATION = "calibration"
CAPACITY_BUFFER = "capacity-buffer"
GATEWAY = "gateway"
ADAPTERS = "adapters"
MODEL_CACHE = "model-cache"


HASH_LENGTH = 10


def short_hash(document: Any) -> str:
    """HASH_LENGTH hex characters of the SHA-256 over canonical JSON: the order of keys does not matter."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_LENGTH]


def selector(name: str) -> dict[str, str]:
    """Labels that all worker pods of a ModelServe share, whatever their revision."""
    return {NAME: name, COMPONENT: WORKER}


def selector_text(name: str) -> str:
    return ",".join(f"{key}={value}" for key, value in sorted(selector(name).items()))


def child(name: str, component: str, **extra: str) -> dict[str, str]:
    """Labels of a child object; the watches and the store find children by them."""
    return {APP_NAME: "modelserve", MANAGED_BY: FIELD_MANAGER, NAME: name, COMPONENT: component, **extra}


def revision_name(name: str, plan_hash: str) -> str:
    return f"{name}-{plan_hash}"


def inspection_name(name: str, source_hash: str) -> str:
    return f"{name}-inspect-{source_hash}"


def model_facts_name(name: str, source_hash: str) -> str:
    return f"{name}-model-{source_hash}"


def commit_name(name: str, source_hash: str) -> str:
    return f"{name}-commit-{source_hash}"


def cache_claim_name(name: str) -> str:
    return f"{name}-cache"


def cache_job_name(name: str, task: str, made_for: str) -> str:
    return f"{name}-{task}-{made_for}"


def adapters_name(name: str) -> str:
    return f"{name}-adapters"


def cache_child(name: str, **extra: str) -> dict[str, str]:
    """Labels of what belongs to a ModelCache; no label names a ModelServe."""
    return {APP_NAME: "modelserve", MANAGED_BY: FIELD_MANAGER, COMPONENT: MODEL_CACHE, CACHE: name, **extra}


def orphaned(body: Mapping[str, Any]) -> bool:
    """Whether it is a child of ours that has no owner any more."""
    return label_of(body, MANAGED_BY) == FIELD_MANAGER and not body["metadata"].get("ownerReferences")


def label_of(body: Mapping[str, Any], key: str) -> str | None:
    return (body["metadata"].get("labels") or {}).get(key)


def annotation_of(body: Mapping[str, Any], key: str) -> str | None:
    return (body["metadata"].get("annotations") or {}).get(key)
