"""Checkpoints in the published INT4 and FP8 layouts: the logits are those of their elements, dequantised in float64.

The plain products make each element anew in the compute type. In float32 nothing is rounded that the format does not
round, so the logits are the reference's within its own tolerance; in bfloat16 they are, bit for bit, those of a dense
checkpoint that holds the rounded elements. These checkpoints are not made for rounded inputs; `test_stored_matrix.py`
rounds them.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from dense_attention import dense_logits
from model_checkpoints import load_checkpoint, make_checkpoint, random_tokens, read_architecture, reference_logits
from paged_logits import Forced, Traffic, replay
from published_layouts import write_dequantised
from quantise import FORMATS, quantise
from rank_logits import tensor_parallel_logits
from safetensors.torch import load_file, save_file
from torch import Tensor

from modelserve.errors import InvalidInput
from modelserve.inspection import inspect_checkpoint, read_weight_format
from modelserve.model.weight_format import TextLinear
from modelserve.sizing.weights.dequantisation import workspace_bytes
from modelserve.sizing.weights.text import weight_bytes
from modelserve_worker.layers.parallel import TensorParallel
from modelserve_worker.layers.placement import Placement
from modelserve_worker.weights.files import InvalidCheckpoint
from modelserve_worker.weights.loader import load_model

TOLERANCE = 1e-4
IDS = random_tokens(20, seed=20)
# Widths that two ranks can cut in whole groups and blocks; hidden and per-layer sizes end in part of a block.
WIDTHS = {
    "hidden_size": 160, "intermediate_size": 512, "head_dim": 64, "global_head_dim": 128, "num_attention_heads": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
CHANGES: dict[str, dict[str, int]] = {
    "31B": WIDTHS,
    "E2B": WIDTHS | {"hidden_size_per_layer_input": 32},
    "26B-A4B": WIDTHS | {"moe_intermediate_size": 256, "num_global_key_value_heads": 1, "num_experts": 4},
}
GROUPS_OF_32 = ["int4_g32", "int4_g32_asym", "int4_g32_actorder", "int4_g32_asym_actorder"]
FP8 = ["fp8_channel", "fp8_tensor", "fp8_block"]
PACKED_OTHERWISE = ["gptq_g32", "gptq_g32_asym", "gptq_g32_desc_act", "gptq_v2_g32_asym", "awq_g32"]
EIGHT_BITS = ["int8_channel", "int8_g32", "int8_channel_packed", "gptq_8bit_g32", "gptq_8bit"]
NVFP4 = ["nvfp4", "nvfp4_modelopt"]
CASES = [
    *(("31B", name) for name in (*GROUPS_OF_32, *FP8)),
    *(("31B", name) for name in (*PACKED_OTHERWISE, *EIGHT_BITS, *NVFP4, "fp8_block_inv")),
    *(("E2B", name) for name in ("int4_g32", "int4_g32_asym_actorder", *FP8)),
    *(("E2B", name) for name in ("awq_g32", "nvfp4_modelopt")),
    *(("26B-A4B", name) for name in ("int4_g32", "int4_g32_asym", "fused int4_g32", "fused int4_g32_asym", *FP8)),
    *(("26B-A4B", name) for name in ("gptq_g32_asym", "awq_g32", "gptq_8bit_g32", "int8_channel_packed", *NVFP4)),
]
CASES_OF_TWO_RANKS = [
    *(("31B", name) for name in ("int4_g32_asym", "fp8_tensor", "fp8_block")),
    *(("E2B", name) for name in ("int4_g32", "fp8_channel")),
    *(("26B-A4B", name) for name in ("int4_g32", "fused int4_g32_asym", "fp8_block")),
    *(("31B", name) for name in ("gptq_g32_asym", "awq_g32", "gptq_8bit_g32", "nvfp4", "int8_channel_packed")),
    *(("26B-A4B", name) for name in ("awq_g32", "nvfp4_modelopt")),
]
Made = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Directory of a variant in a format; `fused` before the format's name packs all experts in one tensor."""
    root, sources, written = tmp_path_factory.mktemp("quantised"), dict[str, Path](), dict[tuple[str, str], Path]()

    def make(variant: str, name: str) -> Path:
        if variant not in sources:
            sources[variant] = root / variant
            make_checkpoint(variant, sources[variant], seed=3, **CHANGES[variant])
        if (variant, name) not in written:
            directory = written[variant, name] = root / f"{variant}-{name}"
            fused, format_name = name.startswith("fused "), name.removeprefix("fused ")
            quantise(sources[variant], directory, format_name, fused_experts=fused, rounds_inputs=False)
        return written[variant, name]

    return make


