"""The harness against the real worker with random weights: every question is taken, and hardly any answer is right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from localcluster.processes import free_ports
from modelserve_tools.evaluation.__main__ import main
from modelserve_tools.tiny.__main__ import write_checkpoint

SKILLS = ["chat", "arithmetic", "json", "tool_call", "tool_response", "thinking", "recall", "needle"]


@pytest.fixture
def base_url(tmp_path: Path) -> Iterator[str]:
    write_checkpoint(tmp_path / "model")
    (port,) = free_ports(1)
    settings = {
        "model": str(tmp_path / "model"), "servedModelName": "tiny", "device": "cpu", "host": "127.0.0.1", "port": port,
        "maxModelLen": 1024, "cpuMemoryBytes": 3_000_000_000, "maxNumSeqs": 16,
    }  # fmt: skip
    (tmp_path / "engine.yaml").write_text(json.dumps(settings))  # JSON is YAML
    log = (tmp_path / "log").open("w+")
    process = subprocess.Popen(
        [sys.executable, "-m", "modelserve_worker", "serve", "--config", str(tmp_path / "engine.yaml")],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=log,
    )  # fmt: skip
    try:
        while not _ready(port):
            assert process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.kill()
        process.wait()
        log.close()


def _ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200
    except httpx.TransportError:
        return False


def test_the_worker_takes_every_question(base_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failures = tmp_path / "failures.jsonl"
    arguments = ["--base-url", base_url, "--skills", ",".join(SKILLS), "--distances", "10,300,1000", "--n", "3"]
    arguments += ["--thinking-tokens", "200"]  # the default leaves no room for a prompt
    code = main([*arguments, "--json", "-", "--failures", str(failures)])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    document = json.loads(shown.out)
    assert (document["model"], document["complete"]) == ("tiny", True)
    cells = {(cell["skill"], cell["distance"]): cell for cell in document["cells"]}
    answered = [cell for (_, distance), cell in cells.items() if distance in (None, 10)]
    assert len(answered) == len(SKILLS)
    assert {cell["outcomes"] for cell in answered} == {"000"}
    assert len(failures.read_text().splitlines()) == 3 * len(SKILLS)
    for skill in ("recall", "needle"):
        # The random checkpoint's tokenizer spells words out: only the server knows that 300 words are too long.
        assert "context length is 1024 tokens" in cells[skill, 300]["skipped"]
        assert cells[skill, 1000]["skipped"].endswith("tokens, the server has 1024")
