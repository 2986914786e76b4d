"""docs/expected-speed.md: what is expected of GPUs that nothing was measured on is what the command prints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMAND = ("tests/bench", "expected_elsewhere")


def test_the_table_of_other_gpus_is_what_the_command_prints() -> None:
    document = (ROOT / "docs" / "expected-speed.md").read_text()
    printed = subprocess.run([sys.executable, *COMMAND], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f"python {' '.join(COMMAND)}" in document
    table, assumptions = printed.rstrip().split("\n\n")
    assert table in document
    assert all(each in document for each in assumptions.splitlines())
    for gpus in ("2 x RTX 3090", "2 x RTX 4090", "1 x L4 ", "1 x L40S", "1 x A100"):
        assert f"| {gpus}" in table
