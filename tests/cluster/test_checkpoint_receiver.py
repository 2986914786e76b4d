"""The program that receives a checkpoint in a pod, run as the pod runs it: from its text, by a bare interpreter."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from localcluster import checkpoint_receiver
from localcluster.checkpoint_receiver import content_hash
from localcluster.checkpoint_upload import pack

TEXT = Path(checkpoint_receiver.__file__).read_text()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "here" / "model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 1000)
    return folder


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """An older version of the checkpoint, and what an interrupted transfer left."""
    folder = tmp_path / "there" / "model"
    for left in (folder, folder.with_name("model.partial")):
        left.mkdir(parents=True)
        (left / "old.json").write_text("old")
    return folder


def _receive(*arguments: str, stream: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-I", "-c", TEXT, *arguments]
    return subprocess.run(command, input=stream, capture_output=True, check=False)


def _stream(folder: Path) -> bytes:
    buffer = io.BytesIO()
    pack(folder, buffer)
    return buffer.getvalue()


def test_a_checkpoint_replaces_an_older_one(checkpoint: Path, there: Path) -> None:
    done = _receive(str(there), content_hash(checkpoint), stream=_stream(checkpoint))
    assert (done.returncode, done.stderr) == (0, b"")
    assert {path.name: path.read_bytes() for path in there.iterdir()} == {
        path.name: path.read_bytes() for path in checkpoint.iterdir()
    }
    assert [path.name for path in there.parent.iterdir()] == ["model"]
    assert _receive(str(there)).stdout.decode().strip() == content_hash(checkpoint)


def test_what_a_link_leads_to_arrives_as_a_file(checkpoint: Path, there: Path) -> None:
    (checkpoint.parent / "shared.json").write_text("shared")
    (checkpoint / "tokenizer.json").symlink_to("../shared.json")
    done = _receive(str(there), content_hash(checkpoint), stream=_stream(checkpoint))
    assert (done.returncode, done.stderr) == (0, b"")
    arrived = there / "tokenizer.json"
    assert (arrived.is_symlink(), arrived.read_text()) == (False, "shared")


def test_folders_within_arrive_as_folders(checkpoint: Path, there: Path) -> None:
    (checkpoint / "polite").mkdir()
    (checkpoint / "polite" / "config.json").write_text("polite")
    moved = content_hash(checkpoint)
    done = _receive(str(there), moved, stream=_stream(checkpoint))
    assert (done.returncode, done.stderr) == (0, b"")
    assert (there / "polite" / "config.json").read_text() == "polite"
    (checkpoint / "polite").rename(checkpoint / "rude")
    assert content_hash(checkpoint) != moved


def test_names_and_contents_make_the_hash(checkpoint: Path) -> None:
    first, absent = content_hash(checkpoint), content_hash(checkpoint / "absent")
    (checkpoint / "config.json").write_text("{ }")
    changed = content_hash(checkpoint)
    (checkpoint / "config.json").write_text("{}")
    (checkpoint / "config.json").rename(checkpoint / "other.json")
    assert len({first, absent, changed, content_hash(checkpoint)}) == 4


def test_a_stream_that_is_cut_or_changed_leaves_the_old_one(checkpoint: Path, there: Path) -> None:
    whole, expected = _stream(checkpoint), content_hash(checkpoint)
    changed = whole.replace(b"{}", b"[]", 1)
    for stream in (whole[: len(whole) // 2], changed, b""):
        assert _receive(str(there), expected, stream=stream).returncode != 0
        assert (there / "old.json").read_text() == "old"
    assert "send it again" in _receive(str(there), expected, stream=changed).stderr.decode()
