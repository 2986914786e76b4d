"""Evaluates PromQL over what was scraped just now, with promtool's test of rules: no Prometheus has to run."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from prometheus_client.parser import text_string_to_metric_families

_SAMPLES = 21  # of each scrape, 30 s apart
_EVALUATED = "12m"  # the second scrape has been there for two minutes, so that rates over five see the difference


@dataclass(frozen=True)
class Scraped:
    """Two texts of one /metrics, an earlier and a later one, and the labels that scraping adds."""

    before: str
    after: str
    labels: Mapping[str, str]


def without_data(
    promtool: Path, rules: Path, scraped: Iterable[Scraped], expressions: Sequence[str], folder: Path
) -> list[str]:
    """The expressions that return nothing, or NaN alone. `folder` gets the test's file."""
    series = [each for target in scraped for each in _series(target)]
    found = []
    for expression in expressions:
        query = f"count(({expression}) == ({expression})) > bool 0"  # NaN differs from itself
        test = {
            "rule_files": [str(rules)],
            "evaluation_interval": "30s",
            "tests": [
                {
                    "interval": "30s",
                    "input_series": series,
                    "promql_expr_test": [
                        {"expr": query, "eval_time": _EVALUATED, "exp_samples": [{"labels": "{}", "value": 1}]}
                    ],
                }
            ],
        }
        file = folder / "expressions.yaml"
        file.write_text(yaml.safe_dump(test))
        done = subprocess.run([str(promtool), "test", "rules", str(file)], capture_output=True, text=True, check=False)
        if done.returncode:
            assert "got:" in done.stdout + done.stderr, done.stdout + done.stderr  # not an error of its own
            found.append(expression)
    return found


def expressions_of(rules: Path, dashboard: Path) -> list[str]:
    """Every expression of both files, with Grafana's variables replaced; of alerts the side that is compared."""
    found = []
    for group in yaml.safe_load(rules.read_text())["groups"]:
        for rule in group["rules"]:
            found.append(re.sub(r" [<>]=? -?[\d.]+$", "", rule["expr"]) if "alert" in rule else rule["expr"])
    for panel in json.loads(dashboard.read_text())["panels"]:
        found += [target["expr"] for target in panel.get("targets", ())]
    variables = {"$__rate_interval": "5m", "$namespace": ".*", "$name": ".*"}
    for variable, value in variables.items():
        found = [each.replace(variable, value) for each in found]
    return found


def _series(target: Scraped) -> list[dict[str, str]]:
    before, after = _samples(target.before, target.labels), _samples(target.after, target.labels)
    return [
        {"series": name, "values": f"{before.get(name, value)!r}+0x{_SAMPLES - 1} {value!r}+0x{_SAMPLES - 1}"}
        for name, value in after.items()
    ]


def _samples(text: str, labels: Mapping[str, str]) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            every = {**labels, **sample.labels}
            shown = ",".join(f"{key}={json.dumps(value)}" for key, value in sorted(every.items()))
            found[f"{sample.name}{{{shown}}}"] = float(sample.value)
    return found
