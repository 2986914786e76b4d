"""Weight formats: their bytes against published figures, how a config.json states them, and what is said of them."""

from __future__ import annotations

import pytest
from architecture_of import architecture_of

from modelserve.api import ModelServeSpec
from modelserve.errors import InvalidInput
from modelserve.hardware import CATALOGUE
from modelserve.model.weight_format import StoredType, WeightFormat, int4
from modelserve.planning import AcceleratorOffer, plan
from modelserve.published import published_assistant, published_model
from modelserve.sizing.weights.text import tensor_parallel_problem, weight_bytes, weight_terms

FP8_CHANNEL = WeightFormat(stored=StoredType.FP8, scales="channel")
FP8_BLOCK = WeightFormat(stored=StoredType.FP8, scales="block")


def test_the_published_figures_of_31b() -> None:
    """Linear layers and the bfloat16 embedding: 19,292,356,608 bytes in INT4, 32,105,299,968 in FP8 without scales."""
    packed = weight_terms(architecture_of("31B"), tensor_parallel_size=1, weight_format=int4(32))
    assert packed["linear"] + packed["embedding"] == 19_292_356_608
    fp8 = weight_terms(architecture_of("31B"), tensor_parallel_size=1, weight_format=FP8_CHANNEL)
    mlp_rows, sliding_rows, global_rows = 2 * 21_504 + 5376, 32 * 256 + 2 * 16 * 256 + 5376, 32 * 512 + 4 * 512 + 5376
    scales = 4 * (60 * mlp_rows + 50 * sliding_rows + 10 * global_rows)
    assert fp8["linear"] - scales + fp8["embedding"] == 32_105_299_968
    assert packed["other"] == fp8["other"] == 2 * (1_331_456 + 60)  # norms, and one scalar per layer


@pytest.mark.parametrize("variant", ["E2B", "E4B", "12B", "31B"])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_ranks_share_a_quantised_model(variant: str, tp: int) -> None:
    architecture = architecture_of(variant)
    whole, shared = (weight_bytes(architecture, tensor_parallel_size=size, weight_format=int4(32)) for size in (1, tp))
    assert whole <= shared * tp < whole * 2
    assert whole < weight_bytes(architecture, tensor_parallel_size=1)


def test_what_is_not_quantised_is_held_as_it_is_computed() -> None:
    """Computing in float32 doubles the embedding and the norms, and no packed byte."""
    exact = architecture_of("E2B").model_copy(update={"dtype": "float32"})
    half, single = (
        weight_terms(each, tensor_parallel_size=1, weight_format=int4(32)) for each in (architecture_of("E2B"), exact)
    )
    assert single["embedding"] == 2 * half["embedding"]
    assert single["linear"] == half["linear"]


def test_int4_experts_split_by_whole_groups() -> None:
    """704 / 2 = 352 is 11 groups of 32; 704 / 4 = 176 is 5.5."""
    moe = architecture_of("26B-A4B")
    assert tensor_parallel_problem(moe, 2, weight_format=int4(32)) is None
    assert tensor_parallel_problem(moe, 4) is None
    problem = tensor_parallel_problem(moe, 4, weight_format=int4(32))
    assert problem == (
        "tensor parallel size 4 leaves 176 of moe_intermediate_size 704 per rank, which is not a multiple of 32, "
        "the INT4 group"
    )
    with pytest.raises(InvalidInput, match="INT4 group"):
        weight_bytes(moe, tensor_parallel_size=4, weight_format=int4(32))


def test_the_published_int4_models_are_planned() -> None:
    facts = published_model("hf://google/gemma-4-31B-it-qat-w4a16-ct")
    assert facts is not None
    assert facts.format == int4(32)
    assert 19.3e9 < facts.weight_bytes < 24e9  # 23.3 GB as published, with towers and a head beside the embedding
    assert published_model("hf://google/gemma-4-26B-A4B-it-qat-w4a16-ct") is None
    spec = ModelServeSpec.model_validate({"model": {"uri": "hf://google/gemma-4-31B-it-qat-w4a16-ct"}})
    offers = [AcceleratorOffer(CATALOGUE["NVIDIA-A100-SXM4-80GB"], 1)]
    planned = plan(spec, facts.architecture, offers, weight_format=facts.format)
    assert planned.fits
    assert planned.per_gpu is not None
    assert 18 < planned.per_gpu.weights_bytes / 2**30 < 18.5


def test_a_published_drafter_is_counted() -> None:
    facts = published_assistant("hf://google/gemma-4-31B-it-assistant")
    assert facts is not None
    assert facts.weight_bytes == 939_037_184
    assert published_assistant("hf://google/gemma-4-99B-it-assistant") is None
    architecture, offers = architecture_of("31B"), [AcceleratorOffer(CATALOGUE["NVIDIA-H200"], 1)]
    model = {"model": {"uri": "hf://google/gemma-4-31B-it"}}
    with_drafter = model | {"drafter": {"uri": "hf://google/gemma-4-31B-it-assistant"}}
    weights = []
    for document in (model, with_drafter):
        planned = plan(ModelServeSpec.model_validate(document), architecture, offers)
        assert planned.per_gpu is not None
        weights.append(planned.per_gpu.weights_bytes)
    assert weights[1] - weights[0] == 939_037_184 + 8, "and a scalar of each layer"
