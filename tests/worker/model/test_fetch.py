"""Downloads through a Hub that is a stand-in: what is asked for, what is refused, what is done twice."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors

from modelserve.errors import InvalidInput
from modelserve.termination import TERMINAL_EXIT_CODE
from modelserve_tools import fetch as module
from modelserve_tools.fetch import DownloadError, fetch, main

URI = "hf://google/gemma-4-E2B-it"


@dataclass
class Hub:
    """The two calls of HfApi that a download makes."""

    files: dict[str, int] = field(
        default_factory=lambda: {
            "config.json": 10,
            "tokenizer.json": 20,
            "chat_template.jinja": 5,
            "model-00001-of-00002.safetensors": 100,
            "model-00002-of-00002.safetensors": 50,
            "model.gguf": 999,
            "original/consolidated.safetensors": 999,
            ".gitattributes": 1,
        }
    )
    fault: Exception | None = None
    lost: frozenset[str] = frozenset()
    tokens: list[Any] = field(default_factory=list)
    downloads: list[tuple[str, list[str]]] = field(default_factory=list)

    def __call__(self, *, endpoint: str | None, token: Any) -> Hub:
        assert endpoint is None, "the client's own variable says where"
        self.tokens.append(token)
        return self

    def model_info(self, repository: str, *, revision: str, files_metadata: bool = False) -> Any:
        if self.fault is not None:
            raise self.fault
        known = self.files.items()
        siblings = [SimpleNamespace(rfilename=name, size=size if files_metadata else None) for name, size in known]
        return SimpleNamespace(sha="c0ffee", siblings=siblings)

    def snapshot_download(self, repository: str, *, revision: str, local_dir: Path, allow_patterns: list[str]) -> str:
        self.downloads.append((revision, sorted(allow_patterns)))
        for name in allow_patterns:
            (local_dir / name).parent.mkdir(exist_ok=True)
            (local_dir / name).write_bytes(b"x" * (self.files[name] - (name in self.lost)))
        return str(local_dir)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    stand_in = Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", stand_in)
    monkeypatch.setattr(module, "fetch_headers", lambda *asked: None)  # test_fetch_for_inspection.py
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return stand_in


METADATA = ["chat_template.jinja", "config.json", "tokenizer.json"]
WEIGHTS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
EVERYTHING = sorted(METADATA + WEIGHTS)


def test_weights_and_metadata_of_the_top_folder_are_downloaded_once(hub: Hub, tmp_path: Path) -> None:
    fetch(URI, "main", tmp_path / "model")
    fetch(URI, "main", tmp_path / "model")
    assert hub.downloads == [("c0ffee", EVERYTHING)]
    assert hub.tokens == [False]


def test_metadata_only_leaves_the_weights_and_does_not_pass_for_complete(hub: Hub, tmp_path: Path) -> None:
    fetch(URI, "main", tmp_path, metadata_only=True)
    assert hub.downloads == [("c0ffee", METADATA)]
    fetch(URI, "main", tmp_path)
    fetch(URI, "main", tmp_path, metadata_only=True)
    assert hub.downloads[1:] == [("c0ffee", EVERYTHING)]


def test_the_token_comes_from_the_environment(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    fetch(URI, "main", tmp_path)
    assert hub.tokens == ["secret"]


def test_a_short_file_is_not_marked_complete(hub: Hub, tmp_path: Path) -> None:
    hub.lost = frozenset({WEIGHTS[1]})
    with pytest.raises(DownloadError, match=r"00002-of-00002.* has 49 bytes, the Hub says 50"):
        fetch(URI, "main", tmp_path)
    hub.lost = frozenset()
    fetch(URI, "main", tmp_path)
    assert len(hub.downloads) == 2


def test_a_failure_names_the_address_and_the_error_at_its_root(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example")
    outer = errors.LocalEntryNotFoundError("cannot find the file in the cache")
    outer.__cause__ = httpx.ConnectError("certificate verify failed: self-signed certificate")
    hub.fault = outer
    with pytest.raises(DownloadError) as raised:
        fetch(URI, "main", tmp_path)
    assert "https://mirror.example" in str(raised.value)
    assert "caused by ConnectError: certificate verify failed: self-signed certificate" in str(raised.value)


def test_a_marker_cut_short_means_incomplete(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / module.DOWNLOAD_MARKER).write_text('{"uri": "hf:')
    fetch(URI, "main", tmp_path)
    assert len(hub.downloads) == 1


def test_a_directory_keeps_one_model(hub: Hub, tmp_path: Path) -> None:
    fetch(URI, "main", tmp_path)
    with pytest.raises(InvalidInput, match=r"holds hf://google/gemma-4-E2B-it at main, not .* at v2.*storage\.subPath"):
        fetch(URI, "v2", tmp_path)


@pytest.mark.parametrize(
    "uri",
    [
        "hf://../x",
        "google/gemma",
        "hf://google",
        "hf://a/b/c",
        "hf://a b/c",
        "s3://a/b",
        "hf://../x/y",
        "hf://a/b/../c.gguf",
    ],
)
def test_malformed_addresses_are_refused(uri: str, hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="hf://OWNER/NAME"):
        fetch(uri, "main", tmp_path)


def test_a_repository_without_weights_is_refused(hub: Hub, tmp_path: Path) -> None:
    hub.files = {"config.json": 1, "mmproj-model.gguf": 5}
    with pytest.raises(InvalidInput, match=r"no \*\.safetensors and no \*\.gguf"):
        fetch(URI, "main", tmp_path)


PARTS = ["BF16/m-BF16-00001-of-00002.gguf", "BF16/m-BF16-00002-of-00002.gguf"]
GGUF = {"config.json": 1, "m-Q4_0.gguf": 5, "m-Q8_0.gguf": 9, "mmproj-BF16.gguf": 7, **dict.fromkeys(PARTS, 3)}


@pytest.mark.parametrize(("named", "files"), [("m-Q4_0.gguf", ["m-Q4_0.gguf"]), (PARTS[0], PARTS), (PARTS[1], PARTS)])
def test_the_gguf_file_that_is_named_is_downloaded_with_its_parts(
    named: str, files: list[str], hub: Hub, tmp_path: Path
) -> None:
    hub.files = dict(GGUF)
    fetch(f"hf://somebody/some-GGUF/{named}", "main", tmp_path)
    assert hub.downloads == [("c0ffee", files)]


def test_the_only_gguf_model_of_a_repository_needs_no_name(hub: Hub, tmp_path: Path) -> None:
    hub.files = {"config.json": 1, "m-q4_0.gguf": 5, "mmproj.gguf": 7}
    fetch("hf://google/gemma-4-12B-it-qat-q4_0-gguf", "main", tmp_path)
    assert hub.downloads == [("c0ffee", ["m-q4_0.gguf"])]


@pytest.mark.parametrize(
    ("uri", "files", "message"),
    [
        ("hf://o/n", GGUF, r"3 GGUF models: name one, as hf://OWNER/NAME/FILE\.gguf \(.*m-Q4_0\.gguf"),
        ("hf://o/n/m-Q5_0.gguf", GGUF, r"holds no model 'm-Q5_0\.gguf'; it has .*m-Q8_0\.gguf"),
        ("hf://o/n/mmproj-BF16.gguf", GGUF, r"holds no model 'mmproj-BF16\.gguf'"),
        ("hf://o/n", {PARTS[0]: 3}, r"of 2 parts of a GGUF model only .*fetch all of them"),
    ],
)
def test_gguf_files_that_are_not_there_are_told_apart(
    uri: str, files: dict[str, int], message: str, hub: Hub, tmp_path: Path
) -> None:
    hub.files = dict(files)
    with pytest.raises(InvalidInput, match=message):
        fetch(uri, "main", tmp_path)
    assert hub.downloads == []


def response(status: int) -> httpx.Response:
    return httpx.Response(status, request=httpx.Request("GET", "https://hub.test"))


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        (errors.GatedRepoError("no", response=response(403)), TERMINAL_EXIT_CODE, "no token was given"),
        (errors.RepositoryNotFoundError("no", response=response(404)), TERMINAL_EXIT_CODE, "does not exist"),
        (errors.RevisionNotFoundError("no", response=response(404)), TERMINAL_EXIT_CODE, "no revision 'main'"),
        (errors.HfHubHTTPError("down", response=response(503)), 1, "the next try continues it"),
        (errors.OfflineModeIsEnabled("offline"), 1, "OfflineModeIsEnabled"),
        (ConnectionError("unreachable"), 1, "unreachable"),
        (OSError(28, "No space left on device"), 1, "No space left"),
    ],
)
def test_faults_of_the_hub(
    fault: Exception, code: int, said: str, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.fault = fault
    assert main(["--uri", URI, "--dest", str(tmp_path)]) == code
    assert said in capsys.readouterr().err
    assert not (tmp_path / module.DOWNLOAD_MARKER).exists()


def test_a_directory_that_cannot_be_written(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match="cannot be written"):
        fetch(URI, "main", tmp_path / "file" / "model")


def test_two_pods_download_once(hub: Hub, tmp_path: Path) -> None:
    """The second waits for the first one's lock, then finds the work done."""
    with module.locked(tmp_path / module.DOWNLOAD_LOCK):
        waiting = threading.Thread(target=fetch, args=(URI, "main", tmp_path))
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
        assert hub.downloads == []
    waiting.join(10)
    assert not waiting.is_alive()
    assert len(hub.downloads) == 1


