"""Drafters of the DFlash family as they are read and sized: published configs, what is not served, broken ones."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from architecture_of import architecture_of
from configs import assistant_config_json
from dflash_configs import DFLASH_31B, DSPARK_31B, ZLAB_31B, deepspec_12b, published_configs
from hypothesis import given
from hypothesis import strategies as st

from modelserve.errors import InvalidInput, UnsupportedModel
from modelserve.inspection import read_drafter
from modelserve.model.assistant import AssistantArchitecture
from modelserve.model.drafters.dflash import DFlashArchitecture
from modelserve.model.drafters.reading import drafter_architecture, drafter_pair_problem
from modelserve.model.model_facts import AssistantFacts
from modelserve.published import published_assistant
from modelserve.sizing.draft_pages import DraftCache
from modelserve.sizing.weights.dflash import dflash_ranks_problem, dflash_weight_bytes, draft_cache

PUBLISHED = published_configs()


def _read(config: dict[str, Any]) -> DFlashArchitecture:
    drafter = drafter_architecture(config)
    assert isinstance(drafter, DFlashArchitecture)
    return drafter


def test_zlabs_taps_are_outputs_and_its_embedding_is_scaled() -> None:
    drafter = _read(ZLAB_31B)
    assert drafter.taps == (1, 12, 23, 35, 46, 57)
    assert drafter.scaled_embedding
    assert (drafter.block_rows, drafter.num_drafts, drafter.first_draft_row) == (16, 15, 1)
    assert drafter.layer_windows == (2048,) * 4 + (None,)
    assert drafter.causal == (True,) * 4 + (False,)
    assert (drafter.draft_vocab_size, drafter.has_token_map, drafter.mask_token_id) == (None, False, 4)
    assert drafter.attention_scale == 128**-0.5


def test_speculators_taps_are_inputs_and_its_embedding_is_not_scaled() -> None:
    dflash, dspark = _read(DFLASH_31B), _read(DSPARK_31B)
    assert dflash.taps == dspark.taps == (0, 16, 28, 46, 57)
    assert not dflash.scaled_embedding
    assert (dflash.layer_windows, dflash.causal) == ((None,) * 5, (False,) * 5)
    assert (dspark.layer_windows, dspark.causal) == ((2048,) * 5, (True,) * 5)
    assert (dflash.draft_vocab_size, dflash.has_token_map, dflash.num_drafts) == (32000, True, 7)
    assert (dspark.markov_rank, dspark.has_confidence_head, dspark.confidence_with_markov) == (256, True, True)
    assert _read(DSPARK_31B | {"sample_from_anchor": True}).num_drafts == 8


def test_deepspecs_stack_is_gemmas() -> None:
    drafter = _read(deepspec_12b())
    assert (drafter.stack, drafter.head_dim, drafter.num_key_value_heads, drafter.k_eq_v) == ("gemma4", 512, 1, True)
    assert (drafter.attention_scale, drafter.rotary_pairs, drafter.rope_theta) == (1.0, 64, 1_000_000.0)
    assert (drafter.taps, drafter.num_drafts, drafter.softcap) == ((5, 17, 29, 41, 46), 7, 30.0)
    assert drafter.own_embedding
    assert drafter.draft_vocab_size == drafter.vocab_size
    assert not drafter.has_token_map
    assert _read(deepspec_12b() | {"markov_rank": 0, "enable_confidence_head": False}).markov_rank == 0


@pytest.mark.parametrize(("changes", "windows", "causal"), [
    ({"layer_types": None}, (None,) * 5, (False,) * 5),
    ({"layer_types": None, "dflash_config": {"use_swa": True, "swa_window_size": 512}}, (512,) * 5, (False,) * 5),
    ({"is_causal": False}, (2048,) * 4 + (None,), (False,) * 5),
    ({"dflash_config": {"causal": True}}, (2048,) * 4 + (None,), (True,) * 5),
])  # fmt: skip
def test_windows_and_causality_are_read_as_publishers_mean_them(
    changes: dict[str, Any], windows: tuple[int | None, ...], causal: tuple[bool, ...]
) -> None:
    own = ZLAB_31B["dflash_config"] | changes.get("dflash_config", {})
    drafter = _read(ZLAB_31B | changes | {"dflash_config": own})
    assert (drafter.layer_windows, drafter.causal) == (windows, causal)


def test_a_stated_scale_of_the_embedding_holds() -> None:
    config = copy.deepcopy(ZLAB_31B)
    config["dflash_config"]["input_embedding_scale"] = 1.0
    assert not _read(config).scaled_embedding


def test_zlabs_drafter_has_its_published_parameters() -> None:
    """1.54 billion: five layers' matrices, and the projection of six taps."""
    layers, taps = 5 * (2 * 8192 + 2 * 1024 + 3 * 10752) * 5376, 6 * 5376 * 5376
    norms = 5 * (2 * 5376 + 2 * 128) + 2 * 5376
    assert dflash_weight_bytes(_read(ZLAB_31B), tensor_parallel_size=1) == 2 * (layers + taps + norms)
    assert layers + taps + norms == pytest.approx(1.54e9, rel=0.01)


