"""How decode kernels of Triton's cut the rows of segments into programs, by the tile that the table chose."""

from __future__ import annotations

from modelserve.sizing.backends.table import AttentionTile


def query_block(tile: AttentionTile, rows: int, group: int) -> tuple[int, int]:
    """How many of a segment's rows a program of a decode kernel takes, of `group` queries each, and the rows of its
    matrix products."""
    part = min(rows, max(1, tile.queries // group))
    return part, max(16, 1 << (part * group - 1).bit_length())


def decode_warps(tile: AttentionTile, block: int) -> int:
    """Warps of a program of `block` queries: a warp has at most as many accumulators as a lone row's program gives it,
    up to 8 warps."""
    return min(8, tile.warps * block // 16) if block > 16 else tile.warps
