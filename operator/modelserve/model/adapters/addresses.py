"""Addresses and names of adapters: what the schema of ModelAdapter admits, workers take."""

from __future__ import annotations

HUB, BUCKET, CLAIM = "hf://", "s3://", "pvc://"
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"  # of a name of the Hub
HUB_ADDRESS = rf"{HUB}{_PART}/{_PART}(/[A-Za-z0-9_][A-Za-z0-9._-]{{0,127}}){{0,4}}"
BUCKET_ADDRESS = rf"{BUCKET}[a-z0-9][a-z0-9.-]{{1,61}}[a-z0-9](/[A-Za-z0-9_][A-Za-z0-9._=-]*){{1,16}}"
CLAIM_ADDRESS = rf"{CLAIM}[a-z0-9]([a-z0-9.-]*[a-z0-9])?(/[A-Za-z0-9_][A-Za-z0-9._-]*)+"


def default_revision(uri: str) -> str | None:
    """Of the Hub, where none is named; None for other addresses, which have none."""
    return "main" if uri.startswith(HUB) else None


SERVED_NAME, MOST_NAME = r"^[A-Za-z0-9][A-Za-z0-9._/:-]*$", 128
"""`model` of requests, and its most characters."""

DOWNLOADS_BYTES = 4 << 30
"""Most that a worker keeps of what it fetched from the Hub, unless it is told another figure."""
