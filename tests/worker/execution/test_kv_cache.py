"""The arena: where pages lie, what rows survive, and what a move copies."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from modelserve.errors import InvalidInput
from modelserve.model.architecture import LayerKind
from modelserve.sizing.pages import KVCacheDtype
from modelserve_worker.batch import PageMove
from modelserve_worker.cache.kv_cache import KVCache
from modelserve_worker.kernels.attention.row_codec import decode_rows, encode_rows

CPU = torch.device("cpu")
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ODD_POOL = (1 << 20) + 128 * 7  # a multiple of 128, and of no page


def _rows(cache: KVCache, layer: int, count: int, *, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    spec = cache.geometry.global_page if layer in cache.geometry.global_page.layers else cache.geometry.sliding_page
    plane = next(p for p in spec.planes if p.name == "v")
    return {name: torch.randn(count, plane.heads, plane.width, generator=generator) for name in cache.planes(layer)}


def _write(cache: KVCache, layer: int, kind: LayerKind, page: int, rows: dict[str, torch.Tensor]) -> None:
    tokens = cache.geometry.page(kind).page_tokens
    slots = cache.page_rows(kind, [page])[0] * tokens + torch.arange(tokens)
    cache.write_rows(layer, slots, {name: cache.encode(values) for name, values in rows.items()})


def _read(cache: KVCache, layer: int, kind: LayerKind, page: int, name: str) -> torch.Tensor:
    table = torch.from_numpy(cache.page_rows(kind, [page]))[None]
    return cache.read_pages(layer, name, table, torch.float32)[0].transpose(0, 1)


@pytest.mark.parametrize("dtype", list(KVCacheDtype))
@pytest.mark.parametrize("variant", ["31b", "e2b"])
def test_a_row_changes_only_its_own_page_and_its_own_bytes(small_architecture, geometry_of, dtype, variant) -> None:
    """Every page of every layer lies inside its documented byte range, and no two blocks overlap."""
    geometry = geometry_of(small_architecture(variant), dtype)
    cache = KVCache(geometry, ODD_POOL, device=CPU)
    written = torch.zeros(ODD_POOL, dtype=torch.int32)
    for spec in (geometry.sliding_page, geometry.global_page):
        for page in (0, 1, cache.num_pages[spec.kind] - 1):
            start = page * spec.page_bytes
            start = start if spec.kind is LayerKind.SLIDING else ODD_POOL - start - spec.page_bytes
            for block, layer in enumerate(spec.layers):
                cache.arena.zero_()
                _write(
                    cache,
                    layer,
                    spec.kind,
                    page,
                    {n: v.abs() + 1 for n, v in _rows(cache, layer, spec.page_tokens).items()},
                )
                changed = cache.arena.nonzero()[:, 0]
                first = start + block * spec.layer_bytes
                assert first <= changed.min()
                assert changed.max() < first + spec.layer_bytes
                if page == 0:
                    written[changed] += 1
    assert written.max() == 1


@pytest.mark.parametrize("dtype", list(KVCacheDtype))
def test_what_is_read_is_what_the_codec_gives(small_architecture, geometry_of, dtype) -> None:
    geometry = geometry_of(small_architecture("31b"), dtype)
    cache = KVCache(geometry, ODD_POOL, device=CPU)
    for kind, layer, page in ((LayerKind.GLOBAL, 5, 2), (LayerKind.SLIDING, 3, 4)):
        rows = _rows(cache, layer, geometry.page(kind).page_tokens)
        _write(cache, layer, kind, page, rows)
        for name, values in rows.items():
            expected = decode_rows(encode_rows(values, dtype), dtype, torch.float32)
            assert torch.equal(_read(cache, layer, kind, page, name), expected)


def test_moves_copy_all_layers_in_order(small_architecture, geometry_of) -> None:
    geometry = geometry_of(small_architecture("e4b"), KVCacheDtype.INT8)
    cache = KVCache(geometry, ODD_POOL, device=CPU, debug_stamps=True)
    for kind in LayerKind:
        spec = geometry.page(kind)
        for layer in spec.layers:
            _write(cache, layer, kind, 3, _rows(cache, layer, spec.page_tokens, seed=layer))
        before = {
            (layer, name): _read(cache, layer, kind, 3, name) for layer in spec.layers for name in cache.planes(layer)
        }
        cache.move([PageMove(kind, 3, 1), PageMove(kind, 1, 0)])
        for (layer, name), values in before.items():
            assert torch.equal(_read(cache, layer, kind, 0, name), values)


def random_moves(cache: KVCache, random: Random, count: int) -> list[PageMove]:
    """Some of which touch what others do, of either kind: both ends' pages lie on the same bytes."""
    kinds = [random.choice(list(LayerKind)) for _ in range(count)]
    pages = [[random.randrange(cache.num_pages[kind]) for _ in "sd"] for kind in kinds]
    return [PageMove(kind, *two) for kind, two in zip(kinds, pages, strict=True)]


