"""A cache of models, filled by a stand-in for the Hub: what is fetched, how often, and what is done when it breaks."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from localcluster.hub import Hub, hub
from modelserve.caches.reports import PROGRESS_PATH, FilledCache, UnfilledCache, read_end, write_end
from modelserve.termination import TERMINAL_EXIT_CODE
from modelserve_tools.fetch import fetch
from modelserve_tools.hub_client import AccessDeniedError, DownloadError
from modelserve_tools.model_cache import filling, transfer
from modelserve_tools.model_cache.command import main
from modelserve_tools.model_cache.filling import collect, fill, held
from modelserve_tools.model_cache.progress import Progress, told_on
from modelserve_tools.model_cache.transfer import CacheFullError, HashMismatchError

URI, FIRST, SECOND = "hf://team/model", "1" * 40, "2" * 40
WEIGHTS = "model.safetensors"
SIZE = 4 << 20


def _commit(folder: Path, seed: int, *, weight_bytes: int = SIZE) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"seed": seed}))
    (folder / WEIGHTS).write_bytes(bytes((seed + place) % 251 for place in range(4096)) * (weight_bytes // 4096))
    (folder / "README.md").write_text("not fetched")
    return folder


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    with hub() as found:
        found.commits = {FIRST: _commit(tmp_path / "first", 1), SECOND: _commit(tmp_path / "second", 2)}
        found.branches = {"main": FIRST}
        _is_at(found.url, monkeypatch)
        yield found


def _is_at(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the process had begun with the variable, which the Hub's client reads once."""
    monkeypatch.setenv("HF_ENDPOINT", url)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
    template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)


def _size(served: Hub, commit: str = FIRST) -> int:
    return sum((served.commits[commit] / name).stat().st_size for name in ("config.json", WEIGHTS))


def _same(root: Path, served: Hub, commit: str) -> bool:
    return all(
        (root / commit / name).read_bytes() == (served.commits[commit] / name).read_bytes()
        for name in ("config.json", WEIGHTS)
    )


def test_each_file_is_fetched_once_and_the_rest_of_the_repository_is_left(served: Hub, tmp_path: Path) -> None:
    root = tmp_path / "cache"
    done = fill(URI, "main", root)
    assert (done.commit, done.bytes, done.fetched_bytes) == (FIRST, _size(served), _size(served))
    assert _same(root, served, FIRST)
    assert sorted(path.name for path in (root / FIRST).iterdir()) == [
        ".modelserve-fetched.json", "config.json", WEIGHTS,
    ]  # fmt: skip
    again = fill(URI, "main", root)
    assert (again.fetched_bytes, served.bytes_sent) == (0, _size(served))


def test_a_complete_commit_is_what_a_download_of_any_release_leaves(served: Hub, tmp_path: Path) -> None:
    """The marker is that of `fetch`, which takes the folder for its own and asks nobody."""
    fill(URI, "main", tmp_path)
    served.sent.clear()
    fetch(URI, "main", tmp_path / FIRST, commit=FIRST)
    assert served.sent == []


def test_one_that_is_killed_in_the_middle_goes_on_from_there(served: Hub, tmp_path: Path) -> None:
    """A process that ends at once, with half of the weights on the disk."""
    running: list[subprocess.Popen[bytes]] = []

    def kill(name: str, sent: int) -> None:
        if name == WEIGHTS and sent >= SIZE // 2 and running:
            partial = tmp_path / FIRST / transfer.PARTIAL_FOLDER / WEIGHTS
            while partial.stat().st_size < SIZE // 4:  # what left the Hub may not have arrived
                pass
            running.pop().send_signal(signal.SIGKILL)
            served.between = None
            raise ConnectionAbortedError

    command = [
        sys.executable,
        "-c",
        "import sys; from modelserve_tools.model_cache.command import main; sys.exit(main())",
    ]
    arguments = ["fill", "--uri", URI, "--root", str(tmp_path), "--port", "0"]
    running.append(subprocess.Popen([*command, *arguments], env={**os.environ, "HF_ENDPOINT": served.url}))
    process, served.between = running[0], kill
    assert process.wait(60) == -signal.SIGKILL
    partial = tmp_path / FIRST / transfer.PARTIAL_FOLDER / WEIGHTS
    there = partial.stat().st_size
    assert SIZE // 4 <= there < SIZE
    assert held(tmp_path) == (), "what is not complete is read by nobody"
    before = len(served.sent)
    done = fill(URI, "main", tmp_path)
    rest = [each for each in served.sent[before:] if each.name == WEIGHTS]
    assert [each.bytes for each in rest] == [SIZE - there]
    assert done.fetched_bytes <= _size(served) - there
    assert _same(tmp_path, served, FIRST)


