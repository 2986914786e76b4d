"""The table of kernels, for all published models, generations of GPUs and formats: whole, and by hand in places."""

from __future__ import annotations

import itertools
import json

import pytest
from architecture_of import architecture_of
from rank_of import rank_of

from modelserve.errors import InvalidInput
from modelserve.model.architecture import LayerKind
from modelserve.model.weight_format import ScaleType, TextLinear, WeightFormat, dense_format, int4
from modelserve.sizing.backends.launches import decode_launches, layer_calls, layer_launches
from modelserve.sizing.backends.products import DENSE_PRODUCTS
from modelserve.sizing.backends.registry import Matrix
from modelserve.sizing.backends.resolve import Formats, resolve
from modelserve.sizing.backends.table import HEAD, LIBRARY, Backend, Choice, KernelTable, Operation
from modelserve.sizing.kernel_buffers import kernel_buffers
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout

FP8 = WeightFormat(stored="fp8", scales="channel", fp8_activations=True)
INT8 = WeightFormat(stored="int8", scales="channel")
INT8_GROUPS = WeightFormat(stored="int8", scales="group", group_size=32, scale_type="float16")
FP8_BLOCK = WeightFormat(stored="fp8", scales="block")
WEIGHTS = (None, int4(32), int4(128, symmetric=False), int4(16), FP8, FP8_BLOCK, INT8, INT8_GROUPS)
GPUS = (None, 75, 80, 86, 89, 90, 100, 120)


def table(
    variant: str, gpu: int | None, weights: WeightFormat | None = None, kv: str = "bfloat16", ranks: int = 1
) -> KernelTable:
    layout = KVCacheLayout.least(architecture_of(variant))
    return resolve(gpu, architecture_of(variant), Formats(weights, KVCacheDtype(kv), layout), ranks=ranks)


def ranges(choices: tuple[Choice, ...]) -> list[tuple[int | None, str]]:
    return [(choice.most_rows, " ".join(choice.kernels)) for choice in choices]


@pytest.mark.parametrize("variant", ["E2B", "E4B", "12B", "26B-A4B", "31B"])
@pytest.mark.parametrize("gpu", GPUS)
def test_every_operation_of_a_model_has_a_kernel_for_any_number_of_rows(variant: str, gpu: int | None) -> None:
    architecture = architecture_of(variant)
    for weights, kv, ranks in itertools.product(WEIGHTS, ("bfloat16", "int8"), (1, 2)):
        found = table(variant, gpu, weights, kv, ranks)
        for layer in range(architecture.num_hidden_layers):
            for call in layer_calls(architecture, layer, ranks=ranks):
                bounds = [choice.most_rows for choice in found.of(*call)]
                assert bounds[-1] is None, call
                assert sorted(set(bounds[:-1])) == bounds[:-1], call
        assert found.on_kernels == (gpu is not None and gpu >= 80)
        backends = {choice.backend for choice in found.choices}
        assert (Backend.HOPPER in backends) == (gpu == 90)
        if not found.on_kernels:
            assert backends == {Backend.PLAIN}
            assert found.kernels() == frozenset()


def test_one_answer_for_models_that_kernels_do_not_take() -> None:
    """In float32 or with heads that fill no matrix tiles nothing is a kernel of ours, whatever the GPU."""
    for change in ({"dtype": "float32"}, {"head_dim": 96}, {"global_head_dim": 64}):
        architecture = architecture_of("E4B").model_copy(update=change)
        for weights in (None, FP8):
            found = resolve(90, architecture, Formats(weights))
            assert not found.on_kernels
            assert {choice.backend for choice in found.choices} == {Backend.PLAIN}


