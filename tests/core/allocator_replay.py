"""The blocks of one heaviest step on a GPU, replayed through the rules of PyTorch's caching allocator.

Independent of sizing's formulas: it follows the worker's forward pass tensor by tensor, in the order in which they are
made and dropped, and says how much the allocator would reserve. A page of cache, which the profile step holds too, is
left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from modelserve.model.architecture import LayerKind, ModelArchitecture
from modelserve.sizing.pages import SLIDING_PAGE_TOKENS

MIB = 1 << 20
SMALL_BYTES, SMALL_SEGMENT = 1 * MIB, 2 * MIB  # blocks up to 1 MiB lie in segments of 2
MIDDLE_BYTES, MIDDLE_SEGMENT = 10 * MIB, 20 * MIB  # those below 10 MiB in segments of 20
FLOAT32, INT32, INT64, BFLOAT16 = 4, 4, 8, 2
COUNTERS = 16 << 10  # bytes of the counters beside the parts
ROWS_PER_SORT = 16


@dataclass
class Piece:
    segment: int
    start: int
    size: int


@dataclass
class CachingAllocator:
    """Best fit among free pieces; a piece is cut when more than a little is left, and joined again when freed."""

    reserved: int = 0
    segments: int = 0
    free: dict[bool, list[Piece]] = field(default_factory=lambda: {True: [], False: []})

    def take(self, size: int) -> Piece:
        size = max(512, -(-size // 512) * 512)
        small = size <= SMALL_BYTES
        fitting = [piece for piece in self.free[small] if piece.size >= size]
        if fitting:
            piece = min(fitting, key=lambda each: each.size)
            self.free[small].remove(piece)
        else:
            segment = (
                SMALL_SEGMENT if small else MIDDLE_SEGMENT if size < MIDDLE_BYTES else -(-size // (2 * MIB)) * 2 * MIB
            )
            self.segments += 1
            self.reserved += segment
            piece = Piece(self.segments, 0, segment)
        if piece.size - size >= (512 if small else SMALL_BYTES + 1):
            self.free[small].append(Piece(piece.segment, piece.start + size, piece.size - size))
            piece.size = size
        return piece

    def give(self, piece: Piece, *, small: bool) -> None:
        pieces = self.free[small]
        for other in [each for each in pieces if each.segment == piece.segment]:
            if other.start + other.size == piece.start:
                pieces.remove(other)
                piece = Piece(piece.segment, other.start, other.size + piece.size)
            elif piece.start + piece.size == other.start:
                pieces.remove(other)
                piece = Piece(piece.segment, piece.start, piece.size + other.size)
        pieces.append(piece)


class Block:
    """A tensor's memory; dropped like the tensor, when nothing refers to it."""

    def __init__(self, allocator: CachingAllocator, size: int) -> None:
        self._allocator, self._small = allocator, max(512, size) <= SMALL_BYTES
        self._piece = allocator.take(size)

    def __del__(self) -> None:
        self._allocator.give(self._piece, small=self._small)