def test_a_connection_that_breaks_off_is_taken_up_where_it_broke(served: Hub, tmp_path: Path) -> None:
    broken = []

    def break_off(name: str, sent: int) -> None:
        if name == WEIGHTS and sent >= SIZE // 4 and len(broken) < 3:
            broken.append(sent)
            raise ConnectionAbortedError

    served.between = break_off
    done = fill(URI, "main", tmp_path, fetch_file=_without_pauses)
    assert (len(broken), done.fetched_bytes) == (3, _size(served))
    assert _same(tmp_path, served, FIRST)


def test_one_that_brings_nothing_more_is_another_tries_to_go_on(served: Hub, tmp_path: Path) -> None:
    def break_off(name: str, sent: int) -> None:
        if name == WEIGHTS:
            raise ConnectionAbortedError

    served.between, served.block_bytes = break_off, 1
    with pytest.raises(DownloadError, match=rf"\d+ of {SIZE} bytes arrived"):
        fill(URI, "main", tmp_path, fetch_file=_without_pauses)


def _without_pauses(*arguments: Any, **named: Any) -> None:
    transfer.bring(*arguments, pause=lambda seconds: None, **named)


def test_a_hub_without_ranges_is_read_from_the_beginning_and_written_from_where_it_stopped(
    served: Hub, tmp_path: Path
) -> None:
    served.ranges = False
    partial = tmp_path / FIRST / transfer.PARTIAL_FOLDER / WEIGHTS
    partial.parent.mkdir(parents=True)
    partial.write_bytes((served.commits[FIRST] / WEIGHTS).read_bytes()[:12345])
    fill(URI, "main", tmp_path)
    assert _same(tmp_path, served, FIRST)


def test_bytes_that_were_changed_on_the_way_are_fetched_anew(served: Hub, tmp_path: Path) -> None:
    served.damaged = {WEIGHTS: 1, "config.json": 1}
    fill(URI, "main", tmp_path)
    assert _same(tmp_path, served, FIRST)
    assert served.bytes_sent == 2 * _size(served)


