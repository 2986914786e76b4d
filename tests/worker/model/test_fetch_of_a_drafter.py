"""The download of an assistant, which the model does not wait for: it ends well, and tells what came of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import errors
from test_fetch import EVERYTHING, Hub, hub, response  # noqa: F401 - a fixture

from modelserve.termination import FetchedDrafter
from modelserve_tools import fetch as module
from modelserve_tools.fetch import main

URI, COMMIT = "hf://google/gemma-4-E2B-it-assistant", "a1" * 20


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[FetchedDrafter]:
    found: list[FetchedDrafter] = []
    monkeypatch.setattr(module, "write_fetched_drafter", found.append)
    return found


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr(module.time, "sleep", found.append)
    return found


@pytest.fixture
def drafts(hub: Hub) -> Hub:  # noqa: F811
    real = hub.model_info

    def at_commit(repository: str, *, revision: str, files_metadata: bool = False) -> Any:
        found = real(repository, revision=revision, files_metadata=True)
        return SimpleNamespace(sha=COMMIT, siblings=found.siblings)

    hub.model_info = at_commit  # type: ignore[method-assign]
    return hub


def _fetch(tmp_path: Path, *more: str) -> int:
    return main(["--uri", URI, "--dest", str(tmp_path / "d"), "--optional", *more])


def test_it_is_downloaded_at_the_commit_that_it_tells(drafts: Hub, tmp_path: Path, told: list[FetchedDrafter]) -> None:
    assert _fetch(tmp_path) == 0
    assert told == [FetchedDrafter(commit=COMMIT)]
    assert drafts.downloads == [(COMMIT, EVERYTHING)]
    (tmp_path / "recorded").write_text("b2" * 20)
    assert _fetch(tmp_path, "--recorded", str(tmp_path / "recorded")) == 0
    assert told[1] == FetchedDrafter(commit="b2" * 20), "what the operator has recorded"


def test_what_is_there_needs_no_hub(
    drafts: Hub, tmp_path: Path, told: list[FetchedDrafter], pauses: list[float]
) -> None:
    _fetch(tmp_path)
    drafts.fault = ConnectionError("unreachable")
    assert _fetch(tmp_path) == 0
    assert (told[1], pauses) == (FetchedDrafter(commit=COMMIT), [])


def test_what_another_try_cannot_cure_is_told_at_once(
    drafts: Hub, tmp_path: Path, told: list[FetchedDrafter], pauses: list[float]
) -> None:
    drafts.fault = errors.RepositoryNotFoundError("no", response=response(404))
    assert _fetch(tmp_path) == 0
    assert "does not exist on the Hub" in str(told[0].problem)
    assert (told[0].commit, pauses) == (None, [])


def test_an_unreachable_hub_is_asked_again_and_then_told(
    drafts: Hub, tmp_path: Path, told: list[FetchedDrafter], pauses: list[float]
) -> None:
    drafts.fault = ConnectionError("unreachable " * 1000)
    assert _fetch(tmp_path) == 0
    assert "unreachable" in str(told[0].problem)
    assert pauses == list(module.OPTIONAL_PAUSES_S)


def test_what_is_told_fits_a_termination_message(tmp_path: Path) -> None:
    from modelserve.termination import MESSAGE_LIMIT_BYTES, write_fetched_drafter

    log = tmp_path / "log"
    log.write_text("")
    write_fetched_drafter(FetchedDrafter(problem="\u00e9\n" * 4000), str(log))
    assert len(log.read_bytes()) <= MESSAGE_LIMIT_BYTES
    assert FetchedDrafter.model_validate_json(log.read_text()).problem
