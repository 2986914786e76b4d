"""Where rows of a drafter's layers lie, whose K and V are made of the model's hidden states (DFlash, DSpark).

They have neither pages nor a block table of their own. Layers that see the whole context are further layers of global
pages. Layers with a window have a *ring* of further global pages, each of which holds so many tokens of all of them as
fit its bytes: the row of position p is in entry `first_ring_entry` + (p // `page_tokens`) mod `ring_entries` of the
slot's global block table, at p mod `page_tokens`. So what prefixes, tiers, moves and ranks do with pages they do with
these.

A ring has its rows by position alone: a row is there until the one that is ring_entries x page_tokens behind it takes
its place. It is long enough to keep `kept_tokens` rows before the end of what is computed, whatever drafts wrote behind
it: the window at every position at which a request may resume that ends there, or was cached there.
"""

from __future__ import annotations

from dataclasses import dataclass

from modelserve.errors import InvalidInput

_TOKEN_MULTIPLE = 16  # tokens of a ring page: the keys of a tile are in one, and planes are aligned to 128 bytes


@dataclass(frozen=True, slots=True)
class DraftCache:
    """What a drafter wants cached, of the whole model. Rows are stored in its compute type, whatever the cache's is."""

    full_layers: int
    window_layers: int
    window: int  # tokens before the anchor that a window layer sees; 0 without window layers
    kv_heads: int
    head_dim: int
    v_only: bool = False  # K is made of V: one plane a layer
    element_bytes: int = 2  # bfloat16; 4: float32, of float32 checkpoints

    @property
    def planes(self) -> tuple[str, ...]:
        return ("v",) if self.v_only else ("k", "v")


@dataclass(frozen=True, slots=True)
class DraftPages:
    """Layout of a drafter's rows on one rank. Planes are [kv_heads, tokens, head_dim], one behind the other."""

    full_layers: int
    window_layers: int
    kv_heads: int
    head_dim: int
    planes: tuple[str, ...]  # of a layer, in order: "k" and "v", or "v"
    element_bytes: int
    window: int
    full_offset_bytes: int  # of full layer 0 in a global page, behind the model's layers
    layer_bytes: int  # of a full layer there
    page_tokens: int  # of a ring page; 0 without window layers
    ring_layer_bytes: int  # of a window layer in a ring page, which begins with layer 0
    ring_entries: int
    kept_tokens: int  # rows before the end of what is computed that the ring has
    first_ring_entry: int  # of a slot's global block table

    @property
    def row_bytes(self) -> int:
        """Of one token in one layer."""
        return self.kv_heads * self.head_dim * self.element_bytes * len(self.planes)

    @property
    def full_bytes(self) -> int:
        """Of all full layers in a global page."""
        return self.full_layers * self.layer_bytes

    @property
    def ring_tokens(self) -> int:
        """Rows that a ring has room for."""
        return self.ring_entries * self.page_tokens

    def ring_pages(self, length: int) -> int:
        """Pages of the ring that a request of `length` tokens holds: min(ceil(length / page_tokens), ring_entries)."""
        return min(-(-length // self.page_tokens), self.ring_entries) if self.ring_entries else 0

    @classmethod
    def of(
        cls,
        draft: DraftCache,
        *,
        ranks: int,
        target_bytes: int,
        global_tokens: int,
        sliding_tokens: int,
        sliding_window: int,
        most_drafts: int,
        first_ring_entry: int,
        token_multiple: int = _TOKEN_MULTIPLE,
    ) -> DraftPages:
        """Beside a model whose layers take `target_bytes` of a global page. Heads are split over `ranks`; where there
        are more ranks than heads, ranks share heads. A cached prefix of the model serves positions up to
        `global_tokens` - 1 + `sliding_tokens` before its end, one within `sliding_window` of the beginning all of them.

        Two steps in flight write `most_drafts` + 1 rows each, which may all be wrong, and a scheduler asks for pages
        every `sliding_tokens`: so many rows find room behind those kept.
        """
        heads = max(1, draft.kv_heads // ranks)
        row = heads * draft.head_dim * draft.element_bytes * len(draft.planes)
        layer_bytes = global_tokens * row
        page_tokens = entries = kept = 0
        if draft.window_layers:
            # A page of fewer tokens than a tile has is made larger, so that it has as many.
            whole = target_bytes + draft.full_layers * layer_bytes
            fit = whole // (draft.window_layers * row) // token_multiple * token_multiple
            page_tokens = max(fit, token_multiple)
            kept = max(draft.window, sliding_window) + global_tokens - 1 + sliding_tokens
            entries = -(-(kept + 2 * (most_drafts + 1) + sliding_tokens) // page_tokens)
        return cls(
            full_layers=draft.full_layers,
            window_layers=draft.window_layers,
            kv_heads=heads,
            head_dim=draft.head_dim,
            planes=draft.planes,
            element_bytes=draft.element_bytes,
            window=draft.window,
            full_offset_bytes=target_bytes,
            layer_bytes=layer_bytes,
            page_tokens=page_tokens,
            ring_layer_bytes=page_tokens * row,
            ring_entries=entries,
            kept_tokens=kept,
            first_ring_entry=first_ring_entry,
        )

    @property
    def page_bytes(self) -> int:
        """Least bytes of a global page."""
        return max(self.full_offset_bytes + self.full_bytes, self.window_layers * self.ring_layer_bytes)


def check_draft(draft: DraftCache) -> None:
    """Raises InvalidInput for sizes that nothing can be laid out by."""
    if min(draft.full_layers, draft.window_layers, draft.window) < 0 or draft.full_layers + draft.window_layers < 1:
        raise InvalidInput(f"a drafter caches {draft.full_layers} full and {draft.window_layers} window layers")
    if bool(draft.window_layers) != bool(draft.window):
        raise InvalidInput(
            f"the drafter's window is {draft.window} tokens for {draft.window_layers} layers: one without the other"
        )
    if min(draft.kv_heads, draft.head_dim) < 1 or draft.head_dim * draft.element_bytes % 8:
        raise InvalidInput(
            f"the drafter caches {draft.kv_heads} heads of {draft.head_dim} elements of {draft.element_bytes} bytes; "
            "the row of a head must be a multiple of 8 bytes"
        )