def test_a_half_that_was_damaged_on_the_disk_is_found_by_the_hash_of_the_whole(served: Hub, tmp_path: Path) -> None:
    partial = tmp_path / FIRST / transfer.PARTIAL_FOLDER / WEIGHTS
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"x" * (SIZE // 2))
    fill(URI, "main", tmp_path)
    assert _same(tmp_path, served, FIRST)
    assert [each.bytes for each in served.sent if each.name == WEIGHTS] == [SIZE // 2, SIZE]


def test_a_partial_file_that_is_too_long_is_begun_anew(served: Hub, tmp_path: Path) -> None:
    """As of another commit, whose file of the name was larger: no byte of it is kept, and none is fetched twice."""
    partial = tmp_path / FIRST / transfer.PARTIAL_FOLDER / WEIGHTS
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"x" * (SIZE + 1))
    fill(URI, "main", tmp_path)
    assert _same(tmp_path, served, FIRST)
    assert [each.bytes for each in served.sent if each.name == WEIGHTS] == [SIZE]


def test_bytes_that_are_wrong_twice_are_told_and_nobody_gets_them(served: Hub, tmp_path: Path) -> None:
    served.damaged = {WEIGHTS: 99}
    with pytest.raises(HashMismatchError, match=f"{WEIGHTS}: {SIZE} bytes arrived twice"):
        fill(URI, "main", tmp_path)
    assert not (tmp_path / FIRST / WEIGHTS).exists()
    assert held(tmp_path) == ()
    assert [each.name for each in served.sent].count(WEIGHTS) == 2
    served.damaged = {}
    fill(URI, "main", tmp_path)
    assert _same(tmp_path, served, FIRST)


def test_a_damaged_file_of_a_complete_cache_is_found_when_asked_for(served: Hub, tmp_path: Path) -> None:
    fill(URI, "main", tmp_path)
    path = tmp_path / FIRST / WEIGHTS
    with path.open("r+b") as reader, path.open("r+b") as damage:
        damage.seek(SIZE // 2)
        damage.write(b"\xff")
        damage.flush()
        assert fill(URI, "main", tmp_path).fetched_bytes == 0, "sizes alone are compared unasked"
        done = fill(URI, "main", tmp_path, verify=True)
        assert (done.repaired, done.fetched_bytes) == (1, SIZE)
        assert len(reader.read()) == SIZE, "who has it open reads on: the name is another file's now"
    assert _same(tmp_path, served, FIRST)


def test_a_branch_that_moved_is_fetched_beside_what_is_read(served: Hub, tmp_path: Path) -> None:
    fill(URI, "main", tmp_path)
    served.branches["main"] = SECOND
    done = fill(URI, "main", tmp_path, keep=[FIRST])
    assert (done.commit, done.held) == (SECOND, (FIRST, SECOND))
    assert _same(tmp_path, served, FIRST)
    assert _same(tmp_path, served, SECOND)
    done = fill(URI, "main", tmp_path)
    assert (done.held, done.fetched_bytes) == ((SECOND,), 0), "nobody keeps the old one any more"
    assert not (tmp_path / FIRST).exists()


def test_a_model_that_has_no_room_is_refused_before_a_byte_is_fetched(served: Hub, tmp_path: Path, monkeypatch) -> None:
    room = filling.shutil.disk_usage(tmp_path)._replace(free=filling.ROOM_LEFT_BYTES + SIZE)
    monkeypatch.setattr(filling.shutil, "disk_usage", lambda path: room)
    with pytest.raises(CacheFullError, match=f"{_size(served)} are to be fetched"):
        fill(URI, "main", tmp_path)
    assert served.sent == []
    partial = tmp_path / FIRST / transfer.PARTIAL_FOLDER / WEIGHTS
    partial.parent.mkdir(parents=True)
    partial.write_bytes((served.commits[FIRST] / WEIGHTS).read_bytes()[:4096])
    fill(URI, "main", tmp_path)
    assert _same(tmp_path, served, FIRST), "what is there already needs no room"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_keeps_what_was_written(served: Hub, tmp_path: Path, monkeypatch, code: int) -> None:
    write, limit = os.write, SIZE // 2

    def until_full(target: int, block: Any) -> int:
        if os.fstat(target).st_size >= limit:
            raise OSError(code, os.strerror(code))
        return write(target, block[:100_000])  # a disk may take a part

    monkeypatch.setattr(transfer.os, "write", until_full)
    with pytest.raises(CacheFullError, match="is full"):
        fill(URI, "main", tmp_path)
    monkeypatch.setattr(transfer.os, "write", write)
    there = (tmp_path / FIRST / transfer.PARTIAL_FOLDER / WEIGHTS).stat().st_size
    assert 0 < there < SIZE
    assert fill(URI, "main", tmp_path).fetched_bytes == SIZE - there
    assert _same(tmp_path, served, FIRST)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system that is too small")
def test_a_real_disk_that_is_full(served: Hub, tmp_path: Path, monkeypatch) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE // 2}", "none", str(small)], check=False)
    if mounted.returncode:
        pytest.skip("nothing can be mounted here")
    try:
        with pytest.raises(CacheFullError, match="bytes free"):
            fill(URI, "main", small)
        monkeypatch.setattr(filling, "_check_room", lambda *of: None)
        with pytest.raises(CacheFullError, match="no space left on device"):
            fill(URI, "main", small)
    finally:
        subprocess.run(["umount", str(small)], check=True)


@pytest.mark.parametrize(("given", "gated"), [(None, False), ("hf_wrong", False), ("hf_right", True)])
def test_a_token_that_is_missing_wrong_or_without_access(
    served: Hub, tmp_path: Path, monkeypatch, given: str | None, gated: bool
) -> None:
    served.token, served.gated = "hf_right", gated
    if given is not None:
        monkeypatch.setenv("HF_TOKEN", given)
    with pytest.raises(AccessDeniedError, match="token"):
        fill(URI, "main", tmp_path)
    served.gated = False
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    fill(URI, "main", tmp_path)
    assert _same(tmp_path, served, FIRST)


def test_what_the_job_of_a_cache_tells(served: Hub, tmp_path: Path, monkeypatch) -> None:
    told: list[FilledCache | UnfilledCache] = []

    def run(*arguments: str) -> int:
        where = ["--root", str(tmp_path / "c"), "--port", "0"]
        return main(["fill", "--uri", URI, *arguments, *where], tell=told.append)

    assert run("--revision", "gone") == TERMINAL_EXIT_CODE
    assert isinstance(told[-1], UnfilledCache)
    assert (told[-1].reason, "no revision 'gone'" in told[-1].message) == ("ModelNotFound", True)
    served.damaged = {WEIGHTS: 99}
    assert run() == TERMINAL_EXIT_CODE
    assert isinstance(told[-1], UnfilledCache)
    assert told[-1].reason == "HashMismatch"
    served.damaged, served.token = {}, "hf_right"
    assert run() == TERMINAL_EXIT_CODE
    assert isinstance(told[-1], UnfilledCache)
    assert told[-1].reason == "AccessDenied"
    served.token = None
    assert run() == 0
    assert told[-1] == FilledCache(commit=FIRST, bytes=_size(served), fetched_bytes=SIZE, held=(FIRST,))
    _is_at("http://127.0.0.1:9", monkeypatch)
    before = len(told)
    assert (run(), len(told)) == (1, before), "a network that is away is another try's"
    for _ in range(2):
        assert main(["free", "--root", str(tmp_path / "c")]) == 0
        assert not (tmp_path / "c").exists()


def test_progress_is_told_while_it_is_made() -> None:
    now = [0.0]
    progress = Progress(clock=lambda: now[0])
    with told_on(0, progress) as port:
        ask = f"http://127.0.0.1:{port}{PROGRESS_PATH}"
        assert httpx.get(ask).json()["secondsLeft"] is None
        progress.expect(FIRST, 10_000)
        progress.found(4_000)
        for _ in range(3):
            now[0] += 1.0
            progress.fetched(1_000)
        assert httpx.get(ask).json() == {
            "commit": FIRST, "bytes": 7_000, "totalBytes": 10_000, "bytesPerSecond": 1_000, "secondsLeft": 3,
        }  # fmt: skip
        assert httpx.get(f"http://127.0.0.1:{port}/etc/passwd").status_code == 404
    for _ in range(40):
        now[0] += 1.0
        progress.fetched(10)
    assert progress.told().bytes_per_second == 10, "what was fast a minute ago says nothing of now"


def test_what_is_collected_is_no_longer_complete_from_the_first_moment(
    served: Hub, tmp_path: Path, monkeypatch
) -> None:
    fill(URI, "main", tmp_path)
    monkeypatch.setattr(filling.shutil, "rmtree", lambda path, **_: None)
    collect(tmp_path, set())
    assert held(tmp_path) == ()


def test_the_end_is_told_within_what_a_kubelet_keeps_and_a_log_is_no_end(tmp_path: Path) -> None:
    path = tmp_path / "message"
    write_end(UnfilledCache(reason="CacheFull", message="ü" * 9000), str(path))
    assert not path.exists(), "outside a container there is nobody to read it"
    path.touch()
    write_end(UnfilledCache(reason="CacheFull", message="ü" * 9000), str(path))
    assert len(path.read_bytes()) <= 4096
    found = read_end(path.read_text())
    assert isinstance(found, UnfilledCache)
    assert found.reason == "CacheFull"
    assert read_end("Traceback (most recent call last):") is None
