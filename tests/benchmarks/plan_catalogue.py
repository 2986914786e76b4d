"""CPU time of plans of published models over all products: python tests/benchmarks/plan_catalogue.py"""

from __future__ import annotations

import statistics
import sys
import time

from modelserve.api import ModelServeSpec
from modelserve.hardware import CATALOGUE
from modelserve.planning import AcceleratorOffer, plan
from modelserve.published import published_model

ROUNDS = 200


def main() -> None:
    offers = [AcceleratorOffer(record, 8) for record in CATALOGUE.values() if not record.is_cpu]
    for size in ("E2B", "E4B", "12B", "26B-A4B", "31B"):
        uri = f"hf://google/gemma-4-{size}-it"
        facts = published_model(uri)
        assert facts is not None
        spec = ModelServeSpec.model_validate({"model": {"uri": uri}})
        times = []
        for _ in range(ROUNDS):
            before = time.thread_time()
            plan(spec, facts.architecture, offers, weight_format=facts.format)
            times.append((time.thread_time() - before) * 1e3)
        print(f"{size:8}  first {times[0]:5.1f} ms  median {statistics.median(times):4.1f} ms")
    assert "torch" not in sys.modules


if __name__ == "__main__":
    main()
