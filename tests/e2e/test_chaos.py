"""Faults on the real cluster: each leaves what it did not hit alone, and afterwards everything is as it should be.

One ModelServe of two workers goes through all of them. What takes minutes is in tests/soak/chaos.py.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from localcluster import lifecycle, operator_process
from localcluster.convergence import ready_endpoints, restarts, wait_converged, worker_pods
from localcluster.deployment import CHECKPOINT, NAME_LABEL, Deployed, apply_example
from localcluster.faulty_api import Fault, faulty_api
from localcluster.kubectl import KubectlError, wait_for
from localcluster.operator_process import OperatorProcess
from localcluster.pod_processes import worker_processes
from localcluster.service_rules import wait_routed
from localcluster.settings import Layout
from localcluster.target import Target
from localcluster.traffic import traffic_to
from modelserve_operator import labels
from modelserve_operator.cluster.kinds import WATCHED

NAMESPACE = "modelserve-e2e"
REPLICAS = 2
CHILDREN = "deployments,replicasets,pods,services,configmaps,poddisruptionbudgets,jobs,endpointslices"


@pytest.fixture(scope="module")
def _chaos(cluster: Target) -> Iterator[Deployed]:
    operator_process.start(cluster)
    yield apply_example(cluster, NAMESPACE, "chaos", replicas=REPLICAS)
    cluster.kubectl.within(NAMESPACE).run("delete", "modelserve", "chaos", "--ignore-not-found", "--wait=false")


@pytest.fixture
def chaos(_chaos: Deployed, operator: OperatorProcess) -> Deployed:
    """Two workers behind one Service."""
    wait_converged(_chaos, REPLICAS)
    return _chaos


@pytest.fixture
def local(cluster: Target) -> Layout:
    if cluster.local is None:
        pytest.skip("it reaches into the node, which is not on this machine")
    return cluster.local


def _in_rollout(served: Deployed, max_model_len: int) -> None:
    """Begin a rollout, and return when the pods of the new revision have been asked for."""
    served.patch({"context": {"maxModelLen": max_model_len}})
    wait_for("a second Deployment", lambda: len(served.owned("deployments")) == 2)


def test_two_operators_finish_what_a_killed_one_began_and_no_request_fails(
    cluster: Target, chaos: Deployed, operator: OperatorProcess
) -> None:
    before = set(worker_pods(chaos))
    with traffic_to(chaos, clients=4) as traffic:
        traffic.wait_for_answers()
        _in_rollout(chaos, 8192)
        operator.process.kill()
        operator_process.start(cluster)
        rival = operator_process.start_rival(cluster)
        try:
            wait_converged(chaos, REPLICAS)
            assert rival.alive
        finally:
            rival.terminate(timeout_s=10)
        traffic.wait_for_answers()
    assert traffic.errors == [], "the old workers have ended their connections and no client has noticed"
    assert not before & set(worker_pods(chaos))
    assert chaos.status()["maxModelLen"] == 8192


def test_a_killed_worker_comes_back_and_only_its_own_requests_fail(local: Layout, chaos: Deployed) -> None:
    victim, other = worker_pods(chaos).values()
    with traffic_to(chaos, clients=4) as traffic:
        traffic.wait_for_answers()
        os.kill(worker_processes(victim).front_end, signal.SIGKILL)
        wait_for("its endpoint gone", lambda: ready_endpoints(chaos) == {other["metadata"]["uid"]})
        wait_routed(chaos)
        detected = time.monotonic()
        wait_converged(chaos, REPLICAS)
        traffic.wait_for_answers()
    assert traffic.errors_since(detected) == []
    after = worker_pods(chaos)
    assert {uid: restarts(pod) for uid, pod in after.items()} == {
        victim["metadata"]["uid"]: restarts(victim) + 1,
        other["metadata"]["uid"]: restarts(other),
    }


def test_a_worker_that_hangs_in_mid_stream_is_replaced_and_nobody_new_waits_for_it(
    local: Layout, chaos: Deployed
) -> None:
    victim, other = worker_pods(chaos).values()
    # Four kept connections may all lead to the other worker; new ones reach both before long.
    with traffic_to(chaos, clients=4, newcomers=1) as traffic:
        traffic.wait_for_answers()
        stopped = time.monotonic()
        os.kill(worker_processes(victim).engine, signal.SIGSTOP)
        wait_for("its endpoint gone", lambda: ready_endpoints(chaos) == {other["metadata"]["uid"]})
        print(f"a stopped engine: its endpoint was gone after {time.monotonic() - stopped:.1f} s")
        wait_routed(chaos)
        detected = time.monotonic()
        traffic.wait_for_answers()
        wait_converged(chaos, REPLICAS)
        traffic.wait_for_answers()
    assert traffic.errors_since(detected) == []
    assert any("has said nothing for 16 s" in error for error in traffic.errors), traffic.errors
    assert restarts(worker_pods(chaos)[other["metadata"]["uid"]]) == restarts(other)


def test_a_volume_that_cannot_be_read_for_a_while_hurts_only_who_reads(local: Layout, chaos: Deployed) -> None:
    """A worker that starts meanwhile fails for good; it is tried again after a minute, or when somebody asks for it."""
    folder = local.weights / NAMESPACE / CHECKPOINT.name
    victim, other = worker_pods(chaos).values()
    with traffic_to(chaos, clients=4) as traffic:
        traffic.wait_for_answers()
        folder.chmod(0)
        try:
            os.kill(worker_processes(victim).front_end, signal.SIGKILL)
            wait_for("its endpoint gone", lambda: ready_endpoints(chaos) == {other["metadata"]["uid"]})
            wait_routed(chaos)
            detected = time.monotonic()
            wait_for("Stalled", lambda: chaos.condition("Stalled").get("status") == "True")
            assert chaos.condition("Stalled")["reason"] == "InvalidCheckpoint"
            assert "ermission denied" in chaos.condition("Stalled")["message"]
            wait_for("the failed pod gone", lambda: set(worker_pods(chaos)) == {other["metadata"]["uid"]})
            assert chaos.condition("Available")["status"] == "True"
        finally:
            folder.chmod(0o755)
        chaos.kubectl.run("annotate", "modelserve", chaos.name, f"{labels.RETRY}={time.time()}", "--overwrite")
        wait_for("an attempt", lambda: [each["spec"]["replicas"] for each in chaos.owned("deployments")] == [REPLICAS])
        wait_for("no longer Stalled", lambda: chaos.condition("Stalled") == {})
        wait_converged(chaos, REPLICAS)
        traffic.wait_for_answers()
    assert traffic.errors_since(detected) == []
    assert restarts(worker_pods(chaos)[other["metadata"]["uid"]]) == restarts(other)


def test_without_etcd_workers_serve_on_and_the_operator_goes_on_after_it(
    local: Layout, chaos: Deployed, operator: OperatorProcess
) -> None:
    before = {uid: restarts(pod) for uid, pod in worker_pods(chaos).items()}
    with traffic_to(chaos, clients=2) as traffic:
        traffic.wait_for_answers()
        lifecycle.kill_and_restart(local, "etcd", down_s=3)
        wait_for("the API server", lambda: _answers(chaos))
        _deleted_budget_comes_back(chaos)
        traffic.wait_for_answers()
    assert traffic.errors == []
    assert operator.process.alive
    wait_converged(chaos, REPLICAS)
    assert {uid: restarts(pod) for uid, pod in worker_pods(chaos).items()} == before


def _answers(served: Deployed) -> bool:
    try:
        served.kubectl.run("get", "--raw", "/readyz", "--request-timeout=5s")
    except KubectlError:
        return False
    return True


def _deleted_budget_comes_back(served: Deployed) -> None:
    """The operator watches, and writes."""
    (budget,) = served.owned("poddisruptionbudgets")
    served.kubectl.run("delete", "poddisruptionbudget", served.name)

    def back() -> bool:
        return [each for each in served.owned("poddisruptionbudgets") if each["metadata"]["uid"] != uid] != []

    uid = budget["metadata"]["uid"]
    wait_for("the disruption budget again", back)


def _wipe_status(served: Deployed) -> None:
    removal = '[{"op": "remove", "path": "/status"}]'
    served.kubectl.run("patch", "ms", served.name, "--subresource=status", "--type=json", "-p", removal)


def test_errors_of_the_api_server_end_no_pod_and_are_overcome(
    cluster: Target, local: Layout, chaos: Deployed, operator: OperatorProcess, tmp_path: Path
) -> None:
    """429, 500 and 409 to more than half of all requests, every watch expired, then all watches frozen."""
    before = {uid: restarts(pod) for uid, pod in worker_pods(chaos).items()}
    operator.stop()
    with faulty_api(local.operator_kubeconfig) as api, traffic_to(chaos, clients=2) as traffic:
        kubeconfig = tmp_path / "kubeconfig"
        api.write_kubeconfig(kubeconfig)
        harried = operator_process.start(cluster, kubeconfig=kubeconfig, settings={"MODELSERVE_WATCHDOG_SECONDS": "5"})
        try:
            wait_converged(chaos, REPLICAS)
            # What is deleted before a watch begins is found by a LIST of everything, which gets through no storm.
            wait_for("its watches", lambda: {kind.plural for kind in WATCHED} <= api.watched)

            api.fault = Fault.STORM
            _wipe_status(chaos)
            _deleted_budget_comes_back(chaos)
            wait_for("the status again", lambda: "plan" in chaos.status())
            chaos.wait_ready()

            api.fault = Fault.EXPIRED
            wait_for("expired watches", lambda: api.answered[410] > 10)
            api.fault = Fault.NONE
            _deleted_budget_comes_back(chaos)
            assert all(count > 0 for count in api.answered.values()), api.answered
            assert harried.process.alive

            api.fault = Fault.FROZEN
            chaos.kubectl.run("annotate", "modelserve", "chaos", "example.com/unheard=1", "--overwrite")
            assert harried.process.ended_within(300), "an operator that hears nothing ends, to be started again"
            assert "WatchFrozen" in local.operator_log.read_text() or "no watch event" in local.operator_log.read_text()
            traffic.wait_for_answers()
        finally:  # else the next test would take it for its own, with a way to the API server that is gone
            harried.stop()
    assert traffic.errors == []
    operator_process.start(cluster)
    wait_converged(chaos, REPLICAS)
    assert {uid: restarts(pod) for uid, pod in worker_pods(chaos).items()} == before


def test_a_drain_of_the_only_worker_answers_all_it_took_and_makes_another(tiny: Deployed, chaos: Deployed) -> None:
    (only,) = worker_pods(tiny).values()
    name = only["metadata"]["name"]
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": NAMESPACE}}
    with traffic_to(tiny, clients=4) as traffic:
        traffic.wait_for_answers()
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}/eviction"
        tiny.kubectl.run("create", "--raw", path, "-f", "-", document=json.dumps(eviction))
        wait_for("another worker", lambda: len(ready_endpoints(tiny) - {only["metadata"]["uid"]}) == 1)
        wait_routed(tiny)
        replaced = time.monotonic()
        wait_converged(tiny, 1)
        traffic.wait_for_answers()
    assert traffic.errors_since(replaced) == []
    # While there is no worker at all, nobody is reached; whatever was accepted was answered.
    assert traffic.errors_of_accepted == []
    wait_converged(chaos, REPLICAS)


def test_deleting_it_in_the_middle_of_a_rollout_leaves_nothing(tiny: Deployed, chaos: Deployed) -> None:
    bystander = set(worker_pods(tiny))
    _in_rollout(chaos, 4096)
    chaos.kubectl.run("delete", "modelserve", "chaos", "--wait=false")
    selector = f"{NAME_LABEL}=chaos"
    wait_for("all children collected", lambda: chaos.kubectl.items(CHILDREN, "-l", selector) == [])
    assert not chaos.kubectl.exists("modelserve", "chaos")
    assert set(worker_pods(tiny)) == bystander
    tiny.wait_ready()