def test_31b_on_hopper_by_hand() -> None:
    found = table("31B", 90)
    linear = found.of(Operation.LINEAR, TextLinear.GATE_UP, (43_008, 5376))
    assert ranges(linear) == [(32, "linear_rows"), (128, "cluster_rows"), (None, LIBRARY)]
    attended = found.of(Operation.LINEAR, TextLinear.OUTPUT, (5376, 8192))
    assert ranges(attended) == [(32, "linear_rows"), (96, "cluster_rows"), (None, LIBRARY)]
    decode = {kind: ranges(found.of(Operation.DECODE_ATTENTION, kind)) for kind in LayerKind}
    # 256 blocks in the one place of a multiprocessor: rows x 16 heads x 8 parts. Splits of a row go through memory.
    assert decode[LayerKind.SLIDING] == [(2, "sliding_decode"), (None, "decode_stream")]
    assert decode[LayerKind.GLOBAL] == [(None, "global_decode combine")]
    drafted = {kind: ranges(found.of(Operation.VERIFY_ATTENTION, kind)) for kind in LayerKind}
    assert drafted == {  # which read a request's keys once for all of its rows
        LayerKind.SLIDING: [(None, "split_decode combine")],
        LayerKind.GLOBAL: [(None, "split_decode_v_only combine")],
    }
    chunk = {kind: ranges(found.of(Operation.CHUNK_ATTENTION, kind)) for kind in LayerKind}
    assert chunk == {
        LayerKind.SLIDING: [(None, "sliding_chunk")],
        LayerKind.GLOBAL: [(None, "expand_keys global_chunk")],
    }
    few, tens, many = (decode_launches(found, architecture_of("31B"), rows=rows, ranks=1) for rows in (1, 64, 256))
    assert few == {
        "linear_rows": 60 * 4, "prepare": 60, "sliding_decode": 50, "global_decode": 10, "combine": 10,
        "residual_norm": 120,
    }  # fmt: skip
    assert tens == {
        "cluster_rows": 60 * 4, "prepare": 60, "decode_stream": 50, "global_decode": 10, "combine": 10,
        "residual_norm": 120,
    }  # fmt: skip
    assert many == {
        LIBRARY: 60 * 4, "prepare": 60, "decode_stream": 50, "global_decode": 10, "combine": 10, "gated_gelu": 60,
        "residual_norm": 120,
    }  # fmt: skip


@pytest.mark.parametrize(("gpu", "weights", "expected"), [
    (90, int4(32), [(2, "integer_rows"), (32, "linear_rows"), (None, "linear_int4")]),
    (90, int4(128, symmetric=False), [(2, "integer_rows"), (32, "linear_rows"), (None, "linear_int4")]),
    (89, int4(32, symmetric=False), [(1024, "int4_product"), (None, "int4_dequantise library " * 4)]),
    (80, int4(32), [(1024, "int4_product"), (None, "int4_dequantise library " * 4)]),
    (90, int4(16), [(None, "library " * 7)]),
    (90, FP8, [(16, "linear_rows"), (32, "round_precision linear_rows"), (None, "round_inputs library")]),
    (89, FP8, [(16, "fp8_product"), (None, "round_inputs library")]),
    (80, FP8, [(None, "fp8_product")]),
    (90, FP8_BLOCK, [(None, "fp8_product")]),
    (90, INT8, [
        (2, "integer_rows"), (32, "linear_rows"), (128, "int8_product"), (None, "int8_dequantise library " * 4),
    ]),
    (90, INT8_GROUPS, [(2, "integer_rows"), (128, "int8_product"), (None, "int8_dequantise library " * 4)]),
    (90, INT8_GROUPS.model_copy(update={"scale_type": ScaleType.FLOAT32}), [
        (128, "int8_product"), (None, "int8_dequantise library " * 4),
    ]),
    (80, INT8, [(1024, "int8_product"), (None, "int8_dequantise library " * 4)]),
    (80, INT8_GROUPS.model_copy(update={"group_size": 256}), [(None, "library " * 3)]),
], ids=str)  # fmt: skip
def test_products_by_format_and_gpu(gpu: int, weights: WeightFormat, expected: list[tuple[int | None, str]]) -> None:
    found = table("31B", gpu, weights).of(Operation.LINEAR, TextLinear.GATE_UP, (43_008, 5376))
    assert ranges(found) == [(most, kernels.strip()) for most, kernels in expected]


@pytest.mark.parametrize(("symmetric", "kernel"), [(True, "integer_rows"), (False, "int4_product")])
def test_zero_points_want_rows_that_hoppers_copy_engine_reads(symmetric: bool, kernel: str) -> None:
    for outputs, expected in ((1000, kernel), (1008, "integer_rows")):
        matrix = Matrix(TextLinear.DOWN, outputs, 2048, int4(32, symmetric=symmetric), 90)
        assert next(each.name for each in DENSE_PRODUCTS if each.takes(matrix)) == expected


