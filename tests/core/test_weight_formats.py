"""Weight formats: their bytes against published figures, how a config.json states them, and what is said of them."""

from __future__ import annotations

import pytest
from architecture_of import architecture_of
from pydantic import ValidationError

from modelserve.api import ModelServeSpec
from modelserve.errors import InvalidInput
from modelserve.hardware import CATALOGUE
from modelserve.model.weight_format import (
    MatrixFormat,
    MixedLinears,
    ScaleType,
    StoredType,
    TextLinear,
    WeightFormat,
    int4,
)
from modelserve.planning import AcceleratorOffer, plan
from modelserve.published import published_assistant, published_model
from modelserve.sizing.weights.quantised_tiles import int8_matrix_bytes, nvfp4_matrix_bytes
from modelserve.sizing.weights.text import (
    WeightTensor,
    layer_tensors,
    tensor_parallel_problem,
    weight_bytes,
    weight_terms,
)

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


NVFP4 = WeightFormat(stored=StoredType.NVFP4, scales="group", group_size=16)
INT8_CHANNEL = WeightFormat(stored=StoredType.INT8, scales="channel")


def test_bytes_of_a_row_in_each_format() -> None:
    """2,112 inputs, 26B-A4B's MLP: 8.25 tiles of 256 and 16.5 of 128."""
    rows, inputs = 2816, 2112
    tensor = WeightTensor("linear", rows, inputs, linear=TextLinear.DOWN)

    def of_row(stored: WeightFormat) -> tuple[float, ...]:
        return tuple(size / rows for size in tensor.allocations(stored, dense_element=2))

    eight_bits = WeightFormat(stored=StoredType.INT8, scales="group", group_size=32, scale_type=ScaleType.FLOAT16)
    wide = int4(32, symmetric=False).model_copy(update={"scale_type": ScaleType.FLOAT32})
    assert of_row(NVFP4) == (1056, 132, 4)
    assert of_row(INT8_CHANNEL) == (2112, 4)
    assert of_row(eight_bits) == (2112, 66 * 2)
    assert of_row(wide) == (1056, 66 * 4, 33)
    assert nvfp4_matrix_bytes(rows=rows, inputs=inputs) == rows * (9 * 144 + 4)
    assert int8_matrix_bytes(rows=rows, inputs=inputs, scale_bytes=4) == rows * (17 * 128 + 4)


def test_nvfp4_of_31bs_mlp_is_the_published_size() -> None:
    """nvidia/Gemma-4-31B-IT-NVFP4: the MLP in NVFP4 and the rest in bfloat16 are 32.7 GB with the tower's 1.1."""
    left = (TextLinear.QKV, TextLinear.OUTPUT)
    size = weight_bytes(
        architecture_of("31B"), tensor_parallel_size=1, weight_format=NVFP4.model_copy(update={"dense": left})
    )
    assert 31.3e9 < size < 32.7e9


def test_a_linear_layer_may_have_a_format_of_its_own() -> None:
    architecture, own = architecture_of("31B"), (TextLinear.QKV, TextLinear.OUTPUT)
    by_row = MatrixFormat(stored=StoredType.INT8, scales="channel")
    mixed = NVFP4.model_copy(update={"mixed": (MixedLinears(linears=own, format=by_row),)})
    assert str(mixed) == "nvfp4 with int8_channel for qkv, o"
    assert WeightFormat.model_validate_json(mixed.model_dump_json(by_alias=True)) == mixed
    assert mixed.of(TextLinear.QKV) is StoredType.INT8
    assert mixed.of(TextLinear.DOWN) is StoredType.NVFP4
    assert mixed.of(None) is StoredType.BFLOAT16
    of_all = weight_terms(architecture, tensor_parallel_size=1, weight_format=NVFP4)["linear"]
    of_mixed = weight_terms(architecture, tensor_parallel_size=1, weight_format=mixed)["linear"]
    assert of_mixed - of_all == attention_in(INT8_CHANNEL) - attention_in(NVFP4) > 0


def attention_in(stored: WeightFormat) -> int:
    return sum(
        sum(tensor.allocations(stored, dense_element=2))
        for layer in range(architecture_of("31B").num_hidden_layers)
        for tensor in layer_tensors(architecture_of("31B"), layer, 1)
        if tensor.linear in (TextLinear.QKV, TextLinear.OUTPUT)
    )


@pytest.mark.parametrize(
    "stored",
    [
        {"stored": "nvfp4", "scales": "group", "group_size": 32},
        {"stored": "int8", "scales": "tensor"},
        {"stored": "int8", "scales": "channel", "symmetric": False},
        {"stored": "fp8", "scales": "channel", "scale_type": "float16"},
        {"stored": "bfloat16", "mixed": [{"linears": ["o"], "format": {"stored": "int8", "scales": "channel"}}]},
        {"stored": "nvfp4", "scales": "group", "group_size": 16, "dense": ["o"],
         "mixed": [{"linears": ["o"], "format": {"stored": "int8", "scales": "channel"}}]},
    ],
)  # fmt: skip
def test_what_no_checkpoint_can_hold_is_no_format(stored: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        WeightFormat.model_validate(stored)


def test_a_format_of_earlier_releases_is_written_as_they_read_it() -> None:
    """With extra fields forbidden: they refuse what they do not know."""
    known = {"stored", "scales", "groupSize", "symmetric", "activationOrder", "fp8Activations", "dense"}
    assert set(int4(32).model_dump(by_alias=True)) == known
    assert set(FP8_BLOCK.model_dump(by_alias=True)) == known


def test_nvfp4_splits_by_whole_groups() -> None:
    """704 / 8 = 88 is 5.5 groups of 16."""
    moe = architecture_of("26B-A4B")
    assert tensor_parallel_problem(moe, 4, weight_format=NVFP4) is None
    assert "16, the NVFP4 group" in (tensor_parallel_problem(moe, 8, weight_format=NVFP4) or "")
    assert tensor_parallel_problem(moe, 8, weight_format=INT8_CHANNEL) is None