def test_command_line(hub: Hub, tmp_path: Path) -> None:
    assert main(["--uri", URI, "--revision", "v1", "--dest", str(tmp_path), "--metadata-only"]) == 0
    assert hub.downloads == [("c0ffee", METADATA)]


COMMIT = "a1" * 20


def test_a_branch_is_resolved_to_what_is_recorded_then_to_what_is_there_then_by_the_hub(
    hub: Hub, tmp_path: Path
) -> None:
    recorded, dest = tmp_path / "commit", tmp_path / "model"
    assert module.resolve(URI, "main", dest, recorded=recorded) == "c0ffee", "the file is not there yet"
    fetch(URI, "main", dest)
    hub.fault = ConnectionError("unreachable")
    assert module.resolve(URI, "main", dest, recorded=recorded) == "c0ffee", "as it was downloaded"
    recorded.write_text(f"{COMMIT}\n")
    assert module.resolve(URI, "main", dest, recorded=recorded) == COMMIT
    with pytest.raises(DownloadError, match="unreachable"):
        module.resolve(URI, "v2", dest)


def test_the_download_takes_the_commit_that_was_resolved(hub: Hub, tmp_path: Path) -> None:
    asked = []
    real = hub.model_info

    def moved(repository: str, *, revision: str, files_metadata: bool) -> Any:
        asked.append(revision)
        return SimpleNamespace(sha=revision, siblings=real(repository, revision=revision, files_metadata=True).siblings)

    hub.model_info = moved  # type: ignore[method-assign]
    fetch(URI, "main", tmp_path, commit=COMMIT)
    fetch(URI, "main", tmp_path, commit=COMMIT)
    assert (asked, hub.downloads) == ([COMMIT], [(COMMIT, EVERYTHING)])
    fetch(URI, "main", tmp_path, commit="b2" * 20)
    assert hub.downloads[1:] == [("b2" * 20, EVERYTHING)], "what lies there is of another commit"


