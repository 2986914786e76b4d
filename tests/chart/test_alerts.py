"""Alerts over the series of the operator, evaluated by promtool: they tell of what is amiss, and of nothing else."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry

from localcluster.binaries import require_tool
from localcluster.helm import CHART
from localcluster.settings import ClusterError
from modelserve_worker.server.media_metrics import IMAGES, SOUNDS, MediaKind, MediaMetrics

UNAVAILABLE = "ModelServeUnavailable"


@pytest.fixture(scope="module")
def promtool() -> Path:
    try:
        return require_tool("promtool", print)
    except ClusterError as error:
        pytest.skip(str(error))


def _evaluate(
    promtool: Path, folder: Path, *, series: Mapping[str, int | str], alert: str, expected: list[object], at: str = "8m"
) -> None:
    """`series` are values that stay, or how they change in promtool's words."""
    test = {
        "rule_files": [str(CHART / "files" / "rules.yaml")],
        "evaluation_interval": "30s",
        "tests": [
            {
                "interval": "30s",
                "input_series": [
                    {"series": name, "values": value if isinstance(value, str) else f"{value}+0x20"}
                    for name, value in series.items()
                ],
                "alert_rule_test": [{"eval_time": at, "alertname": alert, "exp_alerts": expected}],
            }
        ],
    }
    file = folder / "alerts.yaml"
    file.write_text(yaml.safe_dump(test))
    done = subprocess.run([promtool, "test", "rules", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("available", "desired", "fires"), [(0, 1, True), (1, 1, False), (0, 0, False)], ids=["down", "up", "wants_none"]
)
def test_only_a_model_that_wants_workers_is_reported_unavailable(
    promtool: Path, tmp_path: Path, available: int, desired: int, fires: bool
) -> None:
    who = 'namespace="ml",name="gemma"'
    series = {
        f'modelserve_condition{{{who},type="Available",reason="Any"}}': available,
        f'modelserve_replicas{{{who},state="desired"}}': desired,
        'modelserve_condition{namespace="ml",name="other",type="Available",reason="Serving"}': 1,
        'modelserve_replicas{namespace="ml",name="other",state="desired"}': 1,
    }
    labels = {"namespace": "ml", "name": "gemma", "severity": "critical"}
    told = {
        "summary": "ModelServe ml/gemma has no worker that takes requests.",
        "description": "kubectl describe ms gemma -n ml says why.",
    }
    expected: list[object] = [{"exp_labels": labels, "exp_annotations": told}] if fires else []
    _evaluate(promtool, tmp_path, series=series, alert=UNAVAILABLE, expected=expected)


@pytest.mark.parametrize("waiting", [0, 3])
def test_a_halted_rollout_of_workers_is_reported(promtool: Path, tmp_path: Path, waiting: int) -> None:
    told = {
        "summary": "3 ModelServes do not move to the newer worker: it fails where it was tried.",
        "description": "An Event about the operator's Lease (reason RolloutHalted) names where and why. Mend it there, "
        "or set the worker's image back.",
    }
    expected: list[object] = [{"exp_labels": {"severity": "warning"}, "exp_annotations": told}] if waiting else []
    series = {"modelserve_operator_halted_moves": waiting}
    _evaluate(promtool, tmp_path, series=series, alert="ModelServeWorkerRolloutHalted", expected=expected)


@pytest.mark.parametrize("quick", [60, 0], ids=["quick", "slow"])
def test_decoders_that_are_too_few_are_reported(promtool: Path, tmp_path: Path, quick: int) -> None:
    """Of 60 images a step all, or none, within a second, and all within two."""
    name = 'modelserve_image_decode_seconds_bucket{namespace="ml",name="gemma",pod="a",le="%s"}'
    series = {name % le: f"0+{count}x60" for le, count in (("1", quick), ("2", 60), ("+Inf", 60))}
    told = {
        "summary": "Images of ml/gemma take 1.95s to decode (p95), waiting included.",
        "description": "More come than its decoders take: add replicas, or have clients send images no larger than "
        "maxSoftTokens looks at (docs/images.md).",
    }
    labels = {"namespace": "ml", "name": "gemma", "severity": "warning"}
    expected: list[object] = [] if quick else [{"exp_labels": labels, "exp_annotations": told}]
    _evaluate(promtool, tmp_path, series=series, alert="ModelServeImagesSlow", expected=expected, at="20m")


@pytest.mark.parametrize(("kind", "asked_for"), [(IMAGES, 4), (SOUNDS, 4)])
def test_metrics_of_images_and_sounds_are_those_that_a_worker_has(kind: MediaKind, asked_for: int) -> None:
    """The end-to-end test of all expressions serves a model that takes none."""
    registry = CollectorRegistry()
    MediaMetrics(registry, "gemma", kind)
    names = {sample.name for metric in registry.collect() for sample in metric.samples}
    told = "".join((CHART / "files" / name).read_text() for name in ("rules.yaml", "dashboard.json"))
    asked = set(re.findall(rf"modelserve_{kind.item}\w*", told))
    assert len(asked) == asked_for
    assert asked <= names
