"""Where copies of pages lie in host memory: pieces of one size, each with pages of one kind. Torch-free.

Host memory is pinned piece by piece while requests are served, so it has no one address. A piece is a whole number of
the larger pages; while one of its pages is in use it has pages of that kind alone. A *place* names a page of a kind:
piece x pages per piece + number within the piece.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from modelserve.model.architecture import LayerKind
from modelserve.sizing.pages import CacheGeometry

_PIECE_BYTES = 64 << 20  # what a GPU's driver pins at once, while which it answers nobody else
_LEAST_PIECES = 16

LANE_ENDED = -1
"""In place of a step: an error has ended the copies of that direction, and no more are told of."""


@dataclass(frozen=True)
class HostLayout:
    """Of `num_pieces` pieces of `piece_bytes` bytes; `per_piece` pages of each kind fit in one."""

    piece_bytes: int
    num_pieces: int
    per_piece: dict[LayerKind, int]

    @classmethod
    def of(cls, geometry: CacheGeometry, capacity_bytes: int) -> HostLayout:
        """At most `capacity_bytes` of one rank; no pieces where not one page fits."""
        sizes = {kind: geometry.page(kind).page_bytes for kind in LayerKind}
        largest = max(sizes.values())
        piece = largest * max(1, min(_PIECE_BYTES, capacity_bytes // _LEAST_PIECES) // largest)
        return cls(piece, capacity_bytes // piece, {kind: piece // size if size else 0 for kind, size in sizes.items()})

    def locate(self, kind: LayerKind, place: int) -> tuple[int, int]:
        """Piece of a place, and its number there."""
        return divmod(place, self.per_piece[kind])


class HostProgress(NamedTuple):
    """What a device says of its host memory; of several ranks, the least of each."""

    pieces: int = 0  # how many are pinned
    stored: int = 0  # every copy to host memory that steps up to this one brought has ended, or LANE_ENDED
    loaded: int = 0  # and every copy from there, or LANE_ENDED
