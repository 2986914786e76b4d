"""CPU time of plans of published models over all products.

    python tests/bench plan_catalogue

`first` fills the caches of the sizing functions; `again` is the same spec, as an operator has it; `another` expects a
load that no plan before did.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

from modelserve.api import ModelServeSpec
from modelserve.hardware import CATALOGUE
from modelserve.planning import AcceleratorOffer, plan
from modelserve.published import published_model

ROUNDS = 200


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    offers = [AcceleratorOffer(record, 8) for record in CATALOGUE.values() if not record.is_cpu]
    for size in ("E2B", "E4B", "12B", "26B-A4B", "31B"):
        uri = f"hf://google/gemma-4-{size}-it"
        facts = published_model(uri)
        assert facts is not None
        for drafter in ({}, {"drafter": {"published": True}}):
            times: dict[str, list[float]] = {"again": [], "another": []}
            for number in range(ROUNDS):
                for load, tokens in (("again", 2048), ("another", 2049 + number)):
                    asked: dict[str, Any] = {"model": {"uri": uri}, "workload": {"inputTokens": tokens}, **drafter}
                    spec = ModelServeSpec.model_validate(asked)
                    before = time.thread_time()
                    plan(spec, facts.architecture, offers, weight_format=facts.format)
                    times[load].append((time.thread_time() - before) * 1e3)
            medians = "  ".join(f"{load} {statistics.median(each):4.1f}" for load, each in times.items())
            print(f"{size:8} {'drafts' if drafter else '':7} first {times['again'][0]:5.1f}  {medians} ms")
    assert "torch" not in sys.modules
