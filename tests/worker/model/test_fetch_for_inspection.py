"""An inspection of a model on the Hub downloads headers of weight files, not the weights."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf_files import write_gguf

from localcluster.deployment import CHECKPOINT
from localcluster.hub import Hub, hub
from modelserve.errors import InvalidInput
from modelserve.inspection import inspect_checkpoint
from modelserve_tools.fetch import DownloadError, fetch

TRAINED = Path(__file__).parents[2] / "models" / "gemma4-tiny-keqv"
URI, COMMIT = "hf://somebody/gemma-4-mine", "a1" * 20


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Hub]:
    """A Hub with a fine-tune that nobody has published facts of."""
    shutil.copytree(CHECKPOINT, tmp_path / "there")
    with hub() as found:
        found.commits[COMMIT] = tmp_path / "there"
        found.branches["main"] = COMMIT
        yield found


def _weights(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


@pytest.mark.parametrize("ranges", [True, False])
def test_the_facts_are_those_of_the_whole_checkpoint(served: Hub, tmp_path: Path, ranges: bool) -> None:
    served.ranges = ranges
    fetch(URI, "main", tmp_path / "here", metadata_only=True, endpoint=served.url)
    assert inspect_checkpoint(tmp_path / "here") == inspect_checkpoint(CHECKPOINT)
    for path in _weights(tmp_path / "here"):
        assert path.stat().st_size == (CHECKPOINT / path.name).stat().st_size
        if ranges:
            headers = sum(each.bytes for each in served.sent if each.name == path.name)
            assert headers < path.stat().st_size / 4, "the weights stay on the Hub"
    assert served.commits_sent() == {COMMIT}, "all of one commit, though the branch may move"
    assert not ranges or served.commits_sent(weights=True) == set()


@pytest.mark.parametrize("ranges", [True, False])
def test_the_facts_of_a_gguf_file_are_those_of_the_whole(served: Hub, tmp_path: Path, ranges: bool) -> None:
    """Its header, and of its tensors the one that the geometry needs."""
    there = tmp_path / "gguf"
    there.mkdir()
    write_gguf(TRAINED, "Q8_0", there / "m-Q8_0.gguf")
    served.commits[COMMIT], served.ranges = there, ranges
    fetch(f"{URI}/m-Q8_0.gguf", "main", tmp_path / "here", metadata_only=True, endpoint=served.url)
    assert inspect_checkpoint(tmp_path / "here") == inspect_checkpoint(there)
    held, whole = (folder / "m-Q8_0.gguf" for folder in (tmp_path / "here", there))
    assert held.stat().st_size == whole.stat().st_size
    assert held.read_bytes() != whole.read_bytes(), "the weights stay on the Hub"
    fetch(f"{URI}/m-Q8_0.gguf", "main", tmp_path / "here", endpoint=served.url)
    assert held.read_bytes() == whole.read_bytes()


def test_a_gguf_header_that_lies_is_told_by_its_file(served: Hub, tmp_path: Path) -> None:
    there = tmp_path / "gguf"
    there.mkdir()
    (there / "m.gguf").write_bytes(b"GGUF" + (3).to_bytes(4, "little") + (1 << 60).to_bytes(8, "little") * 2)
    served.commits[COMMIT] = there
    with pytest.raises(InvalidInput, match=r"m\.gguf states 1152921504606846976 tensors"):
        fetch(URI, "main", tmp_path / "here", metadata_only=True, endpoint=served.url)


def test_the_weights_replace_what_the_inspection_left(served: Hub, tmp_path: Path) -> None:
    fetch(URI, "main", tmp_path / "here", metadata_only=True, endpoint=served.url)
    fetch(URI, "main", tmp_path / "here", endpoint=served.url)
    (path,) = _weights(tmp_path / "here")
    assert path.read_bytes() == (CHECKPOINT / path.name).read_bytes()


def test_a_header_that_is_none_is_told_by_its_file(served: Hub, tmp_path: Path) -> None:
    (path,) = _weights(served.commits[COMMIT])
    path.write_bytes(b"\xff" * 4096)
    with pytest.raises(InvalidInput, match=rf"{path.name} .*not a safetensors file"):
        fetch(URI, "main", tmp_path / "here", metadata_only=True, endpoint=served.url)


def test_a_transfer_that_is_cut_short_is_tried_again(served: Hub, tmp_path: Path) -> None:
    (path,) = _weights(served.commits[COMMIT])
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises((DownloadError, InvalidInput), match=path.name):
        fetch(URI, "main", tmp_path / "here", metadata_only=True, endpoint=served.url)
