"""Which of the candidates that fit is best: the expected workload first, then the objective, then the smaller one."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal

from modelserve.planning.evaluation import Fit
from modelserve.planning.speed.expected_speed import Speed
from modelserve.planning.wishes import Wishes

RankKey = tuple[bool, bool, bool, tuple[float, ...], int, int, str]


def rank_key(fit: Fit, expected: Speed, wishes: Wishes, *, costs: Mapping[str, Decimal]) -> RankKey:
    """Sort key, the smallest is best: what was asked for in full, then the objective, then fewer and smaller GPUs.

    Full means: the asked context, the expected requests at once, and a cache in the dtype of the weights.
    """
    return (
        fit.shortened,
        not expected.meets_concurrency,
        fit.downgraded,
        _objective_key(fit, expected, wishes, costs=costs),
        fit.gpus,
        fit.accelerator.memory_mib,
        fit.accelerator.product,
    )


def replica_cost(fit: Fit, costs: Mapping[str, Decimal]) -> Decimal | None:
    """Price of one replica-hour; None when the product has no price."""
    price = costs.get(fit.accelerator.product)
    return None if price is None else price * max(1, fit.gpus)


def token_cost(replica_hour: Decimal, expected: Speed) -> Decimal:
    """Price of a million output tokens at the expected rate."""
    return replica_hour * 1_000_000 / 3600 / Decimal(expected.output_tokens_per_s)


def _objective_key(fit: Fit, expected: Speed, wishes: Wishes, *, costs: Mapping[str, Decimal]) -> tuple[float, ...]:
    if wishes.objective == "Latency":
        return (expected.at_load.output_token.seconds, expected.at_load.first_token.seconds)
    if wishes.objective == "MaxContext":
        return (-fit.max_model_len, -fit.memory.kv_pool_bytes / fit.geometry.held_bytes(fit.max_model_len))
    if wishes.objective == "Cost":
        cost = replica_cost(fit, costs)
        # Without a price, memory stands in for it, after everything that has one.
        return (1.0, float(fit.gpus * fit.accelerator.memory_mib)) if cost is None else (0.0, float(cost))
    return (-expected.output_tokens_per_s / max(1, fit.gpus),)