class Replay:
    """Bfloat16 model and cache; `reserved` after the profile's two steps: a chunk, then decodes of all sequences.

    `captured`: the steps have a pool of their own, in which sampling finds no room. `bits`: of a weight; below 16
    kernels add up parts of products in one buffer, and for 4 a step of many rows dequantises into another.
    """

    def __init__(
        self,
        architecture: ModelArchitecture,
        *,
        ranks: int,
        tokens: int,
        sequences: int,
        captured: bool,
        bits: int = 16,
    ) -> None:
        self._architecture, self._ranks = architecture, ranks
        self._allocator = CachingAllocator()
        self._outside = CachingAllocator() if captured else self._allocator
        held = [*self._buffers(tokens, sequences), *self._matrices(bits, tokens)]
        self._workspaces: Sequence[Block] = ()
        self._step(tokens, rows=1, chunk=True)
        self._step(sequences, rows=sequences, chunk=False)
        self.reserved = self._allocator.reserved + (self._outside.reserved if captured else 0)
        del held

    def _block(self, size: int) -> Block:
        return Block(self._allocator, size)

    def _width(self, kind: LayerKind) -> int:
        return self._architecture.global_head_dim if kind is LayerKind.GLOBAL else self._architecture.head_dim

    def _buffers(self, tokens: int, sequences: int) -> list[Block]:
        a, longest = self._architecture, self._architecture.max_position_embeddings
        entries = -(-(a.sliding_window - 1) // SLIDING_PAGE_TOKENS) + 1
        heads = a.num_attention_heads // self._ranks
        kv_heads = a.kv_heads_per_rank(LayerKind.GLOBAL, self._ranks)
        splits = max(max(8, 128 // kv_heads) * (a.global_head_dim + 2), -(-entries // 4) * (a.head_dim + 2))
        sizes = [
            sequences * -(-(longest // 64) // 16) * 16 * 4,
            sequences * -(-entries // 16) * 16 * 4,
            sequences * splits * heads * FLOAT32,
            4 * (5 * tokens + 9 * sequences + 3 * sequences**2),
            4 * 9 * sequences,
            sequences * 18 * 4,
            sequences * a.vocab_size * 4,
        ]
        if a.attention_k_eq_v:
            pairs = a.global_rotary_pairs
            sizes += [(longest // 64 + 1) * pairs * FLOAT32] * 2
            sizes += [max(longest, 65_536) * kv_heads * 2 * pairs * BFLOAT16]
        return [self._block(size) for size in sizes]

    def _matrices(self, bits: int, tokens: int) -> list[Block]:
        sizes = [] if bits == 16 else [(16 << 20) - COUNTERS, COUNTERS]
        if bits == 4 and tokens > 1024:
            sizes.append(128 << 20)
        return [self._block(size) for size in sizes]

    def _step(self, tokens: int, *, rows: int, chunk: bool) -> None:
        a, block = self._architecture, self._block
        hidden = tokens * a.hidden_size * BFLOAT16
        ids = block(tokens * 4)
        x = block(hidden)
        if self._ranks > 1:
            x = block(hidden)
        per_layer = self._per_layer_inputs(tokens)
        rotations = []
        for kind in LayerKind:
            angles = block(tokens * self._width(kind) * 2)
            rotations += [block(tokens * self._width(kind) * 2) for _ in range(2)]
            del angles
        normed = block(hidden)
        self._workspaces = self._workspaces or [block(32 * MIB), block(32 * MIB)]
        waiting: dict[int, list[Block]] = {}
        last_reader = {a.producer(layer): layer for layer in range(a.num_hidden_layers)}
        for layer in range(a.num_hidden_layers):
            attended = self._attention(layer, tokens, waiting if chunk else None, last_reader)
            middle = block(hidden)
            added = self._mlp(layer, tokens)
            routed = self._experts(tokens) if a.num_experts else ()
            if a.hidden_size_per_layer_input:
                gates = [block(tokens * a.hidden_size_per_layer_input * BFLOAT16) for _ in range(2)]
                added = block(hidden)
                del gates
            following = block(hidden)
            del attended, middle, added, routed
            normed = following
            del following
        del x, per_layer, rotations, ids
        self._sample(rows)
        del normed

    def _per_layer_inputs(self, tokens: int) -> Block | None:
        a = self._architecture
        if not a.hidden_size_per_layer_input:
            return None
        size = tokens * a.num_hidden_layers * a.hidden_size_per_layer_input * BFLOAT16
        projected, table = self._block(size), self._block(size)
        if self._ranks > 1:
            masked = self._block(size)
            del table
            table = self._block(size)
            del masked
        result = self._block(size)
        del projected, table
        return result

    def _attention(
        self, layer: int, tokens: int, waiting: dict[int, list[Block]] | None, last_reader: dict[int, int]
    ) -> Block:
        a, kind = self._architecture, self._architecture.kind(layer)
        heads, kv_heads = a.num_attention_heads // self._ranks, a.kv_heads_per_rank(kind, self._ranks)
        width, sliding = self._width(kind) * BFLOAT16, kind is LayerKind.SLIDING
        stored = 0 if not a.owns_cache(layer) else 1 if a.k_from_v(layer) else 2
        projected = self._block(tokens * (heads + stored * kv_heads) * width)
        queries = self._block(tokens * heads * width)
        if waiting is not None and sliding and stored:
            waiting[layer] = [self._block(tokens * kv_heads * width) for _ in range(2)]
        output = self._block(tokens * heads * width)
        if waiting is not None and sliding and last_reader[a.producer(layer)] == layer:
            waiting.pop(a.producer(layer))
        del projected, queries
        result = self._block(tokens * a.hidden_size * BFLOAT16)
        del output
        return result

    def _mlp(self, layer: int, tokens: int) -> Block:
        width = self._architecture.layer_intermediate_size(layer) // self._ranks * BFLOAT16
        gate_up, product = self._block(tokens * 2 * width), self._block(tokens * width)
        del gate_up
        result = self._block(tokens * self._architecture.hidden_size * BFLOAT16)
        del product
        return result

    def _experts(self, tokens: int) -> tuple[Block, ...]:
        """Results of every (token, expert), with their weights and where they are."""
        a, block = self._architecture, self._block
        count, width = tokens * a.top_k_experts, a.moe_intermediate_size // self._ranks * BFLOAT16
        weights, experts = block(count * FLOAT32), block(count * INT32)
        entering = block(tokens * a.hidden_size * BFLOAT16)
        places, ends = block(count * INT32), block(a.num_experts * INT32)
        rows, gate_up = block(count * a.hidden_size * BFLOAT16), block(count * 2 * width)
        product = block(count * width)
        del gate_up, rows
        results = block(count * a.hidden_size * BFLOAT16)
        del product, ends, entering
        if self._ranks == 1:
            return results, weights, experts, places
        summed = block(tokens * a.hidden_size * BFLOAT16)
        del results, weights, experts, places
        return (summed,)

    def _sample(self, rows: int) -> None:
        vocabulary, block = self._architecture.vocab_size, partial(Block, self._outside)
        logits = block(rows * vocabulary * BFLOAT16 // self._ranks)
        for first in range(0, rows, ROWS_PER_SORT):
            plane = min(ROWS_PER_SORT, rows - first) * vocabulary
            shares = [block(plane * BFLOAT16 // self._ranks), block(plane * BFLOAT16)] if self._ranks > 1 else []
            kept = [block(plane * BFLOAT16)]
            del shares
            kept += [block(plane * FLOAT32), block(plane * FLOAT32)]
            penalties = [block(plane * FLOAT32) for _ in range(4)]
            del penalties
            ordered = [block(plane * FLOAT32), block(plane * INT64)]
            words = (FLOAT32, FLOAT32, INT64, INT64, INT64)  # of the sort itself
            sort = [block(plane * size) for size in words]
            del sort
            masses = [block(plane), *(block(plane * INT64) for _ in range(2)), block(plane)]
            del ordered, masses
            noise = [block(vocabulary * INT64), *(block(plane * INT64) for _ in range(4))]
            del noise, kept
        del logits