def difference(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).abs().max())


@pytest.mark.parametrize(("variant", "name"), CASES)
def test_logits_are_those_of_the_dequantised_elements(variant: str, name: str, made: Made, tmp_path: Path) -> None:
    directory = made(variant, name)
    dense = write_dequantised(directory, tmp_path / "dense")
    expected = reference_logits(dense, IDS)
    assert difference(dense_logits(load_checkpoint(directory), IDS), expected) <= TOLERANCE
    rounded = dense_logits(load_checkpoint(directory, dtype=torch.bfloat16), IDS)
    assert difference(rounded, dense_logits(load_checkpoint(dense, dtype=torch.bfloat16), IDS)) <= _reordered(name)


def _reordered(name: str) -> float:
    """Sums over inputs in another order, which an activation order takes, are rounded otherwise in bfloat16."""
    return 0.5 if name.endswith(("actorder", "desc_act")) else 0.0


def test_quantising_changes_what_the_tolerance_can_see(made: Made) -> None:
    """Else the comparison above would pass for weights that were never quantised, or of another format."""
    logits = [
        dense_logits(load_checkpoint(made("31B", name)), IDS) for name in (*GROUPS_OF_32, *FP8, "nvfp4", "int8_channel")
    ]
    for i, one in enumerate(logits):
        assert all(difference(one, other) > 100 * TOLERANCE for other in logits[:i])


def test_two_ranks_say_what_one_says(made: Made, tmp_path: Path) -> None:
    cases = [(made(*case), IDS) for case in CASES_OF_TWO_RANKS]
    for (directory, ids), first, second in zip(
        cases, *tensor_parallel_logits(cases, size=2, scratch=tmp_path), strict=True
    ):
        assert torch.equal(first, second), "ranks disagree"
        assert difference(first, dense_logits(load_checkpoint(directory), ids)) <= TOLERANCE


@pytest.mark.parametrize(("variant", "name"), [*CASES, ("31B", "int4_g128")])
def test_what_is_loaded_is_what_is_counted(variant: str, name: str, made: Made) -> None:
    """On one rank and on the last of two. Groups of 128 do not fit 160 inputs: those layers stay as they are."""
    directory = made(variant, name)
    architecture, stored = read_architecture(directory), read_weight_format(directory)
    assert inspect_checkpoint(directory).format == stored
    for size in (1,) if stored.activation_order else (1, 2):
        parallel = TensorParallel(rank=size - 1, size=size)
        placement = Placement(torch.device("cpu"), torch.float32, parallel, stored)  # the config's dtype
        model = load_model(architecture, directory, placement)
        assert model.parameter_bytes() == weight_bytes(architecture, tensor_parallel_size=size, weight_format=stored)


@pytest.mark.parametrize(
    ("name", "width", "says"),
    [
        ("int4_g32", 176, "leaves 88 of intermediate_size 176 per rank, which is not a multiple of 32, the INT4 group"),
        ("fp8_block", 384, "leaves 192 of intermediate_size 384 per rank, .* a multiple of 128, the FP8 block"),
        ("int4_g32_asym", 8, "not a multiple of 8, the outputs whose zero points are packed together|INT4 group"),
        ("int4_g32_actorder", 512, "does not split weights with an activation order"),
    ],
)
def test_a_split_that_cuts_what_a_scale_spans_is_refused_alike(name: str, width: int, says: str, made: Made) -> None:
    """By the planner and by the worker, in the same words; one rank is not refused for it."""
    directory = made("31B", name)
    architecture = read_architecture(directory).model_copy(update={"intermediate_size": width})
    stored = read_weight_format(directory)
    parallel, device = TensorParallel(rank=0, size=2), torch.device("meta")
    with pytest.raises(InvalidInput, match=says) as planned:
        weight_bytes(architecture, tensor_parallel_size=2, weight_format=stored)
    with pytest.raises(InvalidInput) as started:
        load_model(architecture, directory, Placement(device, torch.bfloat16, parallel, stored))
    assert str(started.value) == str(planned.value)
    whole = architecture.model_copy(update={"intermediate_size": 512})
    assert weight_bytes(whole, tensor_parallel_size=1, weight_format=stored) > 0


