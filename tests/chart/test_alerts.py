"""Alerts over the series of the operator, evaluated by promtool: they tell of what is amiss, and of nothing else."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from localcluster.binaries import require_tool
from localcluster.helm import CHART
from localcluster.settings import ClusterError

UNAVAILABLE = "ModelServeUnavailable"


@pytest.fixture(scope="module")
def promtool() -> Path:
    try:
        return require_tool("promtool", print)
    except ClusterError as error:
        pytest.skip(str(error))


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
    expected = [{"exp_labels": labels, "exp_annotations": told}] if fires else []
    test = {
        "rule_files": [str(CHART / "files" / "rules.yaml")],
        "evaluation_interval": "30s",
        "tests": [
            {
                "interval": "30s",
                "input_series": [{"series": name, "values": f"{value}+0x20"} for name, value in series.items()],
                "alert_rule_test": [{"eval_time": "8m", "alertname": UNAVAILABLE, "exp_alerts": expected}],
            }
        ],
    }
    file = tmp_path / "alerts.yaml"
    file.write_text(yaml.safe_dump(test))
    done = subprocess.run([promtool, "test", "rules", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
