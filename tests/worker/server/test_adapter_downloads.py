"""Adapters from the Hub: two files and no other, by a process of their own, into a cache of bounded size."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from modelserve.errors import InvalidInput
from modelserve.termination import NO_ROOM_EXIT_CODE, TERMINAL_EXIT_CODE
from modelserve_tools import fetch as module
from modelserve_tools.fetch import NoRoomError, fetch_adapter, main
from modelserve_worker.server.adapters.desired import DesiredVersion
from modelserve_worker.server.adapters.downloads import HubDownload
from modelserve_worker.server.adapters.versions import AdapterFault

FILES = {
    "adapter_config.json": 10, "adapter_model.safetensors": 100, "adapter_model.bin": 100, "tokenizer.json": 50,
    "runs/best/adapter_config.json": 11, "runs/best/adapter_model.safetensors": 200, "old/adapter_model.bin": 7,
}  # fmt: skip


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Downloads from a stand-in for the Hub: (token, repository, revision, files)."""
    found: list[tuple[Any, ...]] = []

    class Hub:
        def __init__(self, *, endpoint: str | None, token: Any) -> None:
            self.token = token

        def model_info(self, repository: str, *, revision: str, files_metadata: bool) -> Any:
            assert files_metadata
            assert revision
            return SimpleNamespace(
                sha="c0ffee", siblings=[SimpleNamespace(rfilename=name, size=size) for name, size in FILES.items()]
            )

        def snapshot_download(self, repository: str, *, revision: str, local_dir: Path, allow_patterns: Any) -> None:
            found.append((self.token, repository, revision, sorted(allow_patterns)))
            for name in allow_patterns:
                (local_dir / name).parent.mkdir(parents=True, exist_ok=True)
                (local_dir / name).write_bytes(b"x" * FILES[name])

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(module, "write_termination", lambda *_: pytest.fail("the message is the worker's own"))
    return found


def test_two_files_are_downloaded_and_no_other(asked: list[Any], tmp_path: Path) -> None:
    fetch_adapter("hf://team/lora", "main", tmp_path / "a", most_bytes=110)
    fetch_adapter("hf://team/lora/runs/best", "v1", tmp_path / "b", most_bytes=1000)
    assert [each[1:] for each in asked] == [
        ("team/lora", "c0ffee", ["adapter_config.json", "adapter_model.safetensors"]),
        ("team/lora", "c0ffee", ["runs/best/adapter_config.json", "runs/best/adapter_model.safetensors"]),
    ]
    assert (tmp_path / "b/runs/best/adapter_model.safetensors").stat().st_size == 200


def test_what_is_not_taken_costs_no_transfer(asked: list[Any], tmp_path: Path) -> None:
    with pytest.raises(NoRoomError, match="has 110 bytes; there is room for 109"):
        fetch_adapter("hf://team/lora", "main", tmp_path, most_bytes=109)
    with pytest.raises(InvalidInput, match=r"adapter_model\.bin is not read: it may run code"):
        fetch_adapter("hf://team/lora/old", "main", tmp_path, most_bytes=1000)
    for uri in ("hf://team", "hf://team/lora/../other", "hf://team/lora//x", "s3://team/lora", "hf://team/lora/.git"):
        with pytest.raises(InvalidInput, match="is not of the form"):
            fetch_adapter(uri, "main", tmp_path, most_bytes=1000)
    assert asked == []
    words = ["--adapter", "--dest", str(tmp_path)]
    assert main([*words, "--uri", "hf://team/lora", "--most-bytes", "9"]) == NO_ROOM_EXIT_CODE
    assert main([*words, "--uri", "hf://team/lora/old"]) == TERMINAL_EXIT_CODE
    assert main([*words, "--uri", "hf://team/lora"]) == 0


DOWNLOAD = """
import os, pathlib, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
size = int(given["--uri"].rsplit("-", 1)[1])
pathlib.Path("asked").open("a").write(f"{given['--uri']} {os.environ.get('HF_TOKEN')} {given['--most-bytes']}\\n")
if size > int(given["--most-bytes"]):
    sys.exit(print("it is too large", file=sys.stderr) or 28)
if size == 13:
    sys.exit("the Hub has no such repository")
folder = pathlib.Path(given["--dest"])
folder.mkdir(parents=True, exist_ok=True)
(folder / "adapter_model.safetensors").write_bytes(bytes(size))
"""


@pytest.fixture
def download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubDownload:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "the model's own")
    return HubDownload(tmp_path / "cache", 1000, command=(sys.executable, "-c", DOWNLOAD))


def _version(size: int, token: str | None = None) -> DesiredVersion:
    return DesiredVersion(id="1", uri=f"hf://team/lora-{size}", token=token)


async def test_a_version_is_downloaded_once_for_each_token(download: HubDownload, tmp_path: Path) -> None:
    one = await download.obtain(_version(300))
    assert one == await download.obtain(_version(300))
    other = await download.obtain(_version(300, "secret"))
    assert other != one
    assert (one / "adapter_model.safetensors").stat().st_size == 300
    told = (tmp_path / "asked").read_text().splitlines()
    assert told == ["hf://team/lora-300 None 1000", "hf://team/lora-300 secret 700"]


async def test_what_nobody_uses_makes_room_and_what_is_used_stays(download: HubDownload) -> None:
    used, idle = await download.obtain(_version(300)), await download.obtain(_version(400))
    download.release(idle)
    assert idle.exists()
    large = await download.obtain(_version(600))
    assert (used.exists(), idle.exists(), large.exists()) == (True, False, True)
    with pytest.raises(AdapterFault, match=r"it is too large: 1000 are set for all \(--adapter-cache-bytes\)") as fault:
        await download.obtain(_version(500))
    assert (fault.value.reason, fault.value.passing) == ("NoRoomOnDisk", True)
    with pytest.raises(AdapterFault, match="the Hub has no such repository") as fault:
        await download.obtain(_version(13))
    assert fault.value.reason == "DownloadFailed"
    assert used.exists()
