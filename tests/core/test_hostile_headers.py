"""Headers of safetensors files that lie or were damaged: each is read or refused with InvalidInput, in flat memory.

    MODELSERVE_HEADERS=100000 pytest tests/core/test_hostile_headers.py

tries as many random ones.
"""

from __future__ import annotations

import json
import os
import random
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from modelserve.errors import InvalidInput
from modelserve.model.checkpoint_files import (
    CONFIG_FILE,
    MAX_DOCUMENT_BYTES,
    TensorEntry,
    read_header,
    read_json_object,
)

HEADERS = int(os.environ.get("MODELSERVE_HEADERS", "2000"))
PEAK_BYTES = 1 << 20  # of one header of a few hundred bytes
SOUND = {
    "model.layers.0.mlp.gate_proj.weight_packed": {"dtype": "U8", "shape": [4, 8], "data_offsets": [0, 32]},
    "model.layers.0.mlp.gate_proj.weight_scale": {"dtype": "F8_E4M3", "shape": [4, 1], "data_offsets": [32, 36]},
    "__metadata__": {"format": "pt"},
}


def write(path: Path, header: bytes, *, length: int | None = None, data: int = 36) -> Path:
    said = len(header) if length is None else length
    path.write_bytes(said.to_bytes(8, "little", signed=False) + header + bytes(data))
    return path


@pytest.mark.parametrize(
    ("header", "length", "says"),
    [
        (SOUND, 1 << 60, "its header would take 1152921504606846976 bytes"),
        (SOUND, 10_000, "its header would take 10000 bytes"),
        ({"w": {"dtype": "BF16", "shape": [2**60] * 2, "data_offsets": [0, 1 << 62]}}, None, "cut short: tensor 'w'"),
        ({"w": {"dtype": "BF16", "shape": [-1], "data_offsets": [0, 2]}}, None, "'w' lacks dtype, shape"),
        ({"w": {"dtype": "BF16", "shape": [1], "data_offsets": [4, 2]}}, None, "data_offsets"),
        ({"w": {"dtype": "BF16", "shape": [1], "data_offsets": [-8, 2]}}, None, "data_offsets"),
        ({"w": {"dtype": "BF16", "shape": [1], "data_offsets": [True, 2]}}, None, "lacks dtype"),
        ({"v": {"dtype": "U8", "shape": [20], "data_offsets": [0, 20]},
          "w": {"dtype": "U8", "shape": [20], "data_offsets": [16, 36]}}, None, "tensors 'v' and 'w' overlap"),
    ],
)  # fmt: skip
def test_what_a_header_cannot_say_is_refused(header: Any, length: int | None, says: str, tmp_path: Path) -> None:
    sound = write(tmp_path / "sound.safetensors", json.dumps(SOUND).encode())
    assert [entry.end - entry.start for entry in read_header(sound)] == [32, 4]
    with pytest.raises(InvalidInput, match=says):
        read_header(write(tmp_path / "lying.safetensors", json.dumps(header).encode(), length=length))


def test_a_json_file_without_end_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / CONFIG_FILE
    path.touch()
    os.truncate(path, MAX_DOCUMENT_BYTES + 1)  # sparse
    with pytest.raises(InvalidInput, match=r"67108865 bytes; 67108864 are read at most"):
        read_json_object(path)


def test_random_headers_are_read_or_refused_in_flat_memory(tmp_path: Path) -> None:
    drawn, path, read = random.Random(7), tmp_path / "random.safetensors", 0
    tracemalloc.start()
    for _ in range(HEADERS):
        header, length = changed(drawn)
        write(path, header, length=length, data=drawn.choice([0, 20, 36]))
        tracemalloc.reset_peak()
        entries: list[TensorEntry] | None = None
        with suppress(InvalidInput):
            entries = read_header(path)
        assert tracemalloc.get_traced_memory()[1] < PEAK_BYTES
        assert all(0 <= entry.start <= entry.end <= path.stat().st_size for entry in entries or ())
        read += entries is not None
    tracemalloc.stop()
    assert 0 < read < HEADERS, "some are sound and some are not"


def changed(drawn: random.Random) -> tuple[bytes, int | None]:
    """The sound header with bytes or values changed, and what it is said to take."""
    header = json.loads(json.dumps(SOUND))
    if drawn.random() < 0.6:
        tensor = header[drawn.choice(list(SOUND))]
        value: Any = drawn.choice([0, -1, 2**60, 2**4000, 1.5, None, "F32", [], [2**62] * 3, {"shape": []}, True])
        tensor[drawn.choice(["dtype", "shape", "data_offsets", "format"])] = value
    text = bytearray(json.dumps(header).encode())
    if drawn.random() < 0.5:
        for _ in range(drawn.randint(1, 4)):
            text[drawn.randrange(len(text))] = drawn.randrange(256)
    length = drawn.choice([None, None, None, len(text) - 1, len(text) + drawn.randrange(64), drawn.getrandbits(63)])
    return bytes(text), length
