"""Plain attention of the profile `exact`: the bits of a row are those of its own query and of the keys that it sees.

Keys are taken in tiles that begin at multiples of TILE_KEYS, whatever chunk or page they came with, and are added from
the first tile on. Queries come in blocks of EXACT_ROWS, padded; a tile of which a row sees nothing leaves its sums as
they are, to the bit. So neither chunk cuts nor the rows beside it can be seen in a row.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from modelserve_worker.attention.page_groups import SegmentGroup
from modelserve_worker.attention.paged_attention import PagedAttention, check_audits
from modelserve_worker.kernels.attention.block_attention import SoftmaxAccumulator
from modelserve_worker.kernels.products.exact_products import EXACT_ROWS

TILE_KEYS = 128  # a multiple of every page


class _QueryBlock:
    """Up to EXACT_ROWS consecutive queries of one segment, padded with zeros that see what the last one sees."""

    def __init__(self, q: Tensor, positions: Tensor, visible: Tensor, rows: slice, *, kv_heads: int) -> None:
        """q [1, n, Hq, D] and positions [n] of the segment, and the last ones [n] that its rows see."""
        self.rows = rows
        self.count = rows.stop - rows.start
        missing = EXACT_ROWS - self.count
        self.positions, self.visible = (
            torch.cat((of_rows[rows], of_rows[rows][-1:].expand(missing))) for of_rows in (positions, visible)
        )
        self.first, self.last = int(self.positions[0]), int(self.visible.max())
        self.softmax = SoftmaxAccumulator(
            functional.pad(q[:, rows], (0, 0, 0, 0, 0, missing)).contiguous(), kv_heads=kv_heads
        )

    def result(self, dtype: torch.dtype) -> Tensor:
        """[1, count, Hq, D]."""
        return self.softmax.result(dtype)[:, : self.count]


class ExactAttention(PagedAttention):
    """`PagedAttention` segment by segment, in tiles that lie where their positions say."""

    def _global_group(self, layer: int, producer: int, group: SegmentGroup, q: Tensor) -> Tensor:
        parts = zip(group.parts(1), torch.split(q, 1), strict=True)
        return torch.cat([self._global_segment(layer, producer, part, of_part) for part, of_part in parts])

    def _sliding_group(
        self, layer: int, producer: int, group: SegmentGroup, q: Tensor, own_keys: Tensor, own_values: Tensor
    ) -> Tensor:
        parts = zip(
            group.parts(1), torch.split(q, 1), torch.split(own_keys, 1), torch.split(own_values, 1), strict=True
        )
        return torch.cat([self._sliding_segment(layer, producer, *part) for part in parts])

    def _global_segment(self, layer: int, producer: int, part: SegmentGroup, q: Tensor) -> Tensor:
        page = self._cache.geometry.global_page
        end, pages = part.starts[0] + part.num_rows, TILE_KEYS // page.page_tokens
        blocks = list(self._blocks(part, q, part.positions, kv_heads=page.planes[0].heads))
        audits = [self._audits(layer, producer, part, block.rows, window=None) for block in blocks]
        for start in range(0, end, TILE_KEYS):
            table = part.table[:, start // page.page_tokens :][:, :pages]
            table = functional.pad(table, (0, pages - table.shape[1]))  # with a page whose rows nobody sees
            at = torch.arange(start, start + TILE_KEYS, device=q.device)
            keys, values = self._read_global(producer, table, at, (at < end)[None], q.dtype)
            for block, of_block in zip(blocks, audits, strict=True):
                if block.last < start:
                    continue
                seen = at <= block.positions[:, None]
                block.softmax.add(keys, values, seen[None])
                for audit in of_block:
                    audit.observe(self._stamps(producer, table[0]), seen[: block.count])
        check_audits(audits)
        return torch.cat([block.result(q.dtype) for block in blocks], dim=1)

    def _sliding_segment(
        self, layer: int, producer: int, part: SegmentGroup, q: Tensor, own_keys: Tensor, own_values: Tensor
    ) -> Tensor:
        """q [1, n, Hq, D]; K and V of the same rows [1, n, H, D]."""
        page, window, start = self._cache.geometry.sliding_page, self._window, part.starts[0]
        end, first = start + part.num_rows, max(0, start - window + 1)
        base = first // TILE_KEYS * TILE_KEYS
        old = part.first_page * page.page_tokens + self._positions(0, part.table.shape[1], page.page_tokens)
        kept = (old >= first) & (old < start)
        shape = (1, page.planes[0].heads, -(-end // TILE_KEYS) * TILE_KEYS - base, q.shape[-1])
        by_position = []
        for name, own in (("k", own_keys), ("v", own_values)):
            rows = q.new_zeros(shape)
            rows[:, :, old[kept] - base] = self._cache.read_pages(producer, name, part.table, q.dtype)[:, :, kept]
            rows[:, :, start - base : end - base] = own.transpose(1, 2)
            by_position.append(rows)
        keys, values = by_position
        outputs, audits = [], []
        for block in self._blocks(part, q, part.last_seen, kv_heads=page.planes[0].heads):
            audits.append(self._audits(layer, producer, part, block.rows, window=self._architecture.sliding_window))
            for tile in range(max(0, block.first - window + 1) // TILE_KEYS, block.last // TILE_KEYS + 1):
                at = torch.arange(tile * TILE_KEYS, (tile + 1) * TILE_KEYS, device=q.device)
                seen = (at <= block.visible[:, None]) & (at > block.positions[:, None] - window)
                places = slice(tile * TILE_KEYS - base, (tile + 1) * TILE_KEYS - base)
                block.softmax.add(keys[:, :, places].contiguous(), values[:, :, places].contiguous(), seen[None])
            for audit in audits[-1]:
                own_at = part.positions[0]
                at = torch.cat((old.masked_fill(~kept, -1), own_at))
                queries = own_at[block.rows, None]
                seen = (at >= 0) & (at <= part.last_seen[0][block.rows, None]) & (at > queries - window)
                stamps = (self._stamps(producer, part.table[0]), self._own_stamps(producer, part.rows[0]))
                audit.observe(torch.cat(stamps), seen)
            outputs.append(block.result(q.dtype))
        check_audits(audits)
        return torch.cat(outputs, dim=1)

    def _blocks(self, part: SegmentGroup, q: Tensor, visible: Tensor, *, kv_heads: int) -> Iterator[_QueryBlock]:
        for first in range(0, part.num_rows, EXACT_ROWS):
            rows = slice(first, min(first + EXACT_ROWS, part.num_rows))
            yield _QueryBlock(q, part.positions[0], visible[0], rows, kv_heads=kv_heads)
