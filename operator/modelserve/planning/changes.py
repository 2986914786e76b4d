"""What another plan would change, in sentences for people. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal

from modelserve.api import PlanStatus
from modelserve.units import GIB


def placed_on(plan: PlanStatus) -> str:
    """The accelerators of one replica, such as 2 x NVIDIA-L40S."""
    product = plan.accelerator or "nothing"
    return f"{plan.gpus_per_replica} x {product}" if plan.gpus_per_replica else product


def plan_changes(before: PlanStatus, after: PlanStatus) -> Iterator[str]:
    """How two plans that fit differ, `NAME OLD -> NEW` each: first where they run, then what they hold."""
    if placed_on(before) != placed_on(after):
        yield f"{placed_on(before)} -> {placed_on(after)}"
    elif before.node_selector_terms != after.node_selector_terms:
        yield f"other pools of {placed_on(after)}"
    if before.max_model_len != after.max_model_len:
        yield f"maxModelLen {before.max_model_len or 0:,} -> {after.max_model_len or 0:,}"
    caches = [f"{p.kv_cache.dtype} {p.kv_cache.layout}" if p.kv_cache else "none" for p in (before, after)]
    if caches[0] != caches[1]:
        yield f"cache {caches[0]} -> {caches[1]}"
    rooms = [f"{p.adapters.slots} of {p.adapters.max}" if p.adapters else "none" for p in (before, after)]
    if rooms[0] != rooms[1]:
        yield f"adapters {rooms[0]} -> {rooms[1]}"
    seen = [f"{p.images.per_request} of {p.images.max_soft_tokens}" if p.images else "none" for p in (before, after)]
    if seen[0] != seen[1]:
        yield f"images {seen[0]} -> {seen[1]}"
    fetched = [", ".join(p.images.urls or ()) if p.images else "" for p in (before, after)]
    if fetched[0] != fetched[1]:
        yield f"images from {fetched[0] or 'nowhere'} -> {fetched[1] or 'nowhere'}"
    heard = [f"{p.audio.per_request} of {p.audio.seconds} s" if p.audio else "none" for p in (before, after)]
    if heard[0] != heard[1]:
        yield f"sounds {heard[0]} -> {heard[1]}"
    drafters = [drafted_by(p) for p in (before, after)]
    if drafters[0] != drafters[1]:
        yield f"drafts {drafters[0]} -> {drafters[1]}"
    pools = [p.per_gpu.kv_pool_bytes if p.per_gpu else 0 for p in (before, after)]
    if pools[0] != pools[1]:
        where = "a GPU" if after.gpus_per_replica else "in the container"
        yield f"KV pool {pools[0] / GIB:.2f} -> {pools[1] / GIB:.2f} GiB {where}"
    yield from _requests(before, after)
    if before.engine != after.engine:
        for name in ("max_num_batched_tokens", "max_num_mixed_tokens", "max_num_seqs"):
            old, new = getattr(before.engine, name, None), getattr(after.engine, name, None)
            if old != new:
                head, *words = name.split("_")
                yield f"{head}{''.join(map(str.title, words))} {old} -> {new}"
    costs = [cost_per_hour(p) for p in (before, after)]
    if costs[0] != costs[1] and None not in costs:
        yield f"{costs[0]} -> {costs[1]} per replica-hour"


def drafted_by(plan: PlanStatus) -> str:
    """What proposes tokens, in words."""
    drafter = plan.drafter
    if drafter is None:
        return "none"
    named = (f"{uri} at {revision}" if revision else uri for uri, revision in drafter.named)
    by = [" or ".join(named), "prompt lookup" if drafter.prompt_lookup else None]
    count = f"{drafter.num_speculative_tokens} at a time" if drafter.num_speculative_tokens else None
    return " ".join(filter(None, (*by, count)))


def _requests(before: PlanStatus, after: PlanStatus) -> Iterator[str]:
    """Requests at once, of the longest context that both have a figure for."""
    old, new = before.concurrency, after.concurrency
    if old is None or new is None:
        return
    if before.max_model_len == after.max_model_len:
        if old.at_max != new.at_max:
            yield f"{old.at_max} -> {new.at_max} requests of maxModelLen at once"
        return
    for name, length in (("at128k", "131,072"), ("at32k", "32,768"), ("at8k", "8,192")):
        one, other = getattr(old, name), getattr(new, name)
        if one is not None and other is not None:
            if one != other:
                yield f"{one} -> {other} requests of {length} tokens at once"
            return


def cost_per_hour(plan: PlanStatus) -> Decimal | None:
    """Price of one replica-hour of the chosen candidate, where accelerators.costPerHour has one."""
    chosen = next((each for each in plan.candidates if each.verdict == "Chosen"), None)
    return Decimal(chosen.cost_per_hour) if chosen is not None and chosen.cost_per_hour is not None else None
