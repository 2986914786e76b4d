"""`modelserve plan --plot` draws a picture, and says what it lacks when it cannot."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from modelserve.cli.__main__ import main

EXAMPLE = str(Path(__file__).resolve().parents[2] / "docs" / "examples" / "gemma4-31b.yaml")


def _plot(file: Path, accelerator: str = "NVIDIA-H200:2") -> int:
    return main(["plan", "-f", EXAMPLE, "--accelerator", accelerator, "--plot", str(file)])


def test_candidates_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "concurrency.png"
    assert _plot(file) == 0
    assert file.read_bytes().startswith(b"\x89PNG")


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert _plot(tmp_path / "missing" / "concurrency.png") == 2
    assert "cannot write" in capsys.readouterr().err


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    assert _plot(tmp_path / "concurrency.png") == 2
    assert "modelserve[plot]" in capsys.readouterr().err


def test_nothing_that_fits_is_nothing_to_draw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _plot(tmp_path / "concurrency.png", "NVIDIA-L4") == 2
    assert "nothing to draw" in capsys.readouterr().err
