"""Page geometry of the hybrid KV cache: where every byte of a page lies, and how many pages a request holds.

Two page kinds share one arena. A page id spans all owning layers of its kind; inside a page the order is layer, plane,
head, token, dim. Layer blocks are padded to 128 bytes (TMA and 16-byte copies), and the padding is counted here. Rows
of a drafter's layers are behind those of global layers, and in further global pages (draft_pages.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from decimal import Decimal
from enum import StrEnum

from modelserve.errors import InvalidInput
from modelserve.model.architecture import LayerKind, ModelArchitecture
from modelserve.sizing.draft_pages import DraftCache, DraftPages, check_draft
from modelserve.sizing.speculation import MOST_DRAFTS

GLOBAL_PAGE_TOKENS = 64
SLIDING_PAGE_TOKENS = 32
LAYER_ALIGNMENT_BYTES = 128


class KVCacheDtype(StrEnum):
    """Storage dtype of cache rows. `int8` carries one float16 scale per token and head; fp8 rows carry none."""

    FLOAT32 = "float32"  # float32 checkpoints on the CPU only; not offered by the resource
    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"

    @property
    def element_bytes(self) -> int:
        return {"float32": 4, "bfloat16": 2}.get(self.value, 1)

    @property
    def scale_bytes(self) -> int:
        return 2 if self is KVCacheDtype.INT8 else 0


class KVCacheLayout(StrEnum):
    """Row layout of global layers: K and V, or V alone. Sliding layers hold K and V."""

    KV = "kv"
    V_ONLY = "v_only"

    @classmethod
    def least(cls, architecture: ModelArchitecture) -> KVCacheLayout:
        """The one that a cache has unless another is asked for: V alone where the model makes its K of it."""
        return cls.V_ONLY if architecture.attention_k_eq_v else cls.KV


def cache_format(dtype: KVCacheDtype, layout: KVCacheLayout) -> str:
    """How what was measured of a cache is filed: "bfloat16/v_only"."""
    return f"{dtype.value}/{layout.value}"


@dataclass(frozen=True)
class Plane:
    """One array of a layer block: shape [heads, page_tokens, width] of `element_bytes` elements at `offset_bytes`."""

    name: str  # "k", "v", "k_rotated", "k_scale", "v_scale"
    offset_bytes: int
    heads: int
    width: int
    element_bytes: int


@dataclass(frozen=True)
class PageSpec:
    """Byte layout of one page of one kind on one rank. `layers` are model layer indices in block order; behind them are
    `draft_bytes` of a drafter's."""

    kind: LayerKind
    page_tokens: int
    layers: tuple[int, ...]
    planes: tuple[Plane, ...]
    layer_bytes: int
    draft_bytes: int = 0

    @property
    def page_bytes(self) -> int:
        """Bytes of one page; 0 when no layer of this kind owns a cache."""
        return self.layer_bytes * len(self.layers) + self.draft_bytes

    def pages(self, tokens: int) -> int:
        """Pages that `tokens` consecutive positions from 0 need: ceil(tokens / page_tokens)."""
        return -(-tokens // self.page_tokens)


@dataclass(frozen=True)
class CacheGeometry:
    """Both page kinds of one rank."""

    global_page: PageSpec
    sliding_page: PageSpec
    window: int
    dtype: KVCacheDtype
    layout: KVCacheLayout
    draft: DraftPages | None = None  # of a drafter with rows of its own

    def page(self, kind: LayerKind) -> PageSpec:
        return self.global_page if kind is LayerKind.GLOBAL else self.sliding_page

    def global_pages(self, length: int) -> int:
        """Global pages a request of `length` tokens holds: ceil(length / 64), 0 when no global layer owns a cache."""
        return self.global_page.pages(length) if self.global_page.layers else 0

    def sliding_pages(self, length: int) -> int:
        """Most sliding pages a request holds on its way to `length` tokens: min(ceil(length/32), ceil((W-1)/32) + 1).

        A window of W consecutive rows touches at most ceil((W-1)/32) + 1 pages, whatever its alignment. A prefill chunk
        adds nothing: its rows stay in the step's projections and only rows that outlive the step are written.
        """
        if not self.sliding_page.layers:
            return 0
        return min(self.sliding_page.pages(length), self.sliding_table_entries)

    @property
    def sliding_table_entries(self) -> int:
        """Entries R of a sliding block table, ceil((W-1)/32) + 1: logical page l is at entry l mod R.

        A window of W rows touches at most R pages, so two pages of one window never meet in an entry.
        """
        return self.sliding_page.pages(self.window - 1) + 1 if self.sliding_page.layers else 0

    def draft_ring_pages(self, length: int) -> int:
        """Global pages besides, of a drafter's window layers, that a request of `length` tokens holds."""
        return 0 if self.draft is None else self.draft.ring_pages(length)

    def held_bytes(self, length: int) -> int:
        """Pool bytes per rank that one request of `length` tokens holds."""
        return (
            self.global_pages(length) + self.draft_ring_pages(length)
        ) * self.global_page.page_bytes + self.sliding_pages(length) * self.sliding_page.page_bytes

    def requests(self, pool_bytes: int, length: int) -> int:
        """Requests of `length` tokens that fit together: floor(pool / held). The arena has no other loss."""
        return pool_bytes // self.held_bytes(length)

    def concurrency(self, pool_bytes: int, length: int) -> Decimal:
        """pool / held, rounded down to two decimals."""
        return Decimal(pool_bytes * 100 // self.held_bytes(length)) / 100

    def longest_request(self, pool_bytes: int) -> int:
        """Most tokens one request can hold in `pool_bytes` alone; 0 when not even one page of each kind fits.

        Growth past the window is by global pages only; below it the answer is found by bisection on held_bytes.
        """
        if self.global_page.page_bytes:
            held, ring = self.sliding_table_entries, 0 if self.draft is None else self.draft.ring_entries
            rows = max(held * self.sliding_page.page_tokens, self.draft.ring_tokens if self.draft else 0)
            grown = (pool_bytes - held * self.sliding_page.page_bytes) // self.global_page.page_bytes - ring
            if grown > 0 and grown * self.global_page.page_tokens >= rows:
                return grown * self.global_page.page_tokens
        if self.held_bytes(1) > pool_bytes:
            return 0
        low, high = 1, 2
        while self.held_bytes(high) <= pool_bytes:
            if high > 1 << 40:  # no global layer owns a cache: the window bounds every request
                return high
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.held_bytes(middle) <= pool_bytes else (low, middle)
        return low


def cache_geometry(
    architecture: ModelArchitecture,
    *,
    dtype: KVCacheDtype,
    layout: KVCacheLayout,
    tensor_parallel_size: int,
    draft: DraftCache | None = None,
) -> CacheGeometry:
    """Page geometry of one rank, with what a drafter wants cached. Raises InvalidInput when the layout needs
    attention_k_eq_v and the model lacks it, and for a draft cache of sizes that nothing can be laid out by."""
    if layout is not KVCacheLayout.KV and not architecture.attention_k_eq_v:
        raise InvalidInput(
            f"kvCache.layout {layout.value!r} needs a model whose global layers derive K from V (attention_k_eq_v); "
            "this model stores both: use layout kv",
            field="kvCache.layout",
        )
    tp = tensor_parallel_size
    global_page = _page(architecture, LayerKind.GLOBAL, GLOBAL_PAGE_TOKENS, dtype, layout, tp)
    pages = None if draft is None else _draft_pages(architecture, draft, global_page, tp)
    if pages is not None:
        global_page = replace(global_page, draft_bytes=pages.page_bytes - global_page.page_bytes)
    return CacheGeometry(
        global_page=global_page,
        sliding_page=_page(architecture, LayerKind.SLIDING, SLIDING_PAGE_TOKENS, dtype, KVCacheLayout.KV, tp),
        window=architecture.sliding_window,
        dtype=dtype,
        layout=layout,
        draft=pages,
    )


def _draft_pages(architecture: ModelArchitecture, draft: DraftCache, global_page: PageSpec, tp: int) -> DraftPages:
    check_draft(draft)
    if not global_page.layers:
        raise InvalidInput("a drafter's rows lie in pages of global layers, and no global layer of the model has any")
    return DraftPages.of(
        draft,
        ranks=tp,
        target_bytes=global_page.page_bytes,
        global_tokens=GLOBAL_PAGE_TOKENS,
        sliding_tokens=SLIDING_PAGE_TOKENS,
        sliding_window=architecture.sliding_window,
        most_drafts=MOST_DRAFTS,
        first_ring_entry=global_page.pages(architecture.max_position_embeddings),
    )


def _page(
    architecture: ModelArchitecture, kind: LayerKind, tokens: int, dtype: KVCacheDtype, layout: KVCacheLayout, tp: int
) -> PageSpec:
    width = architecture.global_head_dim if kind is LayerKind.GLOBAL else architecture.head_dim
    heads = architecture.kv_heads_per_rank(kind, tp)
    rows = {
        KVCacheLayout.KV: (("k", width), ("v", width)),
        KVCacheLayout.V_ONLY: (("v", width),),
    }[layout]
    planes: list[Plane] = []
    offset = 0
    for name, columns in rows:
        planes.append(Plane(name, offset, heads, columns, dtype.element_bytes))
        offset += heads * tokens * columns * dtype.element_bytes
    if dtype.scale_bytes:
        for name, _ in rows:
            planes.append(Plane(f"{name}_scale", offset, heads, 1, dtype.scale_bytes))
            offset += heads * tokens * dtype.scale_bytes
    layer_bytes = -(-offset // LAYER_ALIGNMENT_BYTES) * LAYER_ALIGNMENT_BYTES
    return PageSpec(kind, tokens, architecture.owning_layers(kind), tuple(planes), layer_bytes)
