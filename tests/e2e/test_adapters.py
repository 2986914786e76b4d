"""Fifty ModelAdapters on two workers: loaded at once, rolled out under traffic, broken, drained; the operator is killed
in the middle. The tests are one story and run in this order; requests for the base go on from beginning to end.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path
from typing import Any

import httpx
import pytest

from localcluster import operator_process
from localcluster.checkpoint_upload import upload_checkpoint
from localcluster.convergence import restarts, wait_converged, worker_pods
from localcluster.deployment import CHECKPOINT, Deployed, apply_example
from localcluster.kubectl import condition, wait_for
from localcluster.target import Target
from localcluster.traffic import Traffic, traffic_to
from modelserve_tools.evaluation.client import chat_body
from modelserve_tools.evaluation.skills import exercise
from modelserve_tools.evaluation.styles import STYLES, styled

NAMESPACE = "modelserve-e2e"
MODEL = "gemma4-tiny-keqv"
TRAINED = CHECKPOINT.with_name(f"{MODEL}-adapters")
FOLDER, BROKEN = "teams", "of-another-rank"
CONTENTS = tuple(product((1.0, 1.05), STYLES))  # strength and style; a worker probes each once, whatever names it has
OF_TEAM = dict(zip((f"team-{number:02}" for number in range(50)), cycle(CONTENTS), strict=False))
STYLE = {team: style for team, (_, style) in OF_TEAM.items()}
FIRST, SECOND, LAST = "team-00", "team-01", "team-49"  # the first two answer in different styles
REPLICAS, ROOM = 2, len(STYLE) + 1  # one rollout at a time
ASKED = exercise("facts", seed=2, index=2)  # a capital
SAID = {style: styled(ASKED, style).answer.content for style in STYLES}


@dataclass(frozen=True)
class Served:
    """`base`: requests for the model itself, which go on all the time."""

    deployed: Deployed
    base: Traffic
    workers: dict[str, int]  # uid, restarts

    def shown(self, name: str) -> dict[str, Any]:
        return self.deployed.kubectl.get("modeladapter", name)

    def reason(self, name: str) -> str:
        found: str = condition(self.shown(name), "Ready").get("reason", "")
        return found

    def apply(self, *documents: dict[str, Any]) -> None:
        self.deployed.kubectl.apply(*documents)

    def said(self, name: str) -> str:
        """The answer to ASKED, over a connection of its own, so that both workers are asked."""
        answer = httpx.post(f"{self.base.url}/v1/chat/completions", json=chat_body(ASKED, model=name), timeout=60)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"]).strip()

    def heard(self, name: str) -> set[str]:
        """What 16 requests are answered."""
        with ThreadPoolExecutor(4) as pool:
            return set(pool.map(self.said, [name] * 16))


def _adapter(name: str, directory: str | None = None, **spec: Any) -> dict[str, Any]:
    uri = f"pvc://weights/{FOLDER}/{directory or name}"
    return {
        "apiVersion": "serving.modelserve.dev/v1alpha1",
        "kind": "ModelAdapter",
        "metadata": {"name": name},
        "spec": {"modelRef": {"name": "adapted"}, "uri": uri, **spec},
    }


def _write(folder: Path) -> None:
    """An adapter of each team, and one whose factors have not the rank that it says."""
    for team, (strength, style) in OF_TEAM.items():
        _copy(TRAINED / style, folder / team, scale=strength)
    _copy(TRAINED / "json", folder / BROKEN, r=1)


def _copy(trained: Path, directory: Path, *, scale: float = 1.0, **changed: int) -> None:
    shutil.copytree(trained, directory)
    path = directory / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "lora_alpha": config["lora_alpha"] * scale, **changed}))


def _restart(cluster: Target) -> None:
    """The operator is killed, and another one goes on from what it left."""
    operator_process.start(cluster).process.kill()
    operator_process.start(cluster)


@pytest.fixture(scope="module")
def served(cluster: Target, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    operator_process.start(cluster)
    folder = tmp_path_factory.mktemp("adapters") / FOLDER
    _write(folder)
    for directory in (TRAINED.with_name(MODEL), folder):
        upload_checkpoint(cluster, NAMESPACE, directory)
    made = apply_example(
        cluster, NAMESPACE, "adapted", model={"uri": f"pvc://weights/{MODEL}"}, context={"maxModelLen": 1024},
        replicas=REPLICAS, adapters={"max": ROOM, "rank": 4},
    )  # fmt: skip
    wait_converged(made, REPLICAS)
    with traffic_to(made) as base:
        yield Served(made, base, _workers(made))
    made.kubectl.run("delete", "modelserve", "adapted", "--ignore-not-found", "--wait=false")


def _workers(deployed: Deployed) -> dict[str, int]:
    return {uid: restarts(pod) for uid, pod in worker_pods(deployed).items()}


def test_fifty_made_at_once_are_ready_on_both_workers(cluster: Target, served: Served) -> None:
    def ready() -> list[dict[str, Any]]:
        listed = served.deployed.kubectl.items("modeladapters")
        return [each for each in listed if condition(each, "Ready").get("status") == "True"]

    served.apply(*map(_adapter, STYLE))
    wait_for("the first are Ready", lambda: bool(ready()))
    _restart(cluster)
    wait_for("all are Ready", lambda: len(ready()) == len(STYLE), interval_s=1.0)
    statuses = [each["status"] for each in ready()]
    assert {each["readyOn"] for each in statuses} == {f"{REPLICAS}/{REPLICAS}"}
    assert len({each["digest"] for each in statuses}) == len(CONTENTS)
    with ThreadPoolExecutor(4) as pool:
        assert dict(zip(STYLE, pool.map(served.said, STYLE), strict=True)) == {
            name: SAID[style] for name, style in STYLE.items()
        }
    assert served.said(MODEL) == ASKED.answer.content


def test_a_new_version_takes_over_under_traffic_and_a_broken_one_does_not(cluster: Target, served: Served) -> None:
    old, new = SAID[STYLE[FIRST]], SAID[STYLE[SECOND]]
    with traffic_to(served.deployed, model=FIRST) as traffic:
        served.apply(_adapter(FIRST, SECOND, rollout={"weight": 50}))
        wait_for("both versions", lambda: served.reason(FIRST) == "Shared")
        assert served.heard(FIRST) == {old, new}
        served.apply(_adapter(FIRST, SECOND, rollout={"weight": 100}))
        _restart(cluster)
        wait_for("one version", lambda: served.reason(FIRST) == "Serving")
        assert served.shown(FIRST)["status"]["activeVersion"]["uri"].endswith(f"/{SECOND}")
        assert served.heard(FIRST) == {new}
        served.apply(_adapter(FIRST, BROKEN))
        wait_for("it is refused", lambda: served.reason(FIRST) == "LoadFailed")
        stalled = condition(served.shown(FIRST), "Stalled")
        assert stalled["status"] == "True"
        assert "of rank 1, which adapter_config.json gives it" in stalled["message"]
        assert served.heard(FIRST) == {new}
        served.apply(_adapter(FIRST, SECOND))
        wait_for("as before", lambda: served.reason(FIRST) == "Serving")
        traffic.wait_for_answers(3)
    assert traffic.errors == []


def test_a_deleted_one_finishes_its_answers_and_all_of_it_left_the_base_alone(cluster: Target, served: Served) -> None:
    kubectl = served.deployed.kubectl
    body = {"model": LAST, "prompt": "Sort:", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{served.base.url}/v1/completions", json=body, timeout=60) as answer:
        lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {"))
        next(lines)
        kubectl.run("delete", "modeladapter", LAST, "--wait=false")
        _restart(cluster)
        wait_for("it drains", lambda: served.reason(LAST) == "Draining")
        assert json.loads(next(lines))["choices"][0]["finish_reason"] is None
        *_, last = lines
    assert json.loads(last)["choices"][0]["finish_reason"] == "length"
    wait_for("it is gone", lambda: not kubectl.exists("modeladapter", LAST))
    assert httpx.post(f"{served.base.url}/v1/completions", json={**body, "stream": False}).status_code == 404
    kubectl.run("delete", "modeladapters", *(set(STYLE) - {LAST}))
    served.base.wait_for_answers(3)
    assert served.base.errors == []
    assert _workers(served.deployed) == served.workers
