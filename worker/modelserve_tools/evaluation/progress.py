"""What is on the screen while a run goes on."""

from __future__ import annotations

from typing import TextIO


class Progress:
    """One line on a terminal that is rewritten; nothing where the stream goes elsewhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown = ""

    def show(self, done: int, total: int) -> None:
        if self._stream.isatty():
            self._shown = f"{done} of {total}"
            self._stream.write(f"\r{self._shown}")
            self._stream.flush()

    def clear(self) -> None:
        if self._shown:
            self._stream.write("\r" + " " * len(self._shown) + "\r")
            self._stream.flush()
