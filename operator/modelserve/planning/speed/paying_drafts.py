"""Whether an accelerator drafts: where what the spec asks for has room and, if that is left to the plan, pays."""

from __future__ import annotations

from dataclasses import replace

from modelserve.hardware import Accelerator
from modelserve.model.architecture import ModelArchitecture
from modelserve.planning.evaluation import Evaluation, Fit, evaluate
from modelserve.planning.speed.expected_speed import Speed, speed
from modelserve.planning.wishes import Wishes

LEAST_GAIN = 1.02  # times the rate without: less is within what plans err


def evaluate_drafted(
    wishes: Wishes, architecture: ModelArchitecture, accelerator: Accelerator, *, gpus: int
) -> Evaluation:
    """As `evaluate`, without drafts where an assistant would keep the model from fitting, or would not pay.

    No draft is worth a model that is not served, so one that has no room is left out, whoever named it.
    """
    drafts = wishes.drafts
    found = evaluate(wishes, architecture, accelerator, gpus=gpus)
    if drafts is None:
        return found
    plain = wishes.without_assistant if drafts.speculation.drafters else wishes.without_drafts
    bare = evaluate(plain, architecture, accelerator, gpus=gpus)
    if not isinstance(bare, Fit) or drafts.uri is None:
        return found if drafts.uri is None else bare
    if not isinstance(found, Fit):
        return replace(bare, undrafted=f"the assistant {drafts.uri} is left out: there is no room for it")
    if not found.speculation.drafters or not drafts.where_it_pays:
        return found
    why = _no_gain(found, bare, architecture, wishes, plain)
    return replace(bare, undrafted=f"the assistant {drafts.uri} is left out: {why}") if why else found


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
