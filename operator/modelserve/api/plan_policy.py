"""What becomes of plans: who commits them, and whether they give way to others."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from modelserve.api.schema_types import ApiModel

REVISION_NAME_PATTERN = r"^[a-z]([-a-z0-9]*[a-z0-9])?-[0-9a-f]{10}$"


class ReplanSpec(ApiModel):
    """When a committed plan gives way by itself. An approved plan, and one that spec.plan.revision pins, never does."""

    when: Literal["Lost", "Better"] = Field(
        default="Lost",
        description="Lost: no pool of its accelerator is left, neither nodes nor declared ones. Better: also when "
        "another plan gains enough. Another worker release alone is no reason.",
    )
    least_gain_percent: int = Field(
        default=20,
        ge=5,
        le=1000,
        description="With Better: what the other plan must gain by the objective, in percent: output tokens per second "
        "and GPU (Throughput), time per output token (Latency), tokens of context (MaxContext), price (Cost).",
    )
    settle_seconds: int = Field(
        default=300,
        ge=0,
        le=86400,
        description="For how long the pools must have been gone: nodes are replaced, and labels come back.",
    )


class PlanSpec(ApiModel):
    """What happens with a plan."""

    mode: Literal["Automatic", "Manual", "PreviewOnly"] = Field(
        default="Automatic",
        description="Automatic: a new plan is applied. Manual: it waits in status.proposedPlan for approval. "
        "PreviewOnly: planned and shown, nothing is started; what runs already stays.",
    )
    approved_hash: str | None = Field(
        default=None,
        pattern=r"^[0-9a-f]{10}$",
        max_length=10,
        description="Hash of the plan to commit, as `modelserve plan` and status.proposedPlan print it; the annotation "
        "approve-plan does the same.",
    )
    revision: str | None = Field(
        default=None,
        pattern=REVISION_NAME_PATTERN,
        max_length=51,
        description="A revision that was committed before, NAME-HASH as `kubectl get controllerrevisions` prints it: "
        "it runs, with its own image and settings, until this field changes; nothing is planned past it.",
    )
    replan: ReplanSpec | None = Field(
        default=None,
        description="When a committed plan gives way to another one by itself, in mode Automatic; left out: never,"
        " others are proposed.",
    )
