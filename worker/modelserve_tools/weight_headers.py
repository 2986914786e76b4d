"""Headers of weight files on the Hugging Face Hub, without the weights: what an inspection reads of them.

Each is stored as a sparse file of the true size, so that `modelserve inspect` takes the folder for the checkpoint: it
compares sizes and byte ranges, and reads no tensor. Scratch space is taken for the headers alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from modelserve.errors import InvalidInput
from modelserve.model.checkpoint_files import LENGTH_BYTES, MAX_HEADER_BYTES
from modelserve.model.gguf.files import SUFFIX
from modelserve.model.gguf.header import read_gguf_header
from modelserve.model.gguf.tensor_names import ROPE_FACTORS

if TYPE_CHECKING:
    from huggingface_hub import HfApi

FIRST_BYTES = 1 << 17  # most headers are shorter, so that one request is enough
GGUF_BYTES = 1 << 22  # at once: vocabularies take 15 to 20 MB
SILENCE_S = 30.0
Parts = list[tuple[int, bytes]]  # (where in the file, its bytes)


def fetch_headers(api: HfApi, repository: str, commit: str, names: Iterable[str], dest: Path) -> None:
    """Store the headers of these files of a commit in `dest`. Raises InvalidInput for a file whose header cannot be
    right, ConnectionError when a transfer breaks off, and what the Hub's client raises.
    """
    from huggingface_hub import hf_hub_url

    for name in names:
        url = hf_hub_url(repository, name, revision=commit, endpoint=api.endpoint)
        read = _gguf_parts if name.endswith(SUFFIX) else _header
        parts, size = read(url, api.token, name)
        (dest / name).parent.mkdir(parents=True, exist_ok=True)
        with (dest / name).open("wb") as file:
            for start, part in parts:
                file.seek(start)
                file.write(part)
            file.truncate(size)


def _gguf_parts(url: str, token: str | bool | None, name: str) -> tuple[Parts, int]:
    """The same of a GGUF file, which does not say how long its header is; with the one tensor that is read with it."""
    held, size = _part(url, token, start=0, count=GGUF_BYTES)

    def read(start: int, count: int) -> bytes:
        nonlocal held
        while len(held) < start + count and len(held) < size:
            more, _ = _part(url, token, start=len(held), count=min(GGUF_BYTES, size - len(held)))
            if not more:
                raise ConnectionError(f"{name}: {len(held)} of the header's bytes arrived")
            held += more
        return held[start : start + count]

    try:
        header = read_gguf_header(read, size=size, name=name)
    except InvalidInput as error:
        raise InvalidInput(str(error), field="model.uri") from error
    parts = [(0, held[: header.end])]
    factors = header.tensors.get(ROPE_FACTORS)
    if factors is not None and factors.end - factors.start <= GGUF_BYTES:
        parts.append((factors.start, _part(url, token, start=factors.start, count=factors.end - factors.start)[0]))
    return parts, size


def _header(url: str, token: str | bool | None, name: str) -> tuple[Parts, int]:
    """(the header with its length before it, which begins the file; size of the whole file)"""
    first, size = _part(url, token, start=0, count=FIRST_BYTES)
    whole = LENGTH_BYTES + int.from_bytes(first[:LENGTH_BYTES], "little")
    if whole > min(size, LENGTH_BYTES + MAX_HEADER_BYTES):
        raise InvalidInput(
            f"{name} is not a safetensors file: its header would take {whole} bytes of the file's {size}",
            field="model.uri",
        )
    rest = b""
    if whole > len(first):
        rest, _ = _part(url, token, start=len(first), count=whole - len(first))
    header = (first + rest)[:whole]
    if len(header) < whole:
        raise ConnectionError(f"{name}: {len(header)} of the header's {whole} bytes arrived")
    return [(0, header)], size


def _part(url: str, token: str | bool | None, *, start: int, count: int) -> tuple[bytes, int]:
    """(bytes of a file from `start` on, its size). A mirror that serves no parts is hung up on when these are here."""
    from huggingface_hub import get_session, hf_raise_for_status

    headers = {"Range": f"bytes={start}-{start + count - 1}"}
    if token:
        headers["Authorization"] = f"Bearer {token}"  # the client sends it to no other host that it is redirected to
    with get_session().stream("GET", url, headers=headers, timeout=SILENCE_S) as answer:
        hf_raise_for_status(answer)
        partial = answer.status_code == 206
        skipped = 0 if partial else start
        read = b""
        for block in answer.iter_bytes():
            read += block
            if len(read) >= skipped + count:
                break
        return read[skipped : skipped + count], _size(answer.headers, partial=partial)


def _size(headers: Mapping[str, str], *, partial: bool) -> int:
    """Of the whole file, as an answer tells it. Raises ValueError when it does not."""
    return int(headers["Content-Range"].rpartition("/")[2] if partial else headers["Content-Length"])
