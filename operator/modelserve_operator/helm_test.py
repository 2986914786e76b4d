"""Tests from outside whether an installed operator works, as the chart's test does:
`python -m modelserve_operator.helm_test ADDRESS REPLICAS [--caches]`.

One of the replicas holds the Lease; it is alive, and has heard of the cluster through its watches. With --caches it
keeps ModelCaches, whose definition is there and may be listed.
"""

from __future__ import annotations

import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable

from prometheus_client.parser import text_string_to_metric_families

PORT = 9090
PATIENCE_SECONDS = 60.0


def problem(read: Callable[[str], str], *, replicas: int, caches: bool = False) -> str | None:
    """What is wrong, or None. `read` answers a path, of whichever replica the Service chooses; raises OSError."""
    waiting = 0
    for _ in range(8 * replicas):
        try:
            read("/healthz")
            metrics = _metrics(read("/metrics"))
        except OSError as error:
            return f"no answer: {error}"
        if metrics.get("modelserve_operator_leader") != 1:
            waiting += 1
            continue
        if not metrics.get("modelserve_operator_watch_events_total"):
            return "the operator that holds the Lease has heard nothing through its watches"
        if caches and "modelserve_operator_caches" not in metrics:
            return "the operator keeps no ModelCaches: their CRD is missing, or it may not list them"
        return None
    return f"no operator holds the Lease: {waiting} answers came from operators that wait for it"


def _metrics(text: str) -> dict[str, float]:
    """Sum over the series of each sample name."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


def main() -> None:
    """Exit code 1 and the reason, when it does not work within PATIENCE_SECONDS."""
    address, replicas, caches = sys.argv[1], int(sys.argv[2]), "--caches" in sys.argv[3:]

    def read(path: str) -> str:
        with urllib.request.urlopen(f"http://{address}:{PORT}{path}", timeout=5) as answer:
            text: str = answer.read().decode()
            return text

    deadline = time.monotonic() + PATIENCE_SECONDS
    while (found := problem(read, replicas=replicas, caches=caches)) is not None:
        if time.monotonic() > deadline:
            sys.exit(found)
        time.sleep(2)
    sys.stdout.write("the operator works\n")


if __name__ == "__main__":
    main()
