"""Whether an accelerator drafts, and with what: where what the spec asks for has room and, where that is left to the
plan, pays. Of two drafters one is left out where both have no room, or its memory is worth more than what it brings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from modelserve.hardware import Accelerator
from modelserve.model.architecture import ModelArchitecture
from modelserve.planning.drafts import WantedDrafter, WantedDrafts, left_out
from modelserve.planning.evaluation import Evaluation, Fit, evaluate
from modelserve.planning.speed.expected_speed import Speed, drafted_steps, rank_speed, speed
from modelserve.planning.wishes import Wishes

LEAST_GAIN = 1.02  # times the rate without: less is within what plans err
CONCURRENCIES = (1, 4, 16, 64, 128)  # requests at once, at which drafters are compared


def evaluate_drafted(
    wishes: Wishes, architecture: ModelArchitecture, accelerator: Accelerator, *, gpus: int
) -> Evaluation:
    """As `evaluate`, without drafts where a drafter would keep the model from fitting, or would not pay.

    No draft is worth a model that is not served, so one that has no room is left out, whoever named it.
    """
    drafts = wishes.drafts
    found = evaluate(wishes, architecture, accelerator, gpus=gpus)
    if drafts is None:
        return found
    plain = wishes.without_assistant if drafts.drafters else wishes.without_drafts
    bare = evaluate(plain, architecture, accelerator, gpus=gpus)
    if not isinstance(bare, Fit) or not drafts.drafters:
        return bare if drafts.drafters else found
    if len(drafts.drafters) > 1:
        return _of_several(found, bare, wishes, architecture, gpus=gpus)
    (drafter,) = drafts.drafters
    if not isinstance(found, Fit):
        return replace(bare, undrafted=left_out(drafts, drafter, "there is no room for it"))
    if not found.speculation.drafters or not drafts.where_it_pays:
        return found
    why = _no_gain(found, bare, architecture, wishes, plain)
    return replace(bare, undrafted=left_out(drafts, drafter, why)) if why else found


def _of_several(found: Evaluation, bare: Fit, wishes: Wishes, architecture: ModelArchitecture, *, gpus: int) -> Fit:
    """Both drafters, or the better one with why the other is left out, or none."""
    drafts = wishes.drafts
    assert drafts is not None
    if isinstance(found, Fit) and len(found.speculation.drafters) < len(drafts.drafters):
        return found  # ranks do not share one, which it says
    ones = list[tuple[Fit, Wishes, WantedDrafter]]()  # what there is without one of them; of equal ones the assistant
    for left in reversed(drafts.drafters):
        fewer = replace(wishes, drafts=drafts.beside(left))
        alone = evaluate(fewer, architecture, bare.accelerator, gpus=gpus)
        if isinstance(alone, Fit) and alone.speculation.drafters:
            ones.append((alone, fewer, left))
    if isinstance(found, Fit):
        dropped = [(one, why) for one in ones if (why := _not_worth(found, one, wishes, architecture))]
    else:
        dropped = [(one, "there is no room for both") for one in ones]
    if not dropped:
        return found if isinstance(found, Fit) else replace(bare, undrafted=_none_has_room(drafts))
    (alone, _, left), why = max(dropped, key=lambda each: _rate(speed(each[0][0], architecture, each[0][1]), wishes))
    return replace(alone, undrafted="; ".join(filter(None, (left_out(drafts, left, why), alone.undrafted))))


def _none_has_room(drafts: WantedDrafts) -> str:
    names = " and ".join(each.named.uri for each in drafts.drafters)
    return f"the drafters {names} are left out: there is no room for any"


def _not_worth(
    both: Fit, one: tuple[Fit, Wishes, WantedDrafter], wishes: Wishes, architecture: ModelArchitecture
) -> str:
    """Why a candidate is better without one of its two drafters; empty where it is not. What is asked of the cache goes
    before it; where the load is drafted by the other one, its memory may not cost that; and where workers have measured
    both, some load has to be better with it."""
    alone, fewer, left = one
    if (both.shortened, both.downgraded) != (alone.shortened, alone.downgraded):
        return "the cache would be smaller than what is asked for"
    if both.accelerator.is_cpu:
        return ""
    if wishes.concurrency is None:  # as where one drafter is left to the plan
        wishes, fewer = wishes.of_one_request, fewer.of_one_request
    drafts, with_both, without = wishes.drafts, speed(both, architecture, wishes), speed(alone, architecture, fewer)
    assert drafts is not None
    if without.meets_concurrency > with_both.meets_concurrency:
        return f"the pool would hold {with_both.load.requests:,} of {without.load.requests:,} requests"
    asked = drafts.drafters[with_both.drafts.drafter] if with_both.drafts is not None else None
    if asked is not left and _rate(without, wishes) >= LEAST_GAIN * _rate(with_both, wishes):
        return (
            f"{with_both.load.requests:,} requests would have {with_both.output_tokens_per_s:,.0f} tokens/s beside it, "
            f"and {without.load.requests:,} without it {without.output_tokens_per_s:,.0f}"
        )
    if any(each.source != "Measured" for each in drafts.drafters):
        return ""  # what is assumed is no reason never to measure
    loads = [each for each in CONCURRENCIES if each <= both.sequences]
    if any(_gains(both, wishes, alone, fewer, requests, architecture) for requests in loads):
        return ""
    other = next(each for each in drafts.drafters if each is not left)
    return (
        f"as often as workers measured their drafts to be right, {other.named.uri} alone brings as many tokens/s at "
        f"{_listed(loads)} requests"
    )


def _gains(
    both: Fit, wishes: Wishes, alone: Fit, fewer: Wishes, requests: int, architecture: ModelArchitecture
) -> bool:
    """Whether steps of so many requests bring more tokens a second with both drafters than with one."""
    rates = []
    for fit, wished in ((both, wishes), (alone, fewer)):
        steps = drafted_steps(fit, rank_speed(fit, architecture, wished), wished)
        assert steps is not None
        rates.append(steps.step(requests, context=wishes.mean_context).rate)
    return rates[0] >= LEAST_GAIN * rates[1]


def _listed(counts: Sequence[int]) -> str:
    return " and ".join(filter(None, (", ".join(map(str, counts[:-1])), str(counts[-1])))) if counts else "all"


def _no_gain(found: Fit, bare: Fit, architecture: ModelArchitecture, wishes: Wishes, plain: Wishes) -> str:
    """Why a candidate is better without its assistant; empty where it is not."""
    if found.accelerator.is_cpu:
        return "what it brings on a CPU is not known"
    if (found.shortened, found.downgraded) != (bare.shortened, bare.downgraded):
        return "the cache would be smaller than what is asked for"
    if wishes.concurrency is None:  # where many come at once drafts rest, and cost nothing
        wishes, plain = wishes.of_one_request, plain.of_one_request
    with_drafts, without = speed(found, architecture, wishes), speed(bare, architecture, plain)
    if _rate(with_drafts, wishes) >= LEAST_GAIN * _rate(without, plain):
        return ""
    return (
        f"{with_drafts.load.requests:,} requests would have {with_drafts.output_tokens_per_s:,.0f} tokens/s with it "
        f"and {without.output_tokens_per_s:,.0f} without"
    )


def _rate(expected: Speed, wishes: Wishes) -> float:
    """What the objective counts, larger is better."""
    if wishes.objective == "Latency":
        return 1 / expected.at_load.output_token.seconds
    return expected.output_tokens_per_s
