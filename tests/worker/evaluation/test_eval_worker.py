"""The harness against the real worker with random weights: every question is taken, and hardly any answer is right."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from served_checkpoints import served_checkpoints

from modelserve_tools.evaluation.__main__ import main
from modelserve_tools.tiny.__main__ import write_checkpoint

LIMITS = {"maxNumSeqs": 8, "maxNumBatchedTokens": 256}  # a step of that many is run at the start
SKILLS = ["chat", "arithmetic", "json", "tool_call", "tool_response", "thinking", "recall", "needle"]


@pytest.fixture
def base_url(tmp_path: Path) -> Iterator[str]:
    write_checkpoint(tmp_path / "model")
    with served_checkpoints(tmp_path, {"tiny": tmp_path / "model"}, maxModelLen=1024, **LIMITS) as urls:
        yield urls["tiny"]


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
