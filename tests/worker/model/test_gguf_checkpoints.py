"""GGUF files: elements are those that the `gguf` package finds in them, and so are the logits."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from dense_attention import dense_logits
from gguf_files import write_dequantised, write_gguf
from model_checkpoints import load_checkpoint, make_checkpoint, random_tokens, reference_logits
from torch import Tensor

from modelserve.errors import InvalidInput
from modelserve.inspection import inspect_checkpoint, read_architecture, read_weight_format
from modelserve.model.gguf.block_types import BlockType
from modelserve.model.gguf.files import read_gguf
from modelserve.sizing.weights.text import weight_bytes
from modelserve_worker.kernels.products.int4_linear import nibbles
from modelserve_worker.layers.parallel import TensorParallel
from modelserve_worker.layers.placement import Placement
from modelserve_worker.models.weight_source import TABLES
from modelserve_worker.weights import gguf_blocks
from modelserve_worker.weights import reading as weights_reading
from modelserve_worker.weights.files import InvalidCheckpoint
from modelserve_worker.weights.gguf_blocks import BLOCKS_BY_NAME, BlockTargets, numbers
from modelserve_worker.weights.loader import load_model

gguf = pytest.importorskip("gguf")

TOLERANCE = 1e-4
IDS = random_tokens(20, seed=20)
# Two ranks cut 768 inputs within a block of 256.
WIDTHS = {
    "hidden_size": 256, "intermediate_size": 768, "head_dim": 64, "global_head_dim": 128, "num_attention_heads": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
CHANGES: dict[str, dict[str, int]] = {
    "31B": WIDTHS,
    "E2B": WIDTHS | {"hidden_size_per_layer_input": 32},
    "26B-A4B": WIDTHS | {"moe_intermediate_size": 64, "num_global_key_value_heads": 1, "num_experts": 4},
}
KINDS: dict[str, tuple[str, dict[str, str]]] = {
    "F16": ("F16", {}),
    "BF16": ("BF16", {}),
    "Q8_0": ("Q8_0", {}),
    "Q4_0": ("Q4_0", {}),
    "Q4_0 as quantised": ("Q4_0", {"token_embd": "Q6_K", "per_layer_model_proj": "BF16"}),
    "K": (
        "Q4_K",
        {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K", "attn_output": "Q5_K", "attn_k": "Q4_1"},
    ),
    "mixed": ("Q4_0", {"ffn_down": "Q8_0", "attn_v": "Q5_0", "attn_output": "F16", "down_exps": "Q5_0"}),
}
CASES = [
    *(("31B", kind) for kind in KINDS),
    *(("E2B", kind) for kind in ("F16", "Q8_0", "Q4_0", "Q4_0 as quantised", "K")),
    *(("26B-A4B", kind) for kind in ("BF16", "Q8_0", "Q4_0", "mixed")),
]
Made = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root, made = tmp_path_factory.mktemp("sources"), dict[str, Path]()

    def make(variant: str) -> Path:
        if variant not in made:
            made[variant] = root / variant
            make_checkpoint(variant, made[variant], seed=3, **CHANGES[variant])
        return made[variant]

    return make


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, sources: Callable[[str], Path]) -> Made:
    """Directory with the GGUF file of a variant."""
    root, written = tmp_path_factory.mktemp("gguf"), dict[tuple[str, str], Path]()

    def make(variant: str, kind: str) -> Path:
        if (variant, kind) not in written:
            directory = written[variant, kind] = root / f"{variant}-{kind}"
            directory.mkdir()
            stored, types = KINDS[kind]
            write_gguf(sources(variant), stored, directory / "m.gguf", types=types)
        return written[variant, kind]

    return make


def difference(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).abs().max())


@pytest.mark.parametrize(("variant", "kind"), CASES)
def test_logits_are_those_of_the_dequantised_elements(
    variant: str, kind: str, made: Made, sources: Callable[[str], Path], tmp_path: Path
) -> None:
    directory = made(variant, kind)
    dense = write_dequantised(sources(variant), directory / "m.gguf", tmp_path / "dense")
    assert difference(dense_logits(load_checkpoint(directory), IDS), reference_logits(dense, IDS)) <= TOLERANCE
    rounded = [dense_logits(load_checkpoint(each, dtype=torch.bfloat16), IDS) for each in (directory, dense)]
    assert difference(*rounded) == 0.0


def test_parts_are_loaded_as_one(made: Made, sources: Callable[[str], Path], tmp_path: Path) -> None:
    """From the directory, and where one part is named."""
    write_gguf(sources("31B"), "Q8_0", tmp_path / "m.gguf", parts=3)
    (tmp_path / "mmproj-m.gguf").write_bytes(b"of no concern")
    expected = load_checkpoint(made("31B", "Q8_0"))
    for path in (tmp_path, tmp_path / "m-00002-of-00003.gguf"):
        for (name, one), (_, other) in zip(
            expected.named_parameters(), load_checkpoint(path).named_parameters(), strict=True
        ):
            assert torch.equal(one, other), name
    (tmp_path / "m-00003-of-00003.gguf").unlink()
    with pytest.raises(InvalidInput, match="fetch all of them"):
        read_architecture(tmp_path)


def test_types_change_what_the_tolerance_can_see(made: Made) -> None:
    logits = [dense_logits(load_checkpoint(made("31B", kind)), IDS) for kind in ("F16", "Q8_0", "Q4_0", "mixed")]
    for i, one in enumerate(logits):
        assert all(difference(one, other) > 10 * TOLERANCE for other in logits[:i])


@pytest.mark.parametrize(("variant", "kind"), [("31B", "mixed"), ("31B", "K"), ("E2B", "Q4_0"), ("26B-A4B", "mixed")])
def test_ranks_read_their_shares(variant: str, kind: str, made: Made) -> None:
    """Runs of rows in two stacked matrices, and runs of blocks in each row."""
    whole, *ranks = (
        load_checkpoint(made(variant, kind), parallel=TensorParallel(rank=rank, size=size))
        for rank, size in ((0, 1), (0, 2), (1, 2))
    )
    for layer, one in enumerate(whole.decoder_layers()):
        shares = [list(rank.decoder_layers())[layer] for rank in ranks]
        columns = [[each.mlp.down, each.attention.o] for each in (one, *shares)]
        rows = [[each.mlp.gate_up] for each in (one, *shares)]
        for expected, *held in zip(*columns, strict=True):
            found = torch.cat([each.matrix.dense().clone() for each in held], dim=-1)
            assert torch.equal(expected.matrix.dense(), found)
        for expected, *held in zip(*rows, strict=True):
            _check_rows(expected.matrix.dense(), [each.matrix.dense().clone() for each in held])
        if one.moe is not None:
            experts = [each.moe.experts for each in (one, *shares)]
            down = [each.down.dense().clone() for each in experts]
            assert torch.equal(down[0], torch.cat(down[1:], dim=-1))
            first, *others = (each.gate_up.dense().clone() for each in experts)
            _check_rows(first, others)
    assert torch.equal(whole.embedding.weight, torch.cat([rank.embedding.weight for rank in ranks]))


def _check_rows(whole: Tensor, shares: list[Tensor]) -> None:
    """Gate above up, in each."""
    halves = [share.chunk(2, dim=-2) for share in shares]
    stacked = [torch.cat([half[i] for half in halves], dim=-2) for i in range(2)]
    assert torch.equal(whole, torch.cat(stacked, dim=-2))


@pytest.mark.parametrize(("variant", "kind"), CASES)
def test_what_is_loaded_is_what_is_counted(variant: str, kind: str, made: Made) -> None:
    directory = made(variant, kind)
    architecture, stored = read_architecture(directory), read_weight_format(directory)
    assert inspect_checkpoint(directory).format == stored
    for size in (1, 2):
        parallel = TensorParallel(rank=size - 1, size=size)
        placement = Placement(torch.device("cpu"), torch.bfloat16, parallel, stored if stored.quantised else None)
        model = load_model(architecture, directory, placement)
        assert model.parameter_bytes() == weight_bytes(architecture, tensor_parallel_size=size, weight_format=stored)


def test_random_weights_are_made_in_the_same_formats(made: Made) -> None:
    directory = made("26B-A4B", "mixed")
    architecture, stored = read_architecture(directory), read_weight_format(directory)
    made_up = [
        load_model(
            architecture,
            directory,
            Placement(torch.device("cpu"), torch.float32, TensorParallel(rank=rank, size=size), stored),
            load_format="dummy",
        )
        for rank, size in ((0, 1), (1, 2))
    ]
    whole, half = (model.layers[0].mlp.down.matrix.dense() for model in made_up)
    assert torch.equal(whole[:, 384:], half)
    assert 0.5 < float(whole.std()) * 768**0.5 < 2


@pytest.mark.parametrize(("variant", "kind"), [("26B-A4B", "mixed"), ("31B", "K")])
def test_pieces_of_any_size_put_every_block_where_it_belongs(
    variant: str, kind: str, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Smaller ones than a row, and the few bytes between runs that are read with them."""
    directory, last = made(variant, kind), TensorParallel(rank=1, size=2)
    expected = load_checkpoint(directory, parallel=last)
    monkeypatch.setattr(weights_reading, "PIECE_BYTES", 777)
    monkeypatch.setattr(gguf_blocks, "CACHED_BYTES", 500)
    monkeypatch.setattr(gguf_blocks, "CACHED_BYTES_FLOATS", 500)
    found = load_checkpoint(directory, parallel=last)
    for (name, one), (_, other) in zip(expected.named_parameters(), found.named_parameters(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("variant", "kind"), [("31B", "Q4_0 as quantised"), ("31B", "K"), ("26B-A4B", "mixed")])
def test_a_gpu_splits_blocks_as_a_cpu_does(variant: str, kind: str, made: Made) -> None:
    last, directory = TensorParallel(rank=1, size=2), made(variant, kind)
    there, here = (
        load_checkpoint(directory, parallel=last, dtype=torch.bfloat16, device=torch.device(name))
        for name in ("cuda", "cpu")
    )
    for (name, one), (_, other) in zip(there.named_parameters(), here.named_parameters(), strict=True):
        assert torch.equal(one.cpu(), other), name


SCALES_AT = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def _random_blocks(kind: BlockType) -> Tensor:
    """uint8 [6, 3, bytes]: all of them, not those alone that a quantiser writes; scales are numbers."""
    generator = torch.Generator().manual_seed(kind.bytes)
    raw = torch.randint(0, 256, (6, 3, kind.bytes), dtype=torch.uint8, generator=generator)
    for at in SCALES_AT.get(kind.name, (0,)):
        raw[..., at : at + 2] = torch.randn(6, 3, 1, generator=generator).half().view(torch.uint8)
    raw[2, 1] = 0
    return raw


@pytest.mark.parametrize("name", TABLES[3:])
def test_blocks_are_what_the_package_finds(name: str) -> None:
    """As floats, as INT8 (rounded once more as it rounds to Q8_0, where that is not exact), and as INT4."""
    kind, stored = BLOCKS_BY_NAME[name], gguf.GGMLQuantizationType[name]
    raw = _random_blocks(kind)
    theirs = gguf.dequantize(raw.flatten(1).numpy(), stored)
    expected = torch.from_numpy(theirs)
    assert torch.equal(numbers(kind, raw).flatten(1), expected)
    eights, scales = torch.empty(expected.shape, dtype=torch.int8), torch.empty(6, expected.shape[1] // 32).half()
    BlockTargets(kind, eights, scales).store(raw.flatten(1))
    if name in ("Q4_0", "Q5_0", "Q8_0"):
        assert torch.equal(eights * scales.float().repeat_interleave(32, 1), expected)
    else:
        rounded = torch.from_numpy(gguf.quantize(theirs, gguf.GGMLQuantizationType.Q8_0)).view(6, -1, 34)
        assert torch.equal(eights.view(6, -1, 32), rounded[..., 2:].view(torch.int8))
        assert torch.equal(scales, rounded[..., :2].contiguous().view(torch.float16)[..., 0])
    if name == "Q4_0":
        words = torch.empty((6, expected.shape[1] // 8), dtype=torch.int32)
        BlockTargets(kind, words, scales).store(raw.flatten(1))
        assert torch.equal((nibbles(words).int() - 8) * scales.float().repeat_interleave(32, 1), expected)


@pytest.fixture
def damaged(made: Made, tmp_path: Path) -> Callable[[str, int, bytes], Path]:
    """A copy of 31B in Q4_0 with other bytes at a place in a tensor."""

    def make(name: str, at: int, content: bytes) -> Path:
        directory = tmp_path / "damaged"
        shutil.copytree(made("31B", "Q4_0 as quantised"), directory)
        found = read_gguf(directory)
        assert found is not None
        with (directory / "m.gguf").open("r+b") as file:
            file.seek(found.tensors[name][1].start + at)
            file.write(content)
        return directory

    return make


@pytest.mark.parametrize(
    ("name", "at", "value", "said"),
    [
        ("blk.1.ffn_down.weight", 18 * (3 * 24 + 5), math.nan, r"'blk.1.ffn_down.weight' holds nan at \[3, 5\]"),
        ("blk.0.attn_q.weight", 18, math.inf, r"'blk.0.attn_q.weight' holds inf at \[0, 1\]"),
        ("token_embd.weight", 208, math.nan, r"'token_embd.weight' holds nan at \[0, 0\]"),
    ],
)
def test_scales_that_are_no_numbers_are_refused_by_name(
    name: str, at: int, value: float, said: str, damaged: Callable[[str, int, bytes], Path]
) -> None:
    directory = damaged(name, at, torch.tensor([value]).half().view(torch.uint8).numpy().tobytes())
    with pytest.raises(InvalidCheckpoint, match=said):
        load_checkpoint(directory)


def test_a_file_that_is_cut_short_is_refused(made: Made, tmp_path: Path) -> None:
    directory = tmp_path / "short"
    shutil.copytree(made("31B", "Q8_0"), directory)
    path = directory / "m.gguf"
    placement = Placement(torch.device("cpu"), torch.float32, TensorParallel(), read_weight_format(directory))
    architecture = read_architecture(directory)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 4096)
    with pytest.raises(InvalidCheckpoint, match=r"m\.gguf is cut short: tensor '.*' lies at bytes"):
        load_model(architecture, directory, placement)


def test_tensors_of_another_model_are_named_as_the_file_names_them(made: Made, sources: Callable[[str], Path]) -> None:
    architecture = read_architecture(made("31B", "F16"))
    wider = architecture.model_copy(update={"intermediate_size": 1024})
    with pytest.raises(
        InvalidCheckpoint, match=r"tensor 'blk\.0\.ffn_gate\.weight' .* has shape \[768, 256\], expected"
    ):
        load_model(wider, made("31B", "F16"), Placement(torch.device("cpu"), torch.float32))
