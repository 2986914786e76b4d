"""Attention of a layer over random pages, decodes and chunks as launches, and what one of them reads and computes.

Pages lie in random order in an arena; short reads go round several sets of pages, so that no cache serves them. Bytes
are the rows that must be read once, operations those of the permitted pairs of query and key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from modelserve.model.architecture import LayerKind, ModelArchitecture
from modelserve.published import published_model
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout, cache_geometry
from modelserve_worker.kernels.attention import triton_launches as launches
from modelserve_worker.kernels.attention.arguments import LayerPages, StepRows, element_dtype
from modelserve_worker.kernels.attention.bound_kernels import AttentionKernels
from modelserve_worker.kernels.attention.paged_layout import LayerRows, layer_rows
from modelserve_worker.kernels.step import Segments, Step
from modelserve_worker.layers.rotary import RotaryEmbedding

ARENA_BYTES = 3 << 30
UNCACHED_BYTES = 160_000_000  # three times the L2 cache of an H200
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # where nothing is timed, but tried
COMPUTE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32  # Triton's interpreter has no bfloat16 products
SEQUENCES, CHUNKS_AT_MOST = 256, 64  # slots of tables; chunks that a step has room for


def architecture_of(name: str) -> ModelArchitecture:
    facts = published_model(f"hf://google/gemma-4-{name}")
    assert facts is not None
    return facts.architecture


@dataclass
class Layer:
    """One layer of a model over an arena of random rows."""

    architecture: ModelArchitecture
    kind: LayerKind
    dtype: KVCacheDtype
    arena_bytes: int = ARENA_BYTES

    def __post_init__(self) -> None:
        layout = KVCacheLayout.V_ONLY if self.architecture.attention_k_eq_v else KVCacheLayout.KV
        geometry = cache_geometry(self.architecture, dtype=self.dtype, layout=layout, tensor_parallel_size=1)
        spec, is_global = geometry.page(self.kind), self.kind is LayerKind.GLOBAL
        # Pages of this layer alone, so that an arena of this size holds long contexts.
        self.rows: LayerRows = replace(
            layer_rows(geometry, spec.layers[0], pool_bytes=self.arena_bytes),
            origin=self.arena_bytes - spec.layer_bytes if is_global else 0,
            page_stride=-spec.layer_bytes if is_global else spec.layer_bytes,
        )
        self.pages = self.arena_bytes // spec.layer_bytes
        self.heads = self.architecture.num_attention_heads
        self.pairs = self.architecture.global_rotary_pairs
        self.frequencies = RotaryEmbedding(self.architecture, device=DEVICE).inverse_frequencies(self.kind)
        if self.dtype is KVCacheDtype.BFLOAT16:
            self.arena = torch.randn(self.arena_bytes // 2, dtype=torch.bfloat16, device=DEVICE).view(torch.uint8)
        else:  # bytes that are small numbers in every format, scales included
            self.arena = torch.randint(0, 56, (self.arena_bytes,), dtype=torch.uint8, device=DEVICE)
        self.weight = torch.rand(self.rows.width, device=DEVICE).to(COMPUTE)

    def queries(self, tokens: int) -> Tensor:
        return torch.randn(tokens, self.heads, self.rows.width, device=DEVICE).to(COMPUTE) * 0.05

    def tables(self, contexts: Sequence[int], sets: int) -> list[Tensor]:
        held = [min(-(-n // self.rows.page_tokens), self.rows.entries or n) for n in contexts]
        order = torch.randperm(self.pages, device=DEVICE).int()
        made = []
        for number in range(sets):
            table = torch.zeros(SEQUENCES, -(-max(held) // 16) * 16, dtype=torch.int32, device=DEVICE)
            at = number * sum(held)
            for slot, count in enumerate(held):
                table[slot, :count] = order.roll(-at)[:count]
                at += count
            made.append(table)
        return made

    @property
    def row_bytes(self) -> int:
        """Of one position, all planes."""
        return self.rows.heads * self.rows.width * self.dtype.element_bytes * (1 if self.rows.v_only else 2)


def ints(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def decode_calls(
    layer: Layer, contexts: Sequence[int], kernels: AttentionKernels
) -> tuple[list[Callable[[], None]], int]:
    """Calls for one row behind each of `contexts`, each of pages of its own, and the bytes that one reads."""
    rows, count = layer.rows, len(contexts)
    positions, slots = ints([n - 1 for n in contexts]), ints(range(count))
    segments = Segments(slots, positions, torch.ones_like(slots), slots, most=count, most_rows=1)
    step = Step(positions, ints([count]), slots, slots, slots, segments, None)
    q = layer.queries(count)
    output = torch.empty_like(q)
    workspace = torch.empty(count * launches.decode_workspace(rows, query_heads=layer.heads), device=DEVICE)
    rotation = None
    if rows.v_only:
        rotation = launches.tile_turns(
            layer.frequencies, pairs=layer.pairs, keys=kernels.decode_keys, longest=max(contexts), dtype=rows.dtype
        )
    read = sum(min(n, rows.window or n) for n in contexts) * layer.row_bytes
    sets = max(8, min(128, UNCACHED_BYTES // read + 1))
    calls = [
        lambda table=table: kernels.decode(
            q, output, step, pages=LayerPages(rows, table, layer.arena), workspace=workspace,
            key_weight=layer.weight, turns=rotation,
        )
        for table in layer.tables(contexts, sets=sets)
    ]  # fmt: skip
    return calls, read


def chunk_call(layer: Layer, start: int, length: int, kernels: AttentionKernels) -> tuple[Callable[[], None], int]:
    """A call for `length` rows of one request behind `start`, and its operations."""
    rows = layer.rows
    end, rest = start + length, [0] * (CHUNKS_AT_MOST - 1)
    blocks, pages = -(-length // (kernels.chunk_rows // (layer.heads // rows.heads))), -(-end // rows.page_tokens)
    ends = ints([blocks] * CHUNKS_AT_MOST)
    segments = Segments(
        ints([0, *rest]), ints([start, *rest]), ints([length, *rest]), ints([0, *rest]), most=1, most_rows=length,
        sliding_blocks=ends, most_sliding_blocks=blocks, blocks=ends, pages=ints([pages] * CHUNKS_AT_MOST),
        key_rows=ints([0] * CHUNKS_AT_MOST), most_blocks=blocks, most_pages=pages,
    )  # fmt: skip
    at = torch.arange(start, end, device=DEVICE).int()
    step = Step(at, ints([length]), at, at, at, None, segments, (segments,))
    q = layer.queries(length)
    output = torch.empty_like(q)
    shape = (length, rows.heads, rows.width)
    stored = torch.rand(shape, device=DEVICE).to(torch.bfloat16)
    if layer.dtype is not KVCacheDtype.BFLOAT16:
        stored = torch.randint(0, 56, shape, device=DEVICE).to(element_dtype(rows))
    scale = torch.rand(shape[:2], device=DEVICE).half()
    keys = pages * rows.page_tokens + rows.window
    scratch = torch.empty(keys * launches.scratch_per_key(rows, pairs=layer.pairs), dtype=COMPUTE, device=DEVICE)

    def call() -> None:
        kernels.chunk(
            q, output, step, pages=LayerPages(rows, table, layer.arena), fresh=StepRows(stored, stored, scale, scale),
            key_weight=layer.weight, scratch=scratch, inverse_frequencies=layer.frequencies, pairs=layer.pairs,
        )  # fmt: skip

    (table,) = layer.tables([end], sets=1)
    permitted = sum(min(position + 1, rows.window or end) for position in range(start, end))
    return call, 4 * permitted * layer.heads * rows.width
