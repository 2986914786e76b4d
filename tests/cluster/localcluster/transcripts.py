"""Transcripts in Markdown: commands behind `$` in ```console blocks, and what they print."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_HASH = re.compile(r"\b[0-9a-f]{10}\b")


@dataclass(frozen=True)
class Entry:
    """One command, and its output as the page has it."""

    command: str
    output: str


def entries(page: Path) -> Iterator[Entry]:
    """Every command of a page, in its order; a block has one."""
    for block in _BLOCK.findall(page.read_text()):
        command, _, output = block.removeprefix("$ ").partition("\n")
        yield Entry(command, output)


def rewritten(page: Path, run: Callable[[str], str]) -> str:
    """The page with the output that each command has now."""

    def block(found: re.Match[str]) -> str:
        command = found.group(1).removeprefix("$ ").partition("\n")[0]
        return f"```console\n$ {command}\n{run(command)}```"

    return _BLOCK.sub(block, page.read_text())


def without_hashes(text: str) -> str:
    """Hashes cover the release, so a page would be wrong with the next one."""
    return _HASH.sub("HASH", text)