@pytest.mark.parametrize(
    ("quantised", "kernel"),
    [
        (int4(32, symmetric=False), "int4_product"),
        (WeightFormat(stored="nvfp4", scales="group", group_size=16), "nvfp4_product"),
    ],
)
def test_halves_of_gated_matrices_begin_where_hoppers_copy_engine_reads(quantised: WeightFormat, kernel: str) -> None:
    """176 outputs are two halves of 88: the bytes that the second one begins with are no multiple of 16 behind."""
    for outputs, expected in ((176, kernel), (192, "integer_rows")):
        matrix = Matrix(TextLinear.GATE_UP, outputs, 2048, quantised, 90)
        assert next(each.name for each in DENSE_PRODUCTS if each.takes(matrix)) == expected


@pytest.mark.parametrize(("gpu", "ranks", "gate_up", "down"), [
    (90, 1, ("grouped_rows",), ("grouped_rows",)),
    (90, 2, ("grouped_rows",), (LIBRARY, LIBRARY)),  # 352 inputs of a rank are no whole stages
    (80, 1, ("exact_expert_products",), ("exact_expert_products",)),  # PyTorch's would wait for the device
    (89, 2, ("exact_expert_products",), ("exact_expert_products",)),
])  # fmt: skip
def test_grouped_products_of_experts_by_gpu(gpu, ranks, gate_up, down) -> None:
    found, inner = table("26B-A4B", gpu, ranks=ranks), 704 // ranks
    first = found.choose(Operation.GROUPED, TextLinear.EXPERT_GATE_UP, (2 * inner, 2816))
    assert (first.kernels, first.ends.gated) == (gate_up, gpu == 90)
    assert found.choose(Operation.GROUPED, TextLinear.EXPERT_DOWN, (2816, inner)).kernels == down


def test_experts_of_few_rows_find_their_matrices_themselves() -> None:
    found, architecture = table("26B-A4B", 90), architecture_of("26B-A4B")
    always = {"prepare": 1, "add_branches": 1}
    few = {"linear_rows": 4, "route_few": 1, "chosen_rows": 2, "sliding_decode": 1}
    assert layer_launches(found, architecture, 0, rows=2, ranks=1) == always | few
    assert layer_launches(found, architecture, 0, rows=9, ranks=1).keys() >= {"chosen_products", "linear_rows"}
    settling = [each.subject for each in found.choices if each.settles]
    assert settling == [TextLinear.DOWN], "between the router and the experts that it chose, who read that early"
    for gpu, ranks, weights in ((90, 2, None), (80, 1, None), (90, 1, FP8)):  # 352 inputs of a rank: no whole blocks
        kernels = table("26B-A4B", gpu, weights, ranks=ranks).kernels()
        assert "chosen_rows" not in kernels
    always |= {"residual_norm": 1, "route_many": 1, "grouped_rows": 2, "decode_stream": 1}
    beside = always | {"deal_rows": 1}
    assert layer_launches(found, architecture, 0, rows=65, ranks=1) == beside | {"cluster_rows": 2}, (
        "the dense MLP has none of its own"
    )
    assert layer_launches(found, architecture, 0, rows=256, ranks=1) == beside | {LIBRARY: 2}
    many = always | {LIBRARY: 4, "gated_gelu": 1, "deal_slots": 1, "copy_rows": 1}
    assert layer_launches(found, architecture, 0, rows=257, ranks=1) == many


@pytest.mark.parametrize("variant", ["31B", "26B-A4B", "E4B"])
def test_an_unquantised_checkpoint_has_one_table_however_its_format_is_given(variant: str) -> None:
    """As its config.json states it, and as a rank that computes with it knows it."""
    model, stated = architecture_of(variant), Formats(dense_format("bfloat16"))
    for gpu, profile in itertools.product((80, 90), ("fast", "exact")):
        assert resolve(gpu, model, stated, profile) == resolve(gpu, model, Formats(), profile)


def test_eight_bit_sliding_chunks_are_hoppers_where_their_keys_have_room() -> None:
    first, last = table("31B", 90, kv="int8").of(Operation.CHUNK_ATTENTION, LayerKind.SLIDING)
    assert first.kernels == ("expand_window", "sliding_chunk")
    assert first.most_keys == 262_144 * 4 * 640 // (2 * 16 * 256), "of the buffer for expanded keys of global layers"
    assert (last.backend, last.most_keys) == (Backend.TRITON, None)


