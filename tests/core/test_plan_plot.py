"""`modelserve plan --plot` draws a picture, and says what it lacks when it cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from modelserve.cli.__main__ import main

EXAMPLE = str(Path(__file__).resolve().parents[2] / "docs" / "examples" / "gemma4-31b.yaml")


def _words(file: Path, accelerator: str = "NVIDIA-H200:2") -> list[str]:
    return ["plan", "-f", EXAMPLE, "--accelerator", accelerator, "--plot", str(file)]


def _plot(file: Path, accelerator: str = "NVIDIA-H200:2") -> int:
    return main(_words(file, accelerator))


def test_candidates_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "concurrency.png"
    assert _plot(file) == 0
    assert file.read_bytes().startswith(b"\x89PNG")


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert _plot(tmp_path / "missing" / "concurrency.png") == 2
    assert "cannot write" in capsys.readouterr().err


def test_without_matplotlib_the_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ImportError")  # found before the installed one
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    command = [sys.executable, "-m", "modelserve.cli", *_words(tmp_path / "concurrency.png")]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 2, ended.stderr
    assert "modelserve[plot]" in ended.stderr


def test_nothing_that_fits_is_nothing_to_draw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _plot(tmp_path / "concurrency.png", "NVIDIA-L4") == 2
    assert "nothing to draw" in capsys.readouterr().err