def test_redhats_file_has_the_published_bytes_with_its_copy_of_the_embedding() -> None:
    ours = dflash_weight_bytes(_read(DSPARK_31B), tensor_parallel_size=1)
    copied, maps = 2 * 262144 * 5376, 4 * 32000 + 262144  # d2t has eight bytes a token there, t2d one of the target's
    assert ours + copied + maps == pytest.approx(8.39e9, rel=0.001)


def test_facts_of_published_drafters_ship() -> None:
    """Those whose configs are known: of others an inspect Job reads them."""
    known = {
        "hf://z-lab/gemma-4-31B-it-DFlash": ("z-lab 31B", 3.07e9),
        "hf://RedHatAI/gemma-4-31B-it-speculator.dflash": ("RedHat dflash 31B", 8.2e9),
        "hf://RedHatAI/gemma-4-31B-it-speculator.dspark": ("RedHat dspark 31B", 8.39e9),
        "hf://deepseek-ai/dspark_gemma4_12b_block7": ("DeepSpec 12B", 6.9e9),
    }
    for uri, (name, stored) in known.items():
        facts = published_assistant(uri)
        assert facts is not None
        assert facts.assistant == _read(PUBLISHED[name][0])
        assert facts.weight_bytes == pytest.approx(stored, rel=0.01)
        assert AssistantFacts.model_validate_json(facts.model_dump_json(by_alias=True)) == facts
    assert published_assistant("hf://z-lab/gemma-4-26B-A4B-it-DFlash") is None


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_drafter_fits_its_model_alone(name: str) -> None:
    config, variant = PUBLISHED[name]
    drafter = _read(config)
    for other in ("E2B", "E4B", "12B", "26B-A4B", "31B"):
        assert (drafter_pair_problem(architecture_of(other), drafter) is None) == (other == variant)


@pytest.mark.parametrize(("name", "rows"), [
    ("z-lab 31B", (1, 4, 2048, 8, 128, False, 2)), ("RedHat dflash 31B", (5, 0, 0, 16, 256, False, 2)),
    ("RedHat dspark 31B", (0, 5, 2048, 16, 256, False, 2)), ("DeepSpec 12B", (5, 0, 0, 1, 512, False, 2)),
])  # fmt: skip
def test_rows_of_the_cache_are_the_layers(name: str, rows: tuple[Any, ...]) -> None:
    """Keys that DeepSpec makes of values are kept as well: attention of blocks makes none."""
    assert draft_cache(_read(PUBLISHED[name][0])) == DraftCache(*rows)


def test_ranks_share_what_can_be_shared() -> None:
    drafter = _read(ZLAB_31B)
    assert [dflash_ranks_problem(drafter, ranks) for ranks in (1, 2, 4, 8)] == [None] * 4
    assert "64 query heads are not shared evenly by 3 GPUs" in (dflash_ranks_problem(drafter, 3) or "")
    whole, half = (dflash_weight_bytes(drafter, tensor_parallel_size=ranks) for ranks in (1, 2))
    unsplit = 2 * (6 * 5376 * 5376 + 12 * 5376 + 10 * 128)
    assert half == pytest.approx((whole - unsplit) / 2 + unsplit, rel=1e-5)


def test_a_directory_says_which_drafter_it_holds(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(assistant_config_json()))
    assert isinstance(read_drafter(tmp_path), AssistantArchitecture)
    (tmp_path / "config.json").write_text(json.dumps(DSPARK_31B))
    assert isinstance(read_drafter(tmp_path), DFlashArchitecture)


_INNER = DFLASH_31B["transformer_layer_config"]