@pytest.mark.parametrize("gpu", [80, 90, 120])
def test_steps_with_images_are_tritons_in_sliding_layers_and_text_has_rows_of_its_own(gpu: int) -> None:
    found = table("31B", gpu)
    assert ranges(found.of(Operation.SPAN_ATTENTION, LayerKind.SLIDING)) == [(None, "sliding_chunk")]
    assert found.choose(Operation.SPAN_ATTENTION, LayerKind.SLIDING).backend is Backend.TRITON
    with pytest.raises(KeyError):
        found.of(Operation.SPAN_ATTENTION, LayerKind.GLOBAL)


@pytest.mark.parametrize("kv", ["bfloat16", "int8"])
@pytest.mark.parametrize("variant", ["E4B", "26B-A4B", "31B"])
def test_workspaces_are_those_that_sizing_counts(variant: str, kv: str) -> None:
    architecture, found = architecture_of(variant), table(variant, 80, kv=kv)
    layout = KVCacheLayout.least(architecture)
    settings = rank_of(
        architecture, max_num_batched_tokens=64, max_num_seqs=8, kv_dtype=KVCacheDtype(kv), kv_layout=layout
    )
    sized = kernel_buffers(architecture, settings)
    rows = [c.row_bytes for c in found.choices if c.operation is Operation.DECODE_ATTENTION]
    assert 8 * max(rows) == sized["decode_splits"]
    chunk = found.choose(Operation.CHUNK_ATTENTION, LayerKind.GLOBAL)
    assert chunk.workspace_bytes == sized["expanded_keys"]


def test_a_table_can_be_read() -> None:
    found = table("E4B", 90)
    headline, *lines = found.lines()
    assert headline == f"profile fast on compute capability 9.0: {len(lines)} choices, {len(found.kernels())} kernels"
    assert "decode_attention sliding_attention bfloat16, to 31 rows: sliding_decode (hopper)" in lines
    assert "embed bfloat16: embed (triton)" in lines
    shown = json.loads(json.dumps(found.to_json()))
    assert (shown["computeCapability"], shown["profile"], len(shown["choices"])) == ("9.0", "fast", len(lines))
    products = [each for each in shown["choices"] if each["operation"] == "linear"]
    assert products[0] | {"subject": ""} == {
        "operation": "linear", "subject": "", "shape": "262144x2560", "format": "bfloat16", "mostRows": 32,
        "backend": "hopper", "kernels": ["linear_rows"], "launches": 1, "sharedBytes": 227 << 10,
    }  # fmt: skip


def test_a_profile_that_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidInput, match="profile slow: this release has fast and exact"):
        resolve(90, architecture_of("E4B"), Formats(), "slow")  # type: ignore[arg-type]


@pytest.mark.parametrize("variant", ["E4B", "26B-A4B", "31B"])
@pytest.mark.parametrize("gpu", [None, 80, 90, 120])
def test_exact_is_one_kernel_of_an_operation_whatever_the_rows(variant: str, gpu: int | None) -> None:
    for weights, ranks in itertools.product(WEIGHTS, (1, 2)):
        layout = KVCacheLayout.least(architecture_of(variant))
        found = resolve(gpu, architecture_of(variant), Formats(weights, kv_layout=layout), "exact", ranks=ranks)
        assert found.profile == "exact"
        assert all(choice.most_rows is None for choice in found.choices)
        ours = [choice for choice in found.choices if choice.kernels != ("grouped_rows",)]  # which adds in one order
        assert not any(choice.ends.gated for choice in ours)
        assert not {choice.backend for choice in ours} & {Backend.HOPPER, Backend.CUDA}
        fast = resolve(gpu, architecture_of(variant), Formats(weights, kv_layout=layout), ranks=ranks)
        assert {*found.choices} - {*ours} == {each for each in fast.choices if each.kernels == ("grouped_rows",)}
        assert not found.sums_through_peers
        if gpu is not None:
            products = tuple(choice for choice in found.choices if choice.subject == HEAD)
            assert ranges(products) == [(None, "exact_product")]
