"""Geometry and weights: published parameter counts, tensor-parallel shares, and nonsense configs."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import pytest
from architecture_of import architecture_of
from hypothesis import given
from hypothesis import strategies as st

from modelserve.errors import InvalidInput, UnsupportedModel
from modelserve.model.architecture import ModelArchitecture
from modelserve.published import published_model, published_uris
from modelserve.sizing.weights.text import parameters_per_rank, tensor_parallel_problem, weight_bytes

DATA = json.loads(files("modelserve").joinpath("data/gemma4.json").read_text())
VARIANTS = ["E2B", "E4B", "12B", "26B-A4B", "31B"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_are_the_published_parameters(variant: str) -> None:
    """The published counts leave out one buffer per layer, layer_scalar, which a checkpoint holds and the GPU too."""
    architecture = architecture_of(variant)
    published = DATA["variants"][variant]["parameters"]
    assert parameters_per_rank(architecture, tensor_parallel_size=1) == published + architecture.num_hidden_layers


@pytest.mark.parametrize(
    ("variant", "gib"),
    [
        ("31B", (57.2, 28.6, 14.3, 7.2)),
        ("26B-A4B", (47.0, 23.5, 11.8, 5.9)),
        ("12B", (22.2, 11.1, 5.6, 2.8)),
        ("E4B", (13.9, 7.0, 3.6, 1.9)),
        ("E2B", (8.6, 4.4, 2.2, 1.2)),
    ],
)
def test_weights_per_rank(variant: str, gib: tuple[float, ...]) -> None:
    """Independent figures to a tenth of a GiB; small models shrink less than 1/TP, since KV heads replicate."""
    shares = [weight_bytes(architecture_of(variant), tensor_parallel_size=tp) / 2**30 for tp in (1, 2, 4, 8)]
    assert [round(share, 1) for share in shares] == list(gib)


def test_a_share_is_never_below_an_even_one() -> None:
    for variant in VARIANTS:
        whole = weight_bytes(architecture_of(variant), tensor_parallel_size=1)
        for tp in (2, 4, 8):
            assert weight_bytes(architecture_of(variant), tensor_parallel_size=tp) * tp > whole


@pytest.mark.parametrize(("tp", "says"), [(3, "num_attention_heads 32"), (64, "num_attention_heads 32")])
def test_a_size_that_does_not_divide_is_refused(tp: int, says: str) -> None:
    assert says in (tensor_parallel_problem(architecture_of("31B"), tp) or "")
    with pytest.raises(InvalidInput, match=says):
        weight_bytes(architecture_of("31B"), tensor_parallel_size=tp)


def test_experts_need_aligned_shares() -> None:
    narrow = architecture_of("26B-A4B").model_copy(update={"moe_intermediate_size": 40})
    assert tensor_parallel_problem(narrow, 1) is None
    assert "moe_intermediate_size 40" in (tensor_parallel_problem(narrow, 2) or "")


def test_published_names() -> None:
    assert len(published_uris()) == 14  # five sizes in two forms, and INT4 of all but 26B-A4B
    for name in ("hf://google/gemma-4-31B-it-assistant", "hf://google/gemma-3-27b-it", "hf://me/gemma-4-31B-it", "x"):
        assert published_model(name) is None
    base, tuned = (published_model(f"hf://google/gemma-4-31B{form}") for form in ("", "-it"))
    assert base is not None
    assert tuned is not None
    assert (base.architecture.eos_token_ids, tuned.architecture.eos_token_ids) == ((1,), (1, 106, 50))


def test_variants_differ_where_they_should() -> None:
    e2b, moe, large = (architecture_of(name) for name in ("E2B", "26B-A4B", "31B"))
    assert (e2b.producer(34), e2b.producer(33), e2b.layer_intermediate_size(34)) == (14, 13, 12288)
    assert (moe.num_experts, moe.top_k_experts) == (128, 8)
    assert large.k_from_v(5)
    assert not large.k_from_v(4)


_CONFIG = {
    "model_type": "gemma4",
    "text_config": {
        "num_hidden_layers": 3, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "sliding_window": 8, "max_position_embeddings": 512, "vocab_size": 256,
    },
}  # fmt: skip
_VALUES = st.none() | st.booleans() | st.integers(-4, 1 << 40) | st.floats() | st.text(max_size=8) | st.lists(
    st.integers() | st.text(max_size=4), max_size=4
)  # fmt: skip


def test_another_model_is_told_apart_from_a_broken_one() -> None:
    with pytest.raises(UnsupportedModel, match="llama"):
        ModelArchitecture.from_config({"model_type": "llama"})
    with pytest.raises(InvalidInput, match="layer_types") as raised:
        ModelArchitecture.from_config({"model_type": "gemma4", "text_config": {}})
    assert not isinstance(raised.value, UnsupportedModel)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"dtype": "float16"}, "dtype 'float16' is not supported; this release serves bfloat16, float32"),
        ({"attention_bias": True}, "attention_bias True is not supported; this release serves False"),
    ],
    ids=["float16", "bias"],
)
def test_a_setting_that_is_not_served_is_no_broken_checkpoint(setting: dict[str, Any], says: str) -> None:
    """Fetching it again, the remedy of an InvalidCheckpoint, would not help."""
    with pytest.raises(UnsupportedModel, match=says):
        ModelArchitecture.from_config({"model_type": "gemma4", "text_config": {**_CONFIG["text_config"], **setting}})


@given(
    changes=st.dictionaries(
        st.sampled_from([*_CONFIG["text_config"], "num_kv_shared_layers", "rope_parameters", "enable_moe_block"]),  # type: ignore[misc]
        _VALUES,
        min_size=1,
        max_size=3,
    )
)
def test_nonsense_in_a_config_is_read_or_refused(changes: dict[str, Any]) -> None:
    text = {**_CONFIG["text_config"], **changes}  # type: ignore[dict-item]
    try:
        architecture = ModelArchitecture.from_config({"model_type": "gemma4", "text_config": text})
    except InvalidInput:
        return  # refused in words; any other exception fails the test
    assert parameters_per_rank(architecture, tensor_parallel_size=1) > 0