def one_by_one(cache: KVCache, moves: list[PageMove]) -> torch.Tensor:
    """What the arena holds after each move has waited for the one before it."""
    arena = cache.arena.cpu().clone()
    for move in moves:
        size = cache.geometry.page(move.kind).page_bytes
        first = 0 if move.kind is LayerKind.SLIDING else cache.pool_bytes - size
        step = size if move.kind is LayerKind.SLIDING else -size
        source, destination = (first + step * page for page in (move.source, move.destination))
        arena[destination : destination + size] = arena[source : source + size].clone()
    return arena


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_moves_at_once_are_moves_one_by_one(device: str, small_architecture, geometry_of) -> None:
    geometry = geometry_of(small_architecture("e4b"), KVCacheDtype.INT8)
    for seed in range(20):
        cache = KVCache(geometry, ODD_POOL, device=torch.device(device))
        cache.arena.copy_(torch.randint(0, 256, cache.arena.shape, dtype=torch.uint8))
        moves = random_moves(cache, Random(seed), 40)
        expected = one_by_one(cache, moves)
        cache.move(moves)
        assert torch.equal(cache.arena.cpu(), expected)


def test_a_window_is_copied_at_once(small_architecture, geometry_of) -> None:
    geometry = geometry_of(small_architecture("e4b"), KVCacheDtype.BFLOAT16)
    cache = KVCache(geometry, ODD_POOL, device=CPU)
    launches: list[int] = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if operation is torch.ops.aten._foreach_copy_.default:
                launches.append(len(args[0]))
            return operation(*args, **kwargs or {})

    half = cache.num_pages[LayerKind.SLIDING] // 4
    with Copies():
        cache.move([PageMove(LayerKind.SLIDING, page, half + page) for page in range(half)])
        cache.move([PageMove(LayerKind.SLIDING, 0, 1), PageMove(LayerKind.SLIDING, 1, 2)])
        cache.move([PageMove(LayerKind.SLIDING, 0, 0)])
    assert launches == [half, 1, 1]


def test_stamps_of_the_other_kind_end_where_a_page_is_written(small_architecture, geometry_of) -> None:
    geometry = geometry_of(small_architecture("31b"))
    cache = KVCache(geometry, ODD_POOL, device=CPU, debug_stamps=True)
    assert cache.stamps is not None
    sliding, last = geometry.sliding_page, cache.num_pages[LayerKind.GLOBAL] - 1
    slots = torch.arange(sliding.page_tokens)
    cache.stamps.write(0, slots, slots)  # sliding page 0 = the arena's first bytes, which the last global page shares
    assert (cache.stamps.read_pages(0, torch.tensor([0])) >= 0).all()
    row = int(cache.page_rows(LayerKind.GLOBAL, [last])[0])
    cache.stamps.write(geometry.global_page.layers[0], torch.tensor([row * 64]), torch.tensor([7]))
    assert (cache.stamps.read_pages(0, torch.tensor([0])) < 0).all()


def test_a_pool_that_is_not_aligned_is_refused(small_architecture, geometry_of) -> None:
    with pytest.raises(InvalidInput, match="not a multiple of 128"):
        KVCache(geometry_of(small_architecture("31b")), 1 << 20 | 1, device=CPU)


def test_a_page_outside_the_arena_is_refused(small_architecture, geometry_of) -> None:
    cache = KVCache(geometry_of(small_architecture("31b")), ODD_POOL, device=CPU)
    for page in (-1, cache.num_pages[LayerKind.GLOBAL]):
        with pytest.raises(InvalidInput, match="outside the arena"):
            cache.page_rows(LayerKind.GLOBAL, [page])


@given(st.lists(st.floats(-3e4, 3e4, width=32), min_size=1, max_size=16))
def test_int8_is_within_half_a_step(values) -> None:
    rows = torch.tensor(values)
    stored = encode_rows(rows, KVCacheDtype.INT8)
    decoded = decode_rows(stored, KVCacheDtype.INT8, torch.float32)
    assert stored.scale is not None
    # Half a step of rounding; float16 rounds the scale by 2^-11, or by 2^-25 below its normal range.
    step = rows.abs().max() / 127
    bound = 0.5 * step + 127 * max(float(step) * 2**-11, 2.0**-25) + 1e-6
    assert (decoded - rows).abs().max() <= bound


@pytest.mark.parametrize(("dtype", "limit"), [(KVCacheDtype.FP8_E4M3, 448.0), (KVCacheDtype.FP8_E5M2, 57344.0)])
def test_fp8_saturates(dtype, limit) -> None:
    rows = torch.tensor([1e6, -1e6, 0.5])
    assert decode_rows(encode_rows(rows, dtype), dtype, torch.float32).tolist() == [limit, -limit, 0.5]


@pytest.mark.parametrize("dtype", list(KVCacheDtype))
def test_encoding_stored_values_again_changes_nothing(dtype) -> None:
    """The property that lets a chunk and a page serve the same rows."""
    rows = torch.randn(64, 2, 32, generator=torch.Generator().manual_seed(1))
    once = decode_rows(encode_rows(rows, dtype), dtype, torch.float32)
    if dtype is not KVCacheDtype.INT8:
        assert torch.equal(decode_rows(encode_rows(once, dtype), dtype, torch.float32), once)
    # int8: a row is encoded alone, so its neighbours cannot change it.
    alone = torch.stack([decode_rows(encode_rows(row, dtype), dtype, torch.float32) for row in rows])
    assert torch.equal(alone, once)
