"""The download of an assistant, which the model does not wait for: it ends well, and tells what came of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import errors
from test_fetch import EVERYTHING, Hub, hub, response  # noqa: F401 - a fixture

from modelserve.termination import FetchedDrafter
from modelserve_tools.fetch import OPTIONAL_PAUSES_S, fetch_drafter, main

URI, COMMIT = "hf://google/gemma-4-E2B-it-assistant", "a1" * 20


@pytest.fixture
def drafts(hub: Hub) -> Hub:  # noqa: F811
    real = hub.model_info

    def at_commit(repository: str, *, revision: str, files_metadata: bool = False) -> Any:
        found = real(repository, revision=revision, files_metadata=True)
        return SimpleNamespace(sha=COMMIT, siblings=found.siblings)

    hub.model_info = at_commit  # type: ignore[method-assign]
    return hub


def _fetch(tmp_path: Path) -> tuple[FetchedDrafter, list[float]]:
    """What is told, and the seconds waited on the way."""
    pauses: list[float] = []
    return fetch_drafter(URI, "main", tmp_path / "d", recorded=None, pause=pauses.append), pauses


def test_it_is_downloaded_at_the_commit_that_it_tells(drafts: Hub, tmp_path: Path) -> None:
    told: list[FetchedDrafter] = []
    line = ["--uri", URI, "--dest", str(tmp_path / "d"), "--optional"]
    assert main(line, tell_drafter=told.append) == 0
    assert told == [FetchedDrafter(commit=COMMIT)]
    assert drafts.downloads == [(COMMIT, EVERYTHING)]
    (tmp_path / "recorded").write_text("b2" * 20)
    assert main([*line, "--recorded", str(tmp_path / "recorded")], tell_drafter=told.append) == 0
    assert told[1] == FetchedDrafter(commit="b2" * 20), "what the operator has recorded"


def test_what_is_there_needs_no_hub(drafts: Hub, tmp_path: Path) -> None:
    _fetch(tmp_path)
    drafts.fault = ConnectionError("unreachable")
    assert _fetch(tmp_path) == (FetchedDrafter(commit=COMMIT), [])


def test_what_another_try_cannot_cure_is_told_at_once(drafts: Hub, tmp_path: Path) -> None:
    drafts.fault = errors.RepositoryNotFoundError("no", response=response(404))
    told, pauses = _fetch(tmp_path)
    assert "does not exist on the Hub" in str(told.problem)
    assert (told.commit, pauses) == (None, [])
    line = ["--uri", URI, "--dest", str(tmp_path / "d"), "--optional"]
    assert main(line, tell_drafter=lambda _: None) == 0, "the model does not wait for it"


def test_an_unreachable_hub_is_asked_again_and_then_told(drafts: Hub, tmp_path: Path) -> None:
    drafts.fault = ConnectionError("unreachable " * 1000)
    told, pauses = _fetch(tmp_path)
    assert "unreachable" in str(told.problem)
    assert pauses == list(OPTIONAL_PAUSES_S)


def test_what_is_told_fits_a_termination_message(tmp_path: Path) -> None:
    from modelserve.termination import MESSAGE_LIMIT_BYTES, write_fetched_drafter

    log = tmp_path / "log"
    log.write_text("")
    write_fetched_drafter(FetchedDrafter(problem="\u00e9\n" * 4000), str(log))
    assert len(log.read_bytes()) <= MESSAGE_LIMIT_BYTES
    assert FetchedDrafter.model_validate_json(log.read_text()).problem
