"""A start that fails for good names what is at fault: the settings, the machine or the checkpoint, which alone is worth
fetching again."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from modelserve.engine_args import EngineArgs
from modelserve.termination import TerminationReason
from modelserve_worker.engine_startup import build_engine
from modelserve_worker.terminal_error import TerminalError

TARGET = Path(__file__).parents[2] / "models" / "gemma4-tiny-keqv"


def _reason(**changes: Any) -> tuple[TerminationReason, str]:
    settings = {"model": str(TARGET), "device": "cpu", "cpu_memory_bytes": 2 << 30}
    with pytest.raises(TerminalError) as told:
        build_engine(EngineArgs(**settings | changes), lambda done, total: None)
    return told.value.reason, str(told.value)


def test_a_setting_is_not_the_checkpoint_s_fault() -> None:
    reason, text = _reason(max_model_len=10**6)
    assert reason is TerminationReason.InvalidEngineArgs
    assert "maxModelLen 1000000 exceeds the model's" in text


STARTED = """
import sys
from modelserve.engine_args import EngineArgs
from modelserve_worker.engine_startup import build_engine
from modelserve_worker.terminal_error import TerminalError
try:
    build_engine(EngineArgs(model=sys.argv[1], device="cpu", cpu_memory_bytes=2 << 30, tensor_parallel_size=2), print)
except TerminalError as error:
    print(error.reason.value, error)
"""


def test_ranks_on_another_machine_are_its_fault() -> None:
    """Before any rank is started: Linux says that it runs on a machine of 32 bits."""
    command = ["setarch", "linux32", sys.executable, "-c", STARTED, str(TARGET)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.startswith(TerminationReason.UnsupportedArchitecture.value)
    assert "on a machine of type 'i686'" in said
    assert "one GPU a replica, or on nodes with amd64 CPUs" in said


def test_a_tokenizer_that_makes_no_grammar_ends_for_good(tmp_path: Path) -> None:
    """It was a crash loop: the same file is read at every start."""
    shutil.copytree(TARGET, tmp_path / "model")
    path = tmp_path / "model" / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"decoder": None}))
    reason, text = _reason(model=str(tmp_path / "model"))
    assert reason is TerminationReason.InvalidCheckpoint
    assert text.startswith("tokenizer.json: can't determine decoder type")
