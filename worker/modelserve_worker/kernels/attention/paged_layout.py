"""Where the rows of one layer lie in the arena, as kernels take it: one byte origin, one page stride, plane offsets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from modelserve.model.architecture import LayerKind
from modelserve.sizing.pages import CacheGeometry, KVCacheDtype


@dataclass(frozen=True)
class LayerRows:
    """Bytes: page n of the layer's kind begins at origin + n * page_stride, a plane of the layer `offsets` further.

    A plane is [heads, page_tokens, width] elements; "k_scale" and "v_scale" are [heads, page_tokens] float16.
    `entries` is the length of a sliding block table, 0 for a global one; `window` is 0 for global layers.
    """

    kind: LayerKind
    heads: int
    width: int
    page_tokens: int
    entries: int
    window: int
    origin: int
    page_stride: int
    offsets: dict[str, int]
    dtype: KVCacheDtype

    @property
    def v_only(self) -> bool:
        return "k" not in self.offsets

    @property
    def int8(self) -> bool:
        return self.dtype is KVCacheDtype.INT8


class RisingPages(NamedTuple):
    """Pages in the order of their addresses, as the copy engine wants them; all but numbers in the caller's unit."""

    first: int  # where the lowest begins
    stride: int  # to the next one
    pages: int
    origin: int  # number of page 0 among them
    step: int  # from the number of page n to that of page n + 1: 1, or -1 where pages count down


def rising_pages(origin: int, page_stride: int, *, size: int) -> RisingPages:
    """The pages of an arena of `size` whose page n begins at origin + n * page_stride."""
    stride = abs(page_stride)
    if page_stride < 0:
        pages = origin // stride + 1
        return RisingPages(origin % stride, stride, pages, pages - 1, -1)
    return RisingPages(origin, stride, (size - origin) // stride, 0, 1)


def layer_rows(geometry: CacheGeometry, layer: int, *, pool_bytes: int) -> LayerRows:
    """Layout of an owning layer in an arena of `pool_bytes` bytes: global pages count down from its end."""
    kind = LayerKind.GLOBAL if layer in geometry.global_page.layers else LayerKind.SLIDING
    spec, is_global = geometry.page(kind), kind is LayerKind.GLOBAL
    block = spec.layers.index(layer) * spec.layer_bytes
    return LayerRows(
        kind=kind,
        heads=spec.planes[0].heads,
        width=spec.planes[0].width,
        page_tokens=spec.page_tokens,
        entries=0 if is_global else geometry.sliding_table_entries,
        window=0 if is_global else geometry.window,
        origin=pool_bytes - spec.page_bytes if is_global else 0,
        page_stride=-spec.page_bytes if is_global else spec.page_bytes,
        offsets={plane.name: block + plane.offset_bytes for plane in spec.planes},
        dtype=geometry.dtype,
    )
