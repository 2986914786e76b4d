"""The real worker on the CPU with adapters: the mounted set, the probe, answers that differ, and a restart."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
from adapter_server import ARCHITECTURE, Operator, desired, version, write_adapter
from adapter_worker import adapter_worker, write_keys

from modelserve_tools.tiny.__main__ import write_checkpoint


def _says(url: str, model: str) -> list[float]:
    body = {"model": model, "prompt": "what is said here", "max_tokens": 4, "temperature": 0, "logprobs": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body | {"ignore_eos": True}, timeout=120)
    assert answer.status_code == 200, answer.text
    found: list[float] = answer.json()["choices"][0]["logprobs"]["token_logprobs"]
    return found


def test_adapters_of_a_mounted_set_and_of_calls_answer_as_themselves(tmp_path: Path) -> None:
    model, told = tmp_path / "tiny", tmp_path / "told"
    write_checkpoint(model)
    write_keys(told)
    mounted = desired(legal=version(write_adapter(tmp_path / "legal", seed=1)))
    (told / "adapters.json").write_text(json.dumps(mounted))
    sets = {
        "sql": version(write_adapter(tmp_path / "sql", seed=2)),
        "idle": version(write_adapter(tmp_path / "i", b=0)),
    }
    faint = version(write_adapter(tmp_path / "faint", seed=3, b=1e-12))
    with adapter_worker(model, told) as url:
        operator = Operator(url)
        found = operator.settled()["legal"]
        assert (found["state"], found["probe"]["prompts"]) == ("Ready", 8)
        assert found["probe"]["kl"] > found["probe"]["baseKl"]
        strengths = found["probe"]["strengthByLayer"]
        assert set(strengths["down"]) == {str(layer) for layer in range(ARCHITECTURE.num_hidden_layers)}
        assert all(ratio > 0 for ratio in strengths["down"].values())
        assert not any(ratio for kind, layers in strengths.items() if kind != "down" for ratio in layers.values())
        base = _says(url, "tiny")
        operator.put({"adapters": [*mounted["adapters"], *desired(**sets, faint=faint)["adapters"]]})
        states = operator.settled()
        assert {name: (each["state"], each["reason"]) for name, each in states.items()} == {
            "legal": ("Ready", None), "sql": ("Ready", None), "idle": ("NoEffect", "FactorsAreZero"),
            "faint": ("NoEffect", "WithinNoise"),
        }  # fmt: skip
        answers = {name: _says(url, name) for name in ("tiny", "legal", "sql")}
        assert answers["tiny"] == base
        assert len({tuple(each) for each in answers.values()}) == 3
        operator.put(desired(sql=sets["sql"]))
        operator.until(lambda states: set(states) == {"sql"})
        crossed = version(write_adapter(tmp_path / "crossed", seed=4, crossed=1))
        again = desired(sql=sets["sql"], crossed=crossed)
        operator.put({"adapters": [*mounted["adapters"], *again["adapters"]]})
        states = operator.settled()
        assert {name: each["state"] for name, each in states.items()} == {
            "legal": "Ready", "sql": "Ready", "crossed": "PartlyNoEffect",
        }  # fmt: skip
        assert states["crossed"]["reason"] == "ModulesWithoutEffect"
        assert "1 trained matrices add nothing" in states["crossed"]["message"]
        assert "down[0] of layer 1" in states["crossed"]["message"]
        assert states["crossed"]["probe"]["strengthByLayer"]["down"]["1"] == 0
        assert {name: _says(url, name) for name in answers} == answers
    with adapter_worker(model, told) as url:
        assert Operator(url).settled()["legal"]["state"] == "Ready"
        assert _says(url, "legal") == answers["legal"]
