"""Attention of blocks that a drafter computes at once, and the rows that it keeps: kernels against float64, and against
plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from architecture_of import architecture_of

from modelserve.model.architecture import LayerKind
from modelserve.sizing.draft_pages import DraftCache
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout, cache_geometry
from modelserve_worker.attention.draft_rows import PlainDraftRows
from modelserve_worker.attention.kernel_draft_rows import KernelDraftRows
from modelserve_worker.cache.kv_cache import KVCache
from modelserve_worker.drafters.drafter import DraftLayers
from modelserve_worker.kernels.step import Step
from modelserve_worker.step.block_tables import BlockTables

pytestmark = pytest.mark.drawn

SLOTS, LONGEST, WINDOW = 3, 512, 100
# Heads of keys, queries of each, width, rows of a block, window, causal: z-lab's layers, RedHat's and DeepSpec's.
SHAPES = [
    (2, 8, 128, 16, WINDOW, True), (2, 2, 256, 8, None, False), (1, 16, 512, 7, None, True),
    (2, 1, 64, 4, WINDOW, True),
]  # fmt: skip


def shuffled(cache: KVCache, tables: BlockTables, generator: torch.Generator) -> None:
    """Every entry of every slot names a page of its own."""
    table = tables.device[LayerKind.GLOBAL]
    pages = torch.randperm(cache.num_pages[LayerKind.GLOBAL], generator=generator)[: table.numel()]
    table.copy_(pages.view_as(table))


def row_step(positions: list[int], slots: list[int], rings: list[int], device: torch.device) -> Step:
    p, s, r = (torch.tensor(each, dtype=torch.int32, device=device) for each in (positions, slots, rings))
    return Step(p, torch.tensor([len(p)], device=device), s, s, s, None, None, ring_slots=r)


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, causal: bool) -> torch.Tensor:
    """In float64: q [B, Hq, D] of a block, k and v [C + B, H, D], its own rows last -> [B, Hq * D]."""
    block, group = len(q), q.shape[1] // k.shape[1]
    keys, values = (each.double().repeat_interleave(group, 1) for each in (k, v))
    scores = torch.einsum("bhd,chd->hbc", q.double(), keys) * scale
    if causal:
        own = torch.ones(block, block, dtype=torch.bool, device=q.device).triu(1)
        scores[..., len(k) - block :].masked_fill_(own, -torch.inf)
    return torch.einsum("hbc,chd->bhd", scores.softmax(-1), values).flatten(1)


@pytest.mark.parametrize(("heads", "group", "width", "block", "window", "causal"), SHAPES)
def test_blocks_see_what_was_stored_and_themselves(
    heads: int, group: int, width: int, block: int, window: int | None, causal: bool, device: torch.device
) -> None:
    """Slots of short, window-long and long contexts, and one that is padding."""
    generator = torch.Generator().manual_seed(width + block)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    draft = DraftCache(int(window is None), int(window is not None), window or 0, heads, width,
                       element_bytes=dtype.itemsize)  # fmt: skip
    architecture = architecture_of("E2B").model_copy(update={"max_position_embeddings": LONGEST})
    geometry = cache_geometry(
        architecture, dtype=KVCacheDtype.BFLOAT16, layout=KVCacheLayout.KV, tensor_parallel_size=1, draft=draft
    )
    tables = BlockTables(geometry, max_num_seqs=SLOTS, max_model_len=LONGEST, device=device)
    pool = geometry.global_page.page_bytes * (tables.device[LayerKind.GLOBAL].numel() + 3) // 128 * 128
    cache = KVCache(geometry, pool, device=device)
    cache.arena.fill_(0xFF)
    shuffled(cache, tables, generator)
    layers = DraftLayers((window,), (causal,), 0.8 * width**-0.5)
    plain, kernels = (of(layers, cache, tables) for of in (PlainDraftRows, KernelDraftRows))

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    lengths = [5, 230, 171]
    stored: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for slot, length in enumerate(lengths):
        k, v = random(length + 1, heads, width), random(length + 1, heads, width)
        stored[slot] = k[:length], v[:length]
        first = max(0, length - WINDOW - 20)  # as a chunk leaves them: rows of a ring from some place on
        rings = [slot if window is None or at >= first else -1 for at in range(length)]
        step = row_step([*range(length), -1], [slot] * length + [-1], [*rings, -1], device)
        kernels.store(step, [(k, v)])
    slots = torch.tensor([1, -1, 0, 2], dtype=torch.int32, device=device)
    anchors = torch.tensor([400, 0, 5, 333], dtype=torch.int32, device=device)
    slots, anchors = (
        torch.tensor(each, dtype=torch.int32, device=device) for each in ([1, -1, 0, 2], [230, 0, 5, 171])
    )
    q, k, v = (random(4, block, count, width) for count in (heads * group, heads, 2 * heads))
    v = v[:, :, heads:]  # rows may lie apart
    kernels.begin(slots, anchors)
    found = kernels.attend(0, q, k, v)
    assert found.shape == (4, block, heads * group * width)
    close = 2e-5 if dtype == torch.float32 else 1.5e-2
    for i, slot in enumerate(slots.tolist()):
        before = stored[slot] if slot >= 0 else (k[i][:0], v[i][:0])
        first = 0 if window is None else max(0, int(anchors[i]) - window)
        keys, values = (torch.cat((kept[first:], own[i])) for kept, own in zip(before, (k, v), strict=True))
        expected = attended(q[i], keys, values, scale=layers.scale, causal=causal)
        assert torch.allclose(found[i].double(), expected, atol=close, rtol=close)
    for slot, length in enumerate(lengths):  # what plain PyTorch reads is what the kernel stored
        seen = torch.arange(max(0, length - (window or length)), length, device=device)
        for name, kept in zip(("k", "v"), stored[slot], strict=True):
            assert torch.equal(plain._stored(0, name, slot, seen).transpose(0, 1), kept[seen])


@pytest.mark.parametrize("requests", [1, 33])
def test_keys_are_cut_into_parts_where_few_blocks_read_them(requests: int, device: torch.device) -> None:
    """One block's keys are read by many programs, those of many blocks by one each: both are right."""
    generator, dtype = torch.Generator().manual_seed(requests), torch.float32
    draft = DraftCache(1, 0, 0, 4, 32, element_bytes=4)
    architecture = architecture_of("E2B").model_copy(update={"max_position_embeddings": LONGEST})
    geometry = cache_geometry(
        architecture, dtype=KVCacheDtype.BFLOAT16, layout=KVCacheLayout.KV, tensor_parallel_size=1, draft=draft
    )
    tables = BlockTables(geometry, max_num_seqs=1, max_model_len=LONGEST, device=device)
    pool = geometry.global_page.page_bytes * (tables.device[LayerKind.GLOBAL].numel() + 3) // 128 * 128
    cache = KVCache(geometry, pool, device=device)
    cache.arena.fill_(0xFF)
    shuffled(cache, tables, generator)
    layers = DraftLayers((None,), (False,), 0.2)
    plain, kernels = (of(layers, cache, tables) for of in (PlainDraftRows, KernelDraftRows))
    k, v = (torch.randn(300, 4, 32, generator=generator).to(device, dtype) for _ in range(2))
    plain.store(row_step(list(range(300)), [0] * 300, [0] * 300, device), [(k, v)])
    slots = torch.zeros(requests, dtype=torch.int32, device=device)
    anchors = torch.arange(300 - requests + 1, 301, dtype=torch.int32, device=device)
    q, k, v = (torch.randn(requests, 2, heads, 32, generator=generator).to(device, dtype) for heads in (8, 4, 4))
    for each in (plain, kernels):
        each.begin(slots, anchors)
    expected, found = (each.attend(0, q, k, v) for each in (plain, kernels))
    assert torch.allclose(found, expected, atol=2e-5, rtol=2e-5)
