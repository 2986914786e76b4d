"""Bytes of a cached prefix: rows of global layers for each token, and the last window of others."""

from __future__ import annotations

from modelserve.sizing.pages import CacheGeometry


def window_bytes(geometry: CacheGeometry, own_tokens: int | None = None) -> int:
    """Bytes per rank of the last window: sliding pages of a window and of the global page of positions before its end.

    A request resumes at any of these positions, so it spans a window and as many rows, whatever their alignment.
    Of one that ends `own_tokens` behind a prefix which others keep as well, pages that reach further back are theirs.
    """
    sliding, draft, held = geometry.sliding_page, geometry.draft, 0
    if sliding.layers:
        rows = geometry.window - 1 + geometry.global_page.page_tokens
        held = (sliding.pages(rows if own_tokens is None else min(rows, own_tokens)) + 1) * sliding.page_bytes
    if draft is not None and draft.ring_entries:
        rows = draft.kept_tokens if own_tokens is None else min(draft.kept_tokens, own_tokens)
        pages = min(-(-rows // draft.page_tokens) + 1, draft.ring_entries)
        held += pages * geometry.global_page.page_bytes
    return held


def prefix_bytes(geometry: CacheGeometry, tokens: int) -> int:
    """Bytes per rank of the global rows of so many tokens that nobody else shares."""
    return geometry.global_pages(tokens) * geometry.global_page.page_bytes
