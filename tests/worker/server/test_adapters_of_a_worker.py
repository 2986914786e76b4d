"""The real worker on the CPU with adapters: the mounted set, the probe, answers that differ, and a restart."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from adapter_server import KEY, Operator, desired, version, write_adapter

from localcluster.processes import free_ports
from modelserve_tools.tiny.__main__ import write_checkpoint


@contextmanager
def _worker(model: Path, told: Path) -> Iterator[str]:
    (port,) = free_ports(1)
    settings = {
        "model": model, "served-model-name": "tiny", "device": "cpu", "host": "127.0.0.1", "port": port,
        "max-model-len": 512, "max-num-seqs": 24, "cpu-memory-bytes": 3_000_000_000, "max-loras": 2,
        "max-cpu-loras": 4, "max-lora-rank": 8,
    }  # fmt: skip
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "modelserve_worker", "serve", *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MODELSERVE_ADAPTERS_DIR": str(told)}
    with subprocess.Popen(command, env=environment) as process:
        try:
            url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 240
            while True:
                assert process.poll() is None
                assert time.monotonic() < deadline
                try:
                    if httpx.get(f"{url}/ready").status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                time.sleep(0.1)
            yield url
        finally:
            process.kill()


def _says(url: str, model: str) -> list[float]:
    body = {"model": model, "prompt": "what is said here", "max_tokens": 4, "temperature": 0, "logprobs": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body | {"ignore_eos": True}, timeout=120)
    assert answer.status_code == 200, answer.text
    found: list[float] = answer.json()["choices"][0]["logprobs"]["token_logprobs"]
    return found


def test_adapters_of_a_mounted_set_and_of_calls_answer_as_themselves(tmp_path: Path) -> None:
    model, told = tmp_path / "tiny", tmp_path / "told"
    write_checkpoint(model)
    told.mkdir()
    (told / "management-keys").write_text(f"sha256:{hashlib.sha256(KEY.encode()).hexdigest()}\n")
    mounted = desired(legal=version(write_adapter(tmp_path / "legal", seed=1)))
    (told / "adapters.json").write_text(json.dumps(mounted))
    sets = {
        "sql": version(write_adapter(tmp_path / "sql", seed=2)),
        "idle": version(write_adapter(tmp_path / "i", b=0)),
    }
    faint = version(write_adapter(tmp_path / "faint", seed=3, b=1e-12))
    with _worker(model, told) as url:
        operator = Operator(url)
        found = operator.settled()["legal"]
        assert (found["state"], found["probe"]["prompts"]) == ("Ready", 8)
        assert found["probe"]["kl"] > found["probe"]["baseKl"]
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
        operator.put({"adapters": [*mounted["adapters"], *desired(sql=sets["sql"])["adapters"]]})
        operator.until(lambda states: set(states.values()) == {"Ready"})
        assert {name: _says(url, name) for name in answers} == answers
    with _worker(model, told) as url:
        assert Operator(url).settled()["legal"]["state"] == "Ready"
        assert _says(url, "legal") == answers["legal"]