@pytest.mark.parametrize(
    ("variant", "name"), [("31B", "int4_g32_asym_actorder"), ("26B-A4B", "int4_g32"), ("E2B", "fp8_block")]
)
def test_requests_side_by_side_share_a_workspace(variant: str, name: str, made: Made, tmp_path: Path) -> None:
    """Through scheduler and paged cache, in chunks; every matrix makes its elements in the same buffer."""
    directory = made(variant, name)
    model = load_checkpoint(directory)
    prompts = tuple(tuple(random_tokens(length, seed=length)) for length in (9, 40, 75))
    requests = tuple(Forced(ids, len(ids) - 3, arrives=i) for i, ids in enumerate(prompts))
    replayed = replay(model, Traffic(requests, chunk=16))
    dense = write_dequantised(directory, tmp_path / "dense")
    for ids, logits in zip(prompts, replayed.logits, strict=True):
        assert difference(logits, reference_logits(dense, list(ids))[: len(ids) - 1]) <= TOLERANCE
    workspaces = {id(matrix.workspace): matrix.workspace for _, matrix in model.stored_matrices()}
    assert len(workspaces) == 1
    (workspace,) = workspaces.values()
    assert workspace is not None
    assert workspace.nbytes == workspace_bytes(
        model.architecture, tensor_parallel_size=1, weight_format=model.weight_format
    )


O_PROJ = "model.language_model.layers.2.self_attn.o_proj"
G_IDX, QZEROS, SCALES, QWEIGHT = (f"{O_PROJ}.{name}" for name in ("g_idx", "qzeros", "scales", "qweight"))
PACKED = "model.language_model.layers.2.self_attn.o_proj.weight_packed"
SCALE = "model.language_model.layers.2.self_attn.o_proj.weight_scale"
SHAPE = "model.language_model.layers.2.self_attn.o_proj.weight_shape"
INDEX = "model.language_model.layers.2.self_attn.o_proj.weight_g_idx"
KEY_INDEX = "model.language_model.layers.2.self_attn.k_proj.weight_g_idx"
ZERO = "model.language_model.layers.2.self_attn.o_proj.weight_zero_point"


def put(tensor: Tensor, place: int, value: float) -> Tensor:
    tensor.view(-1)[place] = value
    return tensor


def swapped(index: Tensor) -> Tensor:
    """Another order of whole groups: one column of the first group changes place with one of the last."""
    first, last = int((index == 0).nonzero()[0]), int((index == index.max()).nonzero()[0])
    index[[first, last]] = index[[last, first]]
    return index


@pytest.mark.parametrize(
    ("name", "tensor", "change", "said"),
    [
        ("int4_g32", SCALE, None, ["'layers.2.self_attn.o_proj.weight_scale' is in no file"]),
        ("int4_g32", SCALE, lambda t: t[:, :-1], [SCALE, "has shape [160, 31], expected [160, 32]"]),
        ("int4_g32", SCALE, lambda t: t.half(), [SCALE, "dtype F16", "BF16"]),
        ("int4_g32", PACKED, lambda t: t.view(torch.int16), [PACKED, "has shape [160, 256], expected [160, 128]"]),
        ("int4_g32", SHAPE, lambda t: t.flip(0), [SHAPE, "holds [1024, 160]", "[160, 1024]"]),
        ("int4_g32", ZERO, lambda _: torch.zeros((20, 32), dtype=torch.int32), ["unexpected tensor", ZERO]),
        ("int4_g32_asym", ZERO, None, ["weight_zero_point' is in no file"]),
        ("int4_g32_actorder", INDEX, torch.zeros_like, ["o.matrix", "32 groups 32 inputs"]),
        ("int4_g32_actorder", INDEX, lambda t: t - 1, ["o.matrix", "32 groups 32 inputs"]),
        ("int4_g32_actorder", KEY_INDEX, swapped, ["qkv.matrix", "activation orders (weight_g_idx) of their own"]),
        ("fp8_channel", SCALE, lambda t: t[:-1], [SCALE, "has shape [159, 1], expected [160, 1]"]),
        ("fp8_channel", SCALE, lambda t: put(t, 7, math.nan), [SCALE, "holds nan at [7, 0]"]),
        ("int4_g32", SCALE, lambda t: put(t, 33, math.inf), [SCALE, "holds inf at [1, 1]"]),
        ("nvfp4", SCALE, lambda t: put(t, 64, math.nan), [SCALE, "holds nan at [1, 0]", "0 or more"]),
        ("nvfp4", SCALE, lambda t: put(t, 65, -1.0), [SCALE, "holds -1.0 at [1, 1]"]),
        ("nvfp4_modelopt", f"{SCALE}_2", torch.neg, [f"{SCALE}_2", "holds -", "at [0]"]),
        ("gptq_g32", G_IDX, lambda t: t.flip(0), [G_IDX, "holds 31 at [0]", "gives 0", "desc_act"]),
        ("gptq_g32", QZEROS, lambda t: put(t, 5, 0x77777776), [QZEROS, "0x77777776 at word 5", "sym"]),
        ("gptq_g32_desc_act", G_IDX, torch.zeros_like, ["o.matrix", "32 groups 32 inputs"]),
        ("gptq_g32", SCALES, lambda t: t.T, [SCALES, "has shape [160, 32], expected [32, 160]"]),
        ("awq_g32", QWEIGHT, lambda t: t.view(torch.int8)[:, :80], ["expected [1024, 20]"]),
        ("fp8_channel", SCALE.removesuffix("_scale"), lambda t: t.bfloat16(), ["dtype BF16", "F8_E4M3"]),
        ("fp8_block", SCALE, None, ["'layers.2.self_attn.o_proj.weight_scale' is in no file"]),
    ],
)  # fmt: skip
def test_a_damaged_quantised_checkpoint_is_refused_by_name(
    name: str, tensor: str, change: Callable[[Tensor], Tensor] | None, said: list[str], made: Made, tmp_path: Path
) -> None:
    """And the sound one loads as before."""
    sound, broken = made("31B", name), tmp_path / "broken"
    shutil.copytree(sound, broken)
    tensors = load_file(broken / "model.safetensors")
    held = tensors.pop(tensor, torch.empty(0))
    if change is not None:
        tensors[tensor] = change(held).contiguous()
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(InvalidCheckpoint) as caught:
        load_checkpoint(broken)
    assert [word for word in said if word not in str(caught.value)] == []
    assert load_checkpoint(sound).parameter_bytes() > 0