def test_a_marker_of_an_earlier_release_is_read_and_one_of_a_later_too(hub: Hub, tmp_path: Path) -> None:
    known = {"uri": URI, "revision": "main", "metadata_only": False}
    (tmp_path / module.DOWNLOAD_MARKER).write_text(json.dumps({**known, "later": 1}))
    fetch(URI, "main", tmp_path)
    assert hub.downloads == []


def test_a_commit_that_is_gone_is_named(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = []
    monkeypatch.setattr(module, "write_termination", told.append)
    hub.fault = errors.RevisionNotFoundError("no", response=response(404))
    (tmp_path / "commit").write_text(COMMIT)
    line = ["--uri", URI, "--dest", str(tmp_path / "m"), "--commit-file", str(tmp_path / "commit")]
    assert main(line) == TERMINAL_EXIT_CODE
    assert told[0].reason == "ModelCommitGone"
    assert f"no longer has commit {COMMIT}" in capsys.readouterr().err


def test_resolving_tells_the_commit_and_leaves_it_for_the_download(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []
    monkeypatch.setattr(module, "write_resolved", told.append)
    line = ["--uri", URI, "--dest", str(tmp_path / "m"), "--commit-file", str(tmp_path / "commit")]
    assert main([*line, "--resolve", "--recorded", str(tmp_path / "none")]) == 0
    assert told == ["c0ffee"]
    assert main(line) == 0
    assert hub.downloads == [("c0ffee", EVERYTHING)]
