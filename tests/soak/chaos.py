"""Round after round of faults under traffic, on the local cluster `test`; about four minutes a round.

    PYTHONPATH=operator:worker:tests/cluster python tests/soak/chaos.py [--rounds 10]

Each round kills a worker, stops an engine, kills the operator in a rollout, and takes the volume away for a minute
while a worker starts, which only the operator's own retry heals. A request that began after a fault was noticed must
not fail. Exit code 1 at the first that does; the cluster stays then, for a look.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial

from localcluster import lifecycle, operator_process, weights_volume
from localcluster.checkpoint_upload import upload_checkpoint
from localcluster.convergence import ready_endpoints, wait_converged, worker_pods
from localcluster.crds import install_crds
from localcluster.deployment import CHECKPOINT, Deployed, apply_example
from localcluster.kubectl import wait_for
from localcluster.pod_processes import worker_processes
from localcluster.settings import Layout
from localcluster.target import Target, local
from localcluster.traffic import Traffic, traffic_to

NAMESPACE = "modelserve-soak"
REPLICAS = 2
AWAY_S = 60.0
LENGTHS = (8192, 4096)


def end_worker(served: Deployed, number: int) -> float:
    """SIGKILL to the front end (`number` even) or SIGSTOP to the engine; the moment at which nobody is sent there."""
    victim, other = worker_pods(served).values()
    processes = worker_processes(victim)
    if number % 2:
        os.kill(processes.engine, signal.SIGSTOP)
    else:
        os.kill(processes.front_end, signal.SIGKILL)
    wait_for("its endpoint gone", lambda: ready_endpoints(served) == {other["metadata"]["uid"]}, timeout_s=90)
    return time.monotonic() + 1


def kill_operator(target: Target, served: Deployed, max_model_len: int) -> float:
    """SIGKILL in a rollout, under which no request fails."""
    running = operator_process.start(target)
    began = time.monotonic()
    served.patch({"context": {"maxModelLen": max_model_len}})
    wait_for("a second Deployment", lambda: len(served.owned("deployments")) == 2, timeout_s=60)
    running.process.kill()
    operator_process.start(target)
    return began


def take_volume_away(layout: Layout, served: Deployed) -> float:
    """Unreadable weights while a killed worker starts again; nothing but time heals it."""
    folder = layout.weights / NAMESPACE / CHECKPOINT.name
    folder.chmod(0)
    try:
        detected = end_worker(served, 0)
        wait_for("Stalled", lambda: served.condition("Stalled").get("status") == "True", timeout_s=90)
        time.sleep(AWAY_S)
    finally:
        folder.chmod(0o755)
    wait_for("another attempt", lambda: len(worker_pods(served)) == REPLICAS, timeout_s=300)
    return detected


def check(served: Deployed, traffic: Traffic, name: str, fault: Callable[[], float]) -> None:
    began = time.monotonic()
    detected = fault()
    wait_converged(served, REPLICAS)
    traffic.wait_for_answers()
    if errors := traffic.errors_since(detected):
        sys.exit(f"{name}: {len(errors)} requests failed after it was noticed: {errors[:5]}")
    print(f"  {name}: converged after {time.monotonic() - began:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    layout = Layout("test")
    target = local(layout, print)
    install_crds(target)
    weights_volume.create_namespace(target, NAMESPACE)
    upload_checkpoint(target, NAMESPACE, CHECKPOINT)
    operator_process.start(target)
    served = apply_example(target, NAMESPACE, "soak", replicas=REPLICAS)
    wait_converged(served, REPLICAS)
    with traffic_to(served, clients=4) as traffic:
        traffic.wait_for_answers()
        for number in range(options.rounds):
            print(f"round {number + 1}: {traffic.answered} answered, {len(traffic.errors)} failed", flush=True)
            check(served, traffic, "a killed worker", partial(end_worker, served, 0))
            check(served, traffic, "a stopped engine", partial(end_worker, served, 1))
            check(served, traffic, "a killed operator", partial(kill_operator, target, served, LENGTHS[number % 2]))
            check(served, traffic, "a volume away", partial(take_volume_away, layout, served))
    operator_process.stop(layout)
    lifecycle.down(layout)


if __name__ == "__main__":
    main()
