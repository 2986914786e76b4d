"""A start that fails for good names what is at fault: the settings, the machine or the checkpoint, which alone is worth
fetching again."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import pytest

from modelserve.engine_args import EngineArgs
from modelserve.errors import InvalidInput
from modelserve.termination import TerminationReason
from modelserve_worker.engine_startup import build_engine
from modelserve_worker.grammar import compiler
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


def test_ranks_on_arm_are_the_machine_s_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any rank is started."""
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    reason, text = _reason(tensor_parallel_size=2)
    assert reason is TerminationReason.UnsupportedArchitecture
    assert "one GPU a replica, or on nodes with amd64 CPUs" in text


def test_a_tokenizer_that_makes_no_grammar_ends_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a crash loop: the same file is read at every start."""

    def refused(*_: object, **__: object) -> None:
        raise InvalidInput("tokenizer.json: no", field="tokenizer.json")

    monkeypatch.setattr(compiler.GrammarCompiler, "__init__", refused)
    assert _reason() == (TerminationReason.InvalidCheckpoint, "tokenizer.json: no")
