"""What a head that says how likely each draft is right would bring, if what it says were so: by planned times.

    python tests/bench confidence_cut [--steps 300]

Of 31B on an H200 with speculators' DSpark and its published acceptance by place. Confidences are drawn around that
acceptance, from a beta distribution, and drafts are right as often as they say: the larger `concentration`, the more
alike proposals are. Compared are two choices of the drafts that a step verifies: by the mean acceptance of each place,
as a worker chooses for requests that are alike, and by each draft's own confidence. Both are of all drafts at once, and
the second one knows confidences before the step is packed, which a worker that launches steps ahead does not.
"""

from __future__ import annotations

import argparse

import numpy as np
from architecture_of import architecture_of
from numpy.typing import NDArray

from modelserve.hardware import CATALOGUE
from modelserve.planning.speed.draft_time import draft_speeds
from modelserve.planning.speed.step_time import RankSpeed
from modelserve.published import published_assistant
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout, cache_geometry
from modelserve.sizing.speculation import STEP_DRAFTS, Speculation
from modelserve_worker.scheduling.costs.step_costs import PlannedCosts

DSPARK, CONTEXT = "hf://RedHatAI/gemma-4-31B-it-speculator.dspark", 2000.0
ACCEPTED = np.array([0.89, 0.77, 0.69, 0.61, 0.51, 0.45, 0.36])  # by place, with all before it: of its card, for 26B
REQUESTS, CONCENTRATIONS = (1, 8, 16, 32, 64, 128), (1.0, 3.0, 10.0)
Floats = NDArray[np.float64]


def planned_costs(requests: int) -> PlannedCosts:
    """Times of so many requests' steps and drafts."""
    architecture, device, known = architecture_of("31B"), CATALOGUE["NVIDIA-H200"], published_assistant(DSPARK)
    assert known is not None
    speculation = Speculation(len(ACCEPTED)).with_drafter(known.assistant, as_many_as_pay=True)
    geometry = cache_geometry(
        architecture, dtype=KVCacheDtype.BFLOAT16, layout=KVCacheLayout.least(architecture), tensor_parallel_size=1,
        draft=speculation.draft_cache,
    )  # fmt: skip
    speed = RankSpeed(architecture, device, geometry, tensor_parallel=1, weight_format=None)
    drafts = draft_speeds(speculation, device, geometry, tensor_parallel=1)
    return PlannedCosts(speed, max_num_seqs=requests, speculation=speculation, drafts=drafts)


def verified(chances: Floats, seconds: Floats, *, tokens_per_s: float) -> NDArray[np.int64]:
    """Drafts of each request [S], by chances [S, k] of each with all before it: those that bring more tokens than
    their time is worth."""
    order = np.argsort(-chances, axis=None, kind="stable")[:STEP_DRAFTS]
    gain = np.concatenate(([0.0], chances.ravel()[order].cumsum())) - tokens_per_s * seconds[: len(order) + 1]
    return np.bincount(order[: int(gain.argmax())] // chances.shape[1], minlength=len(chances))


def rates(requests: int, concentration: float, *, steps: int) -> tuple[float, float]:
    """Tokens a second of a choice by the mean, and of one by confidence."""
    costs, places = planned_costs(requests), len(ACCEPTED)
    seconds = costs.seconds(requests, min(requests * places, STEP_DRAFTS), context=CONTEXT)
    drafting = float(costs.draft_seconds(0, requests, places, context=CONTEXT)[-1])
    each = ACCEPTED / np.concatenate(([1.0], ACCEPTED[:-1]))
    mean = np.tile(ACCEPTED, (requests, 1))
    likeliest = np.sort(mean, axis=None)[::-1][:STEP_DRAFTS]
    best = (requests + np.concatenate(([0.0], likeliest.cumsum()))) / (seconds[: len(likeliest) + 1] + drafting)
    random, tokens, took = np.random.default_rng(0), [0, 0], [0.0, 0.0]
    for _ in range(steps):
        sure = random.beta(each * concentration, (1 - each) * concentration, size=(requests, places))
        lead = np.minimum.accumulate(random.random(sure.shape) < sure, axis=1)
        for way, chances in enumerate((mean, sure.cumprod(axis=1))):
            counts = verified(chances, seconds, tokens_per_s=float(best.max()))
            tokens[way] += requests + int((lead & (np.arange(places) < counts[:, None])).sum())
            took[way] += float(seconds[counts.sum()]) + drafting
    return tokens[0] / took[0], tokens[1] / took[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    print("requests  " + "  ".join(f"concentration {each:g}".rjust(24) for each in CONCENTRATIONS))
    for requests in REQUESTS:
        cells = []
        for concentration in CONCENTRATIONS:
            mean, sure = rates(requests, concentration, steps=steps)
            cells.append(f"{mean:,.0f} -> {sure:,.0f} tok/s {100 * (sure / mean - 1):+.0f} %".rjust(24))
        print(f"{requests:8}  " + "  ".join(cells), flush=True)
    return 0