def test_a_config_of_other_weights_is_refused(made: Made, tmp_path: Path) -> None:
    """INT4 tensors under a config that states FP8: the first names that are missing and those that are too many."""
    directory = tmp_path / "mixed"
    shutil.copytree(made("31B", "int4_g32"), directory)
    shutil.copy(made("31B", "fp8_channel") / "config.json", directory)
    with pytest.raises(InvalidCheckpoint, match=r"unexpected tensor '.*weight_shape'.*and \d+ more"):
        load_checkpoint(directory)


def test_dense_experts_beside_quantised_layers(made: Made, tmp_path: Path) -> None:
    """As a tool writes them that quantises modules of class Linear: its config does not say that experts are left."""
    directory, source = tmp_path / "left", made("26B-A4B", "fp8_channel").parent / "26B-A4B"
    left = [TextLinear.EXPERT_GATE_UP, TextLinear.EXPERT_DOWN]
    quantise(source, directory, "fp8_channel", leave=left, rounds_inputs=False)
    shutil.copy(made("26B-A4B", "fp8_channel") / "config.json", directory)
    assert read_weight_format(directory).dense == (TextLinear.EXPERT_GATE_UP, TextLinear.EXPERT_DOWN)
    expected = reference_logits(write_dequantised(directory, tmp_path / "dense"), IDS)
    assert difference(dense_logits(load_checkpoint(directory), IDS), expected) <= TOLERANCE


@pytest.mark.parametrize(("variant", "name"), CASES)
def test_random_weights_of_a_format_give_ordinary_logits(variant: str, name: str, made: Made) -> None:
    directory = made(variant, name)
    models = [
        load_model(
            read_architecture(directory),
            Path("does-not-exist"),
            Placement(torch.device("cpu"), torch.float32, weight_format=read_weight_format(directory)),
            load_format="dummy",
        )
        for _ in range(2)
    ]
    logits = dense_logits(models[0], IDS)
    assert logits.isfinite().all()
    assert 0.3 < float(logits.std()) < 10
    assert torch.equal(logits, dense_logits(models[1], IDS)), "the seed decides"
    for _, matrix in models[0].stored_matrices():
        assert float(matrix.dense().std()) * matrix.columns**0.5 == pytest.approx(1.0, abs=0.4)  # few scales are drawn


def test_every_format_of_the_script_is_tested() -> None:
    tested = {name.removeprefix("fused ") for _, name in CASES}
    assert {name for name in FORMATS if not name.startswith("int4_g128")} == tested
