"""MTP assistants as the planner knows them: published shapes and bytes, which model each belongs to, broken configs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from architecture_of import architecture_of
from configs import assistant_config_json

from modelserve.errors import InvalidInput, UnsupportedModel
from modelserve.model.assistant import AssistantArchitecture, pair_problem
from modelserve.published import (
    assistant_of,
    lineage_problem,
    published_assistant,
)
from modelserve.sizing.weights.assistant import assistant_weight_bytes

VARIANTS = ("E2B", "E4B", "12B", "26B-A4B", "31B")


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_published_assistant_has_its_published_bytes_and_fits_its_model_alone(variant: str) -> None:
    """Published are parameters; beside them are a scalar of each layer and, of centroids, the order of tokens."""
    uri = f"hf://google/gemma-4-{variant}-it-assistant"
    facts = published_assistant(uri)
    assert facts is not None
    assistant, published = facts.assistant, facts.weight_bytes
    assert assistant == assistant_of(variant)
    ordering = 4 * 262144 if variant.startswith("E") else 0
    assert assistant_weight_bytes(assistant, tensor_parallel_size=1) == published + 4 * 2 + ordering
    for other in VARIANTS:
        assert (pair_problem(architecture_of(other), assistant) is None) == (other == variant)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_heads_mlps_and_a_dense_head(ranks: int) -> None:
    dense, ordered = assistant_of("31B"), assistant_of("E4B")
    whole = 2 * (3 * 1024 * 5376)
    alone = assistant_weight_bytes(dense, tensor_parallel_size=1)
    shared = assistant_weight_bytes(dense, tensor_parallel_size=ranks)
    assert shared * ranks - alone == pytest.approx((ranks - 1) * whole, rel=0.01)
    assert assistant_weight_bytes(ordered, tensor_parallel_size=ranks) > 262144 * 256 * 2


def test_lineage_is_told_by_names() -> None:
    model, qat = "hf://google/gemma-4-31B-it", "hf://google/gemma-4-31B-it-qat-w4a16-ct"
    assert lineage_problem(model, model + "-assistant") is None
    assert lineage_problem(qat, "/models/gemma-4-31B-it-qat-assistant") is None
    assert "is trained for quantisation" in (lineage_problem(qat, model + "-assistant") or "")
    assert "is not trained for quantisation" in (lineage_problem(model, "/models/x-qat-assistant") or "")


def test_the_trained_assistant_is_read() -> None:
    assistant = AssistantArchitecture.from_config(assistant_config_json())
    assert (assistant.hidden_size, assistant.backbone_hidden_size, assistant.num_centroids) == (128, 128, 0)
    assert AssistantArchitecture.from_config(assistant_config_json() | {"model_type": "gemma4_unified_assistant"})


@pytest.mark.parametrize(("changes", "error", "said"), [
    ({"model_type": "gemma4"}, UnsupportedModel, "model_type 'gemma4' is no MTP assistant"),
    ({"model_type": "eagle3"}, UnsupportedModel, "no MTP assistant"),
    ({"quantization_config": {"bits": 4}}, UnsupportedModel, "weights are quantised"),
    ({"backbone_hidden_size": None}, InvalidInput, "backbone_hidden_size"),
    ({"text_config": {}}, InvalidInput, "lacks 'layer_types'"),
    ({"text_config": 4}, InvalidInput, "drafter: config.json"),
    ({"use_ordered_embeddings": True, "num_centroids": 7}, InvalidInput, "num_centroids 7 does not divide"),
    ({"use_ordered_embeddings": True, "centroid_intermediate_top_k": 4096}, InvalidInput, "is not one of 1..2048"),
])  # fmt: skip
def test_a_broken_config_says_what_is_wrong(changes: dict[str, Any], error: type[Exception], said: str) -> None:
    config = json.loads(json.dumps(assistant_config_json())) | changes
    with pytest.raises(error, match="drafter") as raised:
        AssistantArchitecture.from_config(config)
    assert said in str(raised.value)


def test_layers_with_caches_of_their_own_are_refused() -> None:
    config = json.loads(json.dumps(assistant_config_json()))
    config["text_config"]["num_kv_shared_layers"] = 2
    with pytest.raises(InvalidInput, match="reads its target's caches in all of them"):
        AssistantArchitecture.from_config(config)
