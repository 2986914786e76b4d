"""From this release to a next one and back, with real pods and another release's operator and CRD."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from localcluster import operator_process
from localcluster.convergence import workers_of
from localcluster.crds import install_crds
from localcluster.deployment import Deployed, apply_example
from localcluster.kubectl import wait_for
from localcluster.next_release import (
    FIELD,
    FIELD_DEFAULT,
    NEXT,
    PLAN_KEY,
    PLAN_VALUE,
    install_crds_of,
    make_next_release,
)
from localcluster.target import Target
from localcluster.traffic import traffic_to

NAMESPACE = "modelserve-e2e"


@pytest.fixture
def next_release(cluster: Target, tmp_path: Path) -> Iterator[Path]:
    """Its packages. In the end this release runs again."""
    yield make_next_release(tmp_path / "next")
    cluster.kubectl.within(NAMESPACE).delete("modelserve", "later")
    operator_process.stop(cluster.layout)
    install_crds(cluster.kubectl)
    operator_process.start(cluster)


def _exchange(cluster: Target, packages: Path | None) -> None:
    """The operator of that release (None: this one) takes over, and has looked at every ModelServe."""
    there = [each["metadata"] for each in cluster.kubectl.items("modelserves", "--all-namespaces")]
    operator_process.stop(cluster.layout)
    started = operator_process.start(cluster, packages=packages)
    wanted = {(each["namespace"], each["name"]) for each in there if "deletionTimestamp" not in each}
    wait_for("every ModelServe looked at", lambda: wanted <= started.reconciled)


def _ready(served: Deployed) -> bool:
    return (served.condition("Ready")["status"], served.condition("Ready")["reason"]) == ("True", "RolledOut")


def test_an_upgrade_and_a_rollback_end_no_pod_and_fail_no_request(
    tiny: Deployed, cluster: Target, next_release: Path
) -> None:
    """`later` is made by the next release and uses its field, so the rollback meets what this release does not know."""
    before = workers_of(cluster)
    with traffic_to(tiny, newcomers=1) as traffic:
        traffic.wait_for_answers()
        install_crds_of(next_release, cluster.kubectl)
        _exchange(cluster, next_release)
        assert tiny.resource()["spec"][FIELD] == FIELD_DEFAULT
        assert workers_of(cluster) == before
        later = apply_example(cluster, NAMESPACE, "later", **{FIELD: "zstd"})
        later.wait_ready()
        (revision,) = later.owned("controllerrevisions.apps")
        made = revision["data"]
        assert (made["renderer"]["release"], made["plan"][PLAN_KEY]) == (NEXT, PLAN_VALUE)
        assert made["inputs"]["spec"][FIELD] == "zstd"
        both = workers_of(cluster)
        assert both.items() > before.items()
        with traffic_to(later, newcomers=1) as others:
            others.wait_for_answers()
            _exchange(cluster, None)
            assert _ready(tiny)
            assert _ready(later)
            for each in (traffic, others):
                each.wait_for_answers()
            assert workers_of(cluster) == both
            said = f"spec.{FIELD} of a later release"
            wait_for(f"{said!r} in the status", lambda: said in later.condition("Planned")["message"])
    assert traffic.errors == others.errors == []
    assert later.owned("controllerrevisions.apps") == [revision], "its keys are kept, though nobody here reads them"
    assert later.status()["revision"] == revision["metadata"]["name"]
