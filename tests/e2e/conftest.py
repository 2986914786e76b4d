"""One real cluster for all end-to-end tests: the user's (KUBECONFIG) or a local one that ends with the session."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from localcluster import image_build, image_job, lifecycle, operator_process, weights_volume
from localcluster.checkpoint_upload import upload_checkpoint
from localcluster.crds import install_crds
from localcluster.deployment import CHECKPOINT, Deployed, apply_example
from localcluster.kubectl import KubectlError
from localcluster.node_profile import NodeProfile
from localcluster.settings import Layout
from localcluster.target import Target, find, user_kubeconfig

LAYOUT = Layout("test")
# Threads that wait for each other on cores that others use take three times the CPU of one thread, and longer.
ON_BUSY_CORES = NodeProfile(environment=("OMP_NUM_THREADS=1",))
NAMESPACE = "modelserve-e2e"
BUILDING: list[subprocess.Popen[bytes]] = []  # the job that builds the images
NO_IMAGES: list[str] = []  # why there is none
IMPORTING: list[Future[None]] = []  # of the images into the node of the cluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/e2e/" in item.path.as_posix():
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.xdist_group("e2e"))  # one process: there is one cluster
            item.add_marker(pytest.mark.timeout(1800))  # the first may have to build Kubernetes


def pytest_collection_finish(session: pytest.Session) -> None:
    """Building images takes minutes and mostly waits for the disk: it begins now, beside the other tests."""
    wanted = any("/e2e/test_the_chart" in item.path.as_posix() for item in session.items)
    if not wanted or session.config.option.collectonly:
        return
    if user_kubeconfig() is not None:
        NO_IMAGES.append("images are built for the local cluster, and KUBECONFIG names another")
    elif reasons := lifecycle.obstacles() or list(filter(None, [image_build.obstacle()])):
        NO_IMAGES.extend(reasons)
    else:
        BUILDING.append(image_job.start())


def pytest_sessionfinish() -> None:
    """A session that was broken off leaves no build behind, and none keeps gigabytes that the next has to make anew."""
    if BUILDING and "MODELSERVE_KEEP_CLUSTER" not in os.environ:
        image_job.stop(BUILDING[0])
        image_build.remove()


def _import_images(layout: Layout) -> None:
    """Gigabytes that go through the disk for two minutes: beside other tests, as their build does."""
    image_job.wait(BUILDING[0])
    for image in image_build.IMAGES:
        lifecycle.import_image(layout, image_build.archive(image))


@pytest.fixture(scope="session")
def built_images(cluster: Target) -> None:
    """Waits until Helm and promtool are there, and the images in the node."""
    if NO_IMAGES:
        pytest.skip("; ".join(NO_IMAGES))
    IMPORTING[0].result()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """A failure shows the end of the operator's log and what is in the namespace."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    cluster = getattr(item, "funcargs", {}).get("cluster")
    if report.failed and isinstance(cluster, Target):
        if LAYOUT.operator_log.exists():
            report.sections.append(("operator", "\n".join(LAYOUT.operator_log.read_text().splitlines()[-40:])))
        try:
            listed = cluster.kubectl.run("get", "modelserves,pods,jobs,events", "-n", NAMESPACE, "-o", "wide")
        except KubectlError as error:
            listed = str(error)
        report.sections.append(("cluster", listed))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Target]:
    """The cluster with the CRD, and a namespace that enforces `restricted` and has the demo's checkpoint on a claim."""
    local = user_kubeconfig() is None
    if local and (obstacles := lifecycle.obstacles()):
        pytest.skip("no KUBECONFIG, and the local cluster cannot run here: " + "; ".join(obstacles))
    if local:
        operator_process.stop(LAYOUT)
        lifecycle.down(LAYOUT)
    target = find(LAYOUT, print, ON_BUSY_CORES)
    install_crds(target.kubectl)
    weights_volume.create_namespace(target, NAMESPACE)
    upload_checkpoint(target, NAMESPACE, CHECKPOINT)
    if BUILDING:
        IMPORTING.append(ThreadPoolExecutor(1).submit(_import_images, LAYOUT))
    yield target
    operator_process.stop(LAYOUT)
    if not local:
        weights_volume.delete_namespace(target, NAMESPACE)
    elif "MODELSERVE_KEEP_CLUSTER" not in os.environ:
        lifecycle.down(LAYOUT)


@pytest.fixture
def operator(cluster: Target) -> operator_process.OperatorProcess:
    """A running operator; a test that stops it leaves it to the next one to start it again."""
    return operator_process.start(cluster)


@pytest.fixture(scope="session")
def _tiny(cluster: Target) -> Deployed:
    operator_process.start(cluster)
    return apply_example(cluster, NAMESPACE, "tiny")


@pytest.fixture
def tiny(_tiny: Deployed, operator: operator_process.OperatorProcess) -> Deployed:
    """docs/examples/gemma4-tiny.yaml, Ready. Tests leave it as they found it."""
    _tiny.wait_ready()
    return _tiny
