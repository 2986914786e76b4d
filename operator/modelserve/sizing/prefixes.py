"""Bytes of a cached prefix: rows of global layers for each token, and the last window of sliding layers."""

from __future__ import annotations

from modelserve.sizing.pages import CacheGeometry


def window_bytes(geometry: CacheGeometry, own_tokens: int | None = None) -> int:
    """Bytes per rank of the last window: sliding pages of a window and of the global page of positions before its end.

    A request resumes at any of these positions, so it spans a window and as many rows, whatever their alignment.
    Of one that ends `own_tokens` behind a prefix which others keep as well, pages that reach further back are theirs.
    """
    sliding = geometry.sliding_page
    if not sliding.layers:
        return 0
    rows = geometry.window - 1 + geometry.global_page.page_tokens
    return (sliding.pages(rows if own_tokens is None else min(rows, own_tokens)) + 1) * sliding.page_bytes


def prefix_bytes(geometry: CacheGeometry, tokens: int) -> int:
    """Bytes per rank of the global rows of so many tokens that nobody else shares."""
    return geometry.global_pages(tokens) * geometry.global_page.page_bytes