@pytest.mark.parametrize(("config", "changes", "error", "said"), [
    (DFLASH_31B, {"speculators_model_type": "eagle3"}, UnsupportedModel, "EAGLE-3 is not served: it drafts one token"),
    ({}, {"architectures": ["LlamaForCausalLMEagle3"]}, UnsupportedModel, "EAGLE-3 is not served"),
    (DFLASH_31B, {"speculators_model_type": "xpress"}, UnsupportedModel, "'xpress'.*DFlash .z-lab's and speculators'"),
    ({}, {"model_type": "llama"}, UnsupportedModel, "model_type 'llama' .* MTP assistants"),
    (ZLAB_31B, {"quantization_config": {"bits": 4}}, UnsupportedModel, "weights are quantised"),
    (ZLAB_31B, {"hidden_act": "relu"}, UnsupportedModel, "hidden_act 'relu' is not supported; .* silu and gelu"),
    (ZLAB_31B, {"attention_bias": True}, UnsupportedModel, "attention_bias True"),
    (ZLAB_31B, {"is_neox_style": False}, UnsupportedModel, "is_neox_style False"),
    (ZLAB_31B, {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1}}, UnsupportedModel, "rope_type 'yarn'"),
    (ZLAB_31B, {"rope_theta": None}, InvalidInput, "lacks 'rope_theta'"),
    (ZLAB_31B, {"dflash_config": {"target_layer_ids": [1]}}, InvalidInput, "lacks 'mask_token_id'"),
    (ZLAB_31B, {"dflash_config": {"mask_token_id": 4}}, InvalidInput, "lacks 'target_layer_ids'"),
    (ZLAB_31B, {"dflash_config": [1]}, InvalidInput, "dflash_config must be a JSON object"),
    (ZLAB_31B, {"dflash_config": {"mask_token_id": 4, "target_layer_ids": [1, 1]}}, InvalidInput, "a layer twice"),
    (ZLAB_31B, {"dflash_config": {"mask_token_id": 4, "target_layer_ids": [60]}}, InvalidInput, "layer 60 is tapped"),
    (ZLAB_31B, {"dflash_config": {"mask_token_id": 4, "target_layer_ids": [-1]}}, InvalidInput, "taps"),
    (ZLAB_31B, {"layer_types": list("abcde")}, InvalidInput, "layer_types must list 5 layers"),
    (ZLAB_31B, {"sliding_window": None}, InvalidInput, "sliding layers need a sliding_window"),
    (ZLAB_31B, {"num_hidden_layers": 10**12}, InvalidInput, "is not one of 1 to 64"),
    (ZLAB_31B, {"num_attention_heads": 0}, InvalidInput, "num_attention_heads"),
    (ZLAB_31B, {"num_key_value_heads": 7}, InvalidInput, "not a multiple of num_key_value_heads 7"),
    (ZLAB_31B, {"block_size": 1}, InvalidInput, "block_rows"),
    (ZLAB_31B, {"block_size": 65}, InvalidInput, "block_rows"),
    (ZLAB_31B, {"vocab_size": 4}, InvalidInput, "mask_token_id 4 is not a token of 4"),
    (DFLASH_31B, {"transformer_layer_config": None}, InvalidInput, "transformer_layer_config must be"),
    (DFLASH_31B, {"transformer_layer_config": _INNER | {"model_type": "laguna"}}, UnsupportedModel, "'laguna'"),
    (DFLASH_31B, {"aux_hidden_state_layer_ids": [0, 5]}, UnsupportedModel, "names 0, the embedding"),
    (DFLASH_31B, {"aux_hidden_state_layer_ids": None}, InvalidInput, "must list layers of the target"),
    (DFLASH_31B, {"target_hidden_size": 2816}, InvalidInput, "target_hidden_size 2816"),
    (DFLASH_31B, {"draft_vocab_size": 1 << 20}, InvalidInput, "draft_vocab_size 1048576 is above vocab_size"),
    (DSPARK_31B, {"markov_head_type": "rnn"}, UnsupportedModel, "markov_head_type 'rnn'"),
    (DSPARK_31B, {"markov_rank": 0}, InvalidInput, "needs markov_rank above 0"),
    (deepspec_12b(), {"layer_types": ["sliding_attention"] * 5}, UnsupportedModel, "layer_types"),
    (deepspec_12b(), {"enable_moe_block": True}, UnsupportedModel, "enable_moe_block True"),
])  # fmt: skip
def test_what_is_not_served_or_broken_says_so(
    config: dict[str, Any], changes: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match="drafter: ") as raised:
        drafter_architecture(config | changes)
    raised.match(said)


_NONSENSE = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip


@given(data=st.data())
def test_no_config_does_worse_than_be_refused(data: st.DataObject) -> None:
    config = copy.deepcopy(PUBLISHED[data.draw(st.sampled_from(sorted(PUBLISHED)))][0])
    places: list[Callable[[], dict[str, Any]]] = [lambda: config]
    for inner in ("dflash_config", "transformer_layer_config", "rope_parameters"):
        if isinstance(config.get(inner), dict):
            places.append(lambda inner=inner: config[inner])
    for place in data.draw(st.lists(st.sampled_from(places), min_size=1, max_size=3)):
        found = place()
        if isinstance(found, dict) and found:
            found[data.draw(st.sampled_from(sorted(found)))] = data.draw(_NONSENSE)
    try:
        drafter = drafter_architecture(config)
    except InvalidInput:
        return
    else:
        assert isinstance(drafter, AssistantArchitecture) or dflash_weight_bytes(drafter, tensor_parallel_size=1) > 0
