"""The planner's concurrency against a brute-force page simulation: n requests fit exactly when n <= floor of it."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from page_simulation import SimulatedKind, SimulatedPool

from modelserve.model.architecture import ModelArchitecture
from modelserve.sizing.pages import CacheGeometry, KVCacheDtype, KVCacheLayout, cache_geometry

ELEMENT = {"float32": 4, "bfloat16": 2, "int8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}


@st.composite
def _models(draw: st.DrawFn) -> dict[str, Any]:
    kv_heads, global_kv_heads = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([1, 2, 4]))
    layers = draw(st.integers(1, 7))
    full = draw(st.sets(st.integers(0, layers - 1), max_size=layers))
    shared = draw(st.integers(0, layers - 1))
    owners = range(layers - shared)
    kinds = {index in full for index in owners}
    if any((index in full) not in kinds for index in range(layers - shared, layers)):
        shared = 0
    return {
        "num_hidden_layers": layers,
        "full_attention_layers": tuple(sorted(full)),
        "num_kv_shared_layers": shared,
        "num_attention_heads": 8,
        "num_key_value_heads": kv_heads,
        "num_global_key_value_heads": global_kv_heads,
        "head_dim": draw(st.sampled_from([2, 6, 16, 40])),
        "global_head_dim": draw(st.sampled_from([4, 16, 64])),
        "attention_k_eq_v": draw(st.booleans()),
        "sliding_window": draw(st.integers(1, 200)),
        "max_position_embeddings": 4096,
        "hidden_size": 16,
        "intermediate_size": 16,
        "vocab_size": 64,
    }


def _simulated(model: dict[str, Any], *, dtype: str, layout: str, tp: int) -> tuple[SimulatedKind, SimulatedKind]:
    """The same cache in the simulation's own terms."""
    owners = range(model["num_hidden_layers"] - model["num_kv_shared_layers"])
    full = sum(1 for index in owners if index in model["full_attention_layers"])
    element, scale = ELEMENT[dtype], 2 if dtype == "int8" else 0
    width, columns = model["head_dim"], model["global_head_dim"]
    kept = {"kv": (columns, columns), "v_only": (columns,)}[layout]
    return (
        SimulatedKind(
            full,
            max(1, model["num_global_key_value_heads"] // tp),
            tuple((count, element, scale) for count in kept),
            page_tokens=64,
        ),
        SimulatedKind(
            len(owners) - full,
            max(1, model["num_key_value_heads"] // tp),
            ((width, element, scale), (width, element, scale)),
            page_tokens=32,
        ),
    )


@given(data=st.data(), model=_models(), tp=st.sampled_from([1, 2, 4, 8]), dtype=st.sampled_from(sorted(ELEMENT)))
def test_n_requests_fit_exactly_up_to_the_planned_concurrency(
    data: st.DataObject, model: dict[str, Any], tp: int, dtype: str
) -> None:
    layout = data.draw(st.sampled_from(["kv", "v_only"] if model["attention_k_eq_v"] else ["kv"]))
    geometry = _geometry(model, dtype=dtype, layout=layout, tp=tp)
    full, sliding = _simulated(model, dtype=dtype, layout=layout, tp=tp)
    assert (geometry.global_page.page_bytes, geometry.sliding_page.page_bytes) == (
        full.page_bytes(),
        sliding.page_bytes(),
    )
    length = data.draw(st.integers(1, 500), label="length")
    pool_bytes = data.draw(st.integers(1, 12 * geometry.held_bytes(length)), label="pool")
    pool = SimulatedPool(pool_bytes, full, sliding, model["sliding_window"])
    # A history before: requests of other lengths come and go, in any order, and some do not fit.
    for name, other in enumerate(data.draw(st.lists(st.integers(1, 400), max_size=6), label="history")):
        pool.grow(-1 - name, other)
    for name in data.draw(st.permutations(sorted(pool.requests)), label="leaving"):
        pool.finish(name)
    assert pool.free == pool_bytes
    promised = int(geometry.concurrency(pool_bytes, length))
    assert promised == geometry.requests(pool_bytes, length)
    # They grow side by side, by chunks of any size, as a scheduler would let them.
    step = data.draw(st.integers(1, length), label="step")
    for reached in (*range(step, length, step), length):
        for name in range(promised):
            assert pool.grow(name, reached), f"request {name} of {promised} does not reach {reached} tokens"
    assert not pool.grow(promised, length), f"{promised + 1} requests of {length} tokens fit, {promised} are planned"


@given(model=_models(), pool_bytes=st.integers(1, 400_000))
def test_the_longest_request_is_what_the_simulation_can_grow_to(model: dict[str, Any], pool_bytes: int) -> None:
    if not model["full_attention_layers"] or 0 not in model["full_attention_layers"]:
        model = model | {"full_attention_layers": (0, *model["full_attention_layers"]), "num_kv_shared_layers": 0}
    geometry = _geometry(model, dtype="bfloat16", layout="kv", tp=1)
    longest = geometry.longest_request(pool_bytes)
    full, sliding = _simulated(model, dtype="bfloat16", layout="kv", tp=1)
    if longest > 3000:
        return
    for length, fits in ((longest, True), (longest + 1, False)):
        pool = SimulatedPool(pool_bytes, full, sliding, model["sliding_window"])
        assert pool.grow(0, length) is fits


def _geometry(model: dict[str, Any], *, dtype: str, layout: str, tp: int) -> CacheGeometry:
    return cache_geometry(
        ModelArchitecture.model_validate(model),
        dtype=KVCacheDtype(dtype),
        layout=KVCacheLayout(layout),
        tensor_parallel_size=tp,
    )
