"""Values of command-line flags, checked as argparse types: what is wrong, the value and the range."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit


def http_address(text: str) -> str:
    """The text as it is. Raises argparse.ArgumentTypeError unless it is an address of http or https with a host."""
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, a bracket that is never closed
        usable = False
    if not usable:
        raise argparse.ArgumentTypeError(f"{text!r} is no HTTP address; write it as http://HOST:PORT/v1")
    return text


def reference_address(text: str) -> str | Path:
    """An HTTP address as it is, anything else as the path of a file. Raises argparse.ArgumentTypeError."""
    return http_address(text) if text.startswith(("http://", "https://")) else Path(text)


def whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """Reads a whole number from `least` to `most`, both included."""

    def read(text: str) -> int:
        range_text = f"from {least} on" if most is None else f"from {least} to {most}"
        if not (text.isascii() and text.isdigit() and len(text) <= 18):
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number {range_text}")
        if int(text) < least or (most is not None and int(text) > most):
            raise argparse.ArgumentTypeError(f"{text} is out of range; give a whole number {range_text}")
        return int(text)

    return read


def number(least: float, most: float) -> Callable[[str], float]:
    """Reads a number from `least` to `most`, both included."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no number from {least:g} to {most:g}")
        return value

    return read
