"""What matrices hold in the order of the kernels, and what their products hold beside it, is what sizing counts."""

from __future__ import annotations

import pytest
import torch
from architecture_of import architecture_of
from rank_of import rank_of

from modelserve.model.architecture import ModelArchitecture
from modelserve.model.weight_format import MatrixFormat, MixedLinears, StoredType, TextLinear, WeightFormat, int4
from modelserve.sizing.activation import activation_terms
from modelserve.sizing.backends.resolve import Formats, resolve, takes_model
from modelserve.sizing.backends.table import Operation
from modelserve.sizing.cuda_graphs import CUDA_GRAPH_NODE_BYTES, graphs_bytes
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout
from modelserve.sizing.weights.quantised_tiles import SPLIT_SUM_BYTES, tile_padding_bytes
from modelserve.sizing.weights.text import SEGMENT_BYTES, weight_bytes
from modelserve_worker.kernels.operations import Operations
from modelserve_worker.kernels.products.linear_tiles import SharedBuffers
from modelserve_worker.layers.parallel import TensorParallel
from modelserve_worker.layers.placement import Placement
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM

FP8 = WeightFormat(stored="fp8", scales="channel", fp8_activations=True)
HALF = WeightFormat(stored="int4", scales="group", group_size=128, symmetric=False, scale_type="float16")
FP8_BLOCK = WeightFormat(stored="fp8", scales="block")
INT8 = WeightFormat(stored="int8", scales="channel")
INT8_GROUPS = WeightFormat(stored="int8", scales="group", group_size=16, scale_type="float16")


@pytest.mark.parametrize(
    ("name", "size", "stored", "padded"),
    [
        ("31B", 2, int4(32), False),
        ("E4B", 1, int4(128, symmetric=False), False),
        ("31B", 1, HALF, False),
        ("31B", 8, int4(32), True),  # 2,688 inputs of a rank's share are ten and a half tiles
        ("26B-A4B", 2, int4(32, symmetric=False), True),
        ("26B-A4B", 1, FP8_BLOCK, True),  # the experts' 704 rows are five and a half blocks
        ("31B", 1, FP8, False),
        ("31B", 1, INT8, False),
        ("26B-A4B", 1, INT8_GROUPS, True),  # 704 inputs are five and a half tiles
    ],
)
def test_repacked_matrices(name, size, stored, padded) -> None:
    parallel = TensorParallel(rank=size - 1, size=size)
    whole = architecture_of(name, form="").model_dump()
    architecture = ModelArchitecture.model_validate(
        whole | {"full_attention_layers": (1,), "num_hidden_layers": 2, "num_kv_shared_layers": 0}
    )
    meta = torch.device("meta")
    operations = Operations(resolve(80, architecture, Formats(stored), ranks=size), meta)
    model = Gemma4ForCausalLM(architecture, Placement(meta, torch.bfloat16, parallel, stored, operations))
    for _, matrix in model.stored_matrices():
        matrix.repack()
    arguments = {"tensor_parallel_size": size, "weight_format": stored}
    padding = tile_padding_bytes(architecture, **arguments)
    assert model.parameter_bytes() == weight_bytes(architecture, **arguments) + padding
    assert (padding > 0) == padded
    assert padding < 0.16 * model.parameter_bytes()


def terms(stored: WeightFormat | None, *, tokens: int, on_cpu: bool = False, dtype: str = "bfloat16") -> dict[str, int]:
    architecture = architecture_of("31B", form="")
    settings = rank_of(
        architecture, max_num_batched_tokens=tokens, max_num_seqs=8, on_cpu=on_cpu,
        kv_dtype=KVCacheDtype(dtype), kv_layout=KVCacheLayout.V_ONLY, weight_format=stored,
    )  # fmt: skip
    always, _ = activation_terms(architecture.model_copy(update={"dtype": dtype}), settings)
    return dict(always)


def test_what_products_hold_on_a_gpu_and_on_a_cpu() -> None:
    sums = SharedBuffers(torch.device("cpu")).split_sums
    assert sums.parts.nbytes + sums.arrivals.nbytes == SPLIT_SUM_BYTES
    assert terms(int4(32), tokens=128)["products"] == SPLIT_SUM_BYTES
    block = SharedBuffers(torch.device("meta")).dequantised_block
    assert terms(int4(32), tokens=2048)["products"] == SPLIT_SUM_BYTES + block.nbytes
    assert terms(INT8, tokens=128)["products"] == SPLIT_SUM_BYTES
    assert terms(INT8_GROUPS, tokens=2048)["products"] == SPLIT_SUM_BYTES + block.nbytes
    assert terms(FP8, tokens=8192)["products"] == SPLIT_SUM_BYTES + 8192 * (21504 + 4)
    assert terms(FP8_BLOCK, tokens=8192)["products"] == SPLIT_SUM_BYTES
    assert "products" not in terms(None, tokens=8192)
    architecture = architecture_of("31B", form="")
    assert terms(HALF, tokens=128) == terms(int4(128, symmetric=False), tokens=128)
    for plain in (terms(int4(32), tokens=64, on_cpu=True), terms(int4(16), tokens=64)):
        assert "products" not in plain
        assert plain["dequantised"] > 43008 * 5376 * 2
    assert not takes_model(architecture.model_copy(update={"dtype": "float32"}))


def test_matrices_that_no_kernel_takes_are_dequantised_beside_others() -> None:
    """In a workspace of the largest of them, whatever the rest is."""
    small_groups = MatrixFormat(stored=StoredType.INT4, scales="group", group_size=16)
    mixed = int4(32).model_copy(update={"mixed": (MixedLinears(linears=(TextLinear.OUTPUT,), format=small_groups),)})
    held = terms(mixed, tokens=128)
    largest = 5376 * 32 * 512  # of layers with global attention
    assert held["products"] == SPLIT_SUM_BYTES
    assert held["dequantised"] == -(-(largest * 5 // 2) // SEGMENT_BYTES) * SEGMENT_BYTES
    assert "products" not in terms(mixed, tokens=128, on_cpu=True)
    assert terms(mixed, tokens=128, on_cpu=True)["dequantised"] > 43008 * 5376 * 2
    architecture = architecture_of("31B", form="")
    table = resolve(90, architecture, Formats(mixed))
    assert not table.of(Operation.LINEAR, TextLinear.OUTPUT, (5376, 16384))[-1].launch
    assert table.of(Operation.LINEAR, TextLinear.DOWN, (5376, 21504))[-1].launch


def test_captured_steps_of_many_rows_have_a_kernel_for_each_block() -> None:
    architecture = architecture_of("31B", form="")

    def nodes(stored: WeightFormat | None, tokens: int) -> int:
        settings = rank_of(architecture, max_num_batched_tokens=tokens, max_num_seqs=8, weight_format=stored)
        return graphs_bytes(architecture, settings) // CUDA_GRAPH_NODE_BYTES

    for symmetric in True, False:
        stored = int4(32, symmetric=symmetric)
        assert nodes(stored, 1024) == nodes(None, 1024), "one kernel for a matrix, on every GPU"
    assert nodes(INT8, 128) == nodes(None, 128)
    assert 60 * 4 < nodes(INT8, 256) - nodes(None, 256) < 60 * 30
    assert nodes(FP8, 64) - nodes(None, 64) == 60 * 4, "the step of 64 rows rounds its inputs, those of 1 to 8 do not"
