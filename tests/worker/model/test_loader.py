"""What the loader accepts, what it refuses and in which words, and how it reports progress."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from dense_attention import dense_logits
from model_checkpoints import load_checkpoint, random_tokens, read_architecture, reference_logits, rewrite
from safetensors.torch import load_file, save_file

from modelserve.errors import InvalidInput
from modelserve.model.architecture import ModelArchitecture
from modelserve.model.checkpoint_files import INDEX_FILE as INDEX
from modelserve.model.checkpoint_files import read_header
from modelserve.termination import TERMINAL_EXIT_CODE, TerminationReason
from modelserve_worker.layers.parallel import TensorParallel
from modelserve_worker.layers.placement import Placement
from modelserve_worker.models.gemma4_checkpoint import weight_sources
from modelserve_worker.weights import reading as weights_reading
from modelserve_worker.weights.files import InvalidCheckpoint
from modelserve_worker.weights.loader import load_model
from modelserve_worker.weights.progress import LoadProgress

IDS = random_tokens(24, seed=9)
CPU = torch.device("cpu")


@pytest.fixture
def copy(checkpoint: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """A private copy of a variant's checkpoint, to be changed by the test."""

    def make(variant: str) -> Path:
        return Path(shutil.copytree(checkpoint(variant), tmp_path / variant))

    return make


def shard(directory: Path, *, files: int) -> None:
    """Split the single file into several with an index."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    weight_map = {name: f"part-{i % files}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name, f in weight_map.items() if f == file}, directory / file)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("variant", ["E2B", "E4B"])
def test_dead_projections_of_kv_shared_layers_are_ignored(variant: str, copy: Callable[[str], Path]) -> None:
    directory = copy(variant)
    expected = reference_logits(directory, IDS)
    architecture = read_architecture(directory)
    dead = {}
    for layer in range(architecture.first_shared_layer, architecture.num_hidden_layers):
        width = architecture.layer_head_dim(layer) * architecture.layer_kv_heads(layer)
        attention = f"model.layers.{layer}.self_attn"
        dead[f"{attention}.k_proj.weight"] = torch.randn(width, architecture.hidden_size)
        dead[f"{attention}.v_proj.weight"] = torch.randn(width, architecture.hidden_size)
        dead[f"{attention}.k_norm.weight"] = torch.randn(architecture.layer_head_dim(layer))
    rewrite(directory, add=dead)
    assert (dense_logits(load_checkpoint(directory), IDS) - expected).abs().max() <= 1e-4


def test_multimodal_names_towers_and_a_repeated_head(
    copy: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    directory = copy("31B")
    expected = reference_logits(directory, IDS)
    rewrite(
        directory,
        rename={"model.": "model.language_model."},
        add={
            "model.vision_tower.patch.weight": torch.ones(3),
            "model.embed_vision.proj.weight": torch.ones(3),
            "lm_head.weight": torch.zeros(256, 64),
        },
    )
    with caplog.at_level(logging.INFO):
        model = load_checkpoint(directory)
    assert (dense_logits(model, IDS) - expected).abs().max() <= 1e-4
    assert [r.getMessage() for r in caplog.records if "skipped" in r.getMessage()] == [
        "skipped 3 tensors that text generation does not use (lm_head.weight, model.embed_vision, model.vision_tower)"
    ]


def test_untied_head_is_loaded(copy: Callable[[str], Path]) -> None:
    directory = copy("12B")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    rewrite(directory, add={"lm_head.weight": torch.randn(256, 64, generator=torch.Generator().manual_seed(3)) / 8})
    expected = reference_logits(directory, IDS)
    assert (dense_logits(load_checkpoint(directory), IDS) - expected).abs().max() <= 1e-4


def test_several_files_with_an_index(copy: Callable[[str], Path]) -> None:
    directory = copy("26B-A4B")
    expected = reference_logits(directory, IDS)
    shard(directory, files=3)
    save_file({"stale": torch.ones(1)}, directory / "left-over.safetensors")
    assert (dense_logits(load_checkpoint(directory), IDS) - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("variant", ["E2B", "12B", "26B-A4B", "31B"])
def test_shares_of_all_ranks_make_up_every_tensor(variant: str, checkpoint: Callable[[str], Path]) -> None:
    """At TP 4 each element of each tensor is on some rank, unchanged, and no rank holds more than it must."""
    directory = checkpoint(variant)
    tensors = load_file(directory / "model.safetensors")
    seen = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in tensors.items()}
    for rank in range(4):
        model = load_checkpoint(directory, parallel=TensorParallel(rank=rank, size=4))
        held = 0
        for source in weight_sources(model):
            full = tensors[f"model.{source.name}"]
            assert full.shape == source.shape
            for region in source.regions:
                part = full.narrow(region.dim, region.source, region.length)
                target = source.parameter.narrow(region.dim, region.target, region.length)
                assert torch.equal(part, target), source.name
                seen[f"model.{source.name}"].narrow(region.dim, region.source, region.length).fill_(True)
                held += part.numel()
        assert held == sum(parameter.numel() for parameter in model.parameters())
    assert [name for name, mask in seen.items() if not mask.all()] == []


def test_dtype_is_converted_while_loading(checkpoint: Callable[[str], Path]) -> None:
    exact, rounded = load_checkpoint(checkpoint("E4B")), load_checkpoint(checkpoint("E4B"), dtype=torch.bfloat16)
    for (name, a), (_, b) in zip(exact.named_parameters(), rounded.named_parameters(), strict=True):
        assert torch.equal(a.to(torch.bfloat16), b), name


def break_shape(directory: Path) -> None:
    rewrite(directory, add={"model.norm.weight": torch.ones(65)})


def drop(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, directory / "model.safetensors")


def add_unknown(directory: Path) -> None:
    rewrite(directory, add={"model.layers.0.self_attn.sinks": torch.ones(4)})


def quantise(directory: Path) -> None:
    rewrite(directory, add={"model.norm.weight": torch.ones(64, dtype=torch.int8)})


def truncate(directory: Path) -> None:
    content = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(content[:-1000])


def scribble(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"not a tensor file at all")


def remove_all(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def repeat_in_second_file(directory: Path) -> None:
    save_file({"model.norm.weight": torch.ones(64)}, directory / "other.safetensors")


def repeat_under_other_prefix(directory: Path) -> None:
    rewrite(directory, add={"model.language_model.norm.weight": torch.ones(64)})


def lose_a_shard(directory: Path) -> None:
    shard(directory, files=2)
    (directory / "part-1.safetensors").unlink()


def break_index(directory: Path) -> None:
    (directory / INDEX).write_text("{]")


def index_a_missing_tensor(directory: Path) -> None:
    shard(directory, files=2)
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"]["model.layers.99.layer_scalar"] = "part-0.safetensors"
    (directory / INDEX).write_text(json.dumps(index))


def index_outside(directory: Path) -> None:
    (directory / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (break_shape, ("'model.norm.weight'", "model.safetensors", "[65]", "[64]")),
        (drop, ("'layers.3.mlp.up_proj.weight'", "in no file")),
        (add_unknown, ("unexpected", "'model.layers.0.self_attn.sinks'", "model.safetensors")),
        (quantise, ("'model.norm.weight'", "I8", "unquantised")),
        (truncate, ("model.safetensors is cut short", "tensor '", "lies at bytes", "download it again")),
        (scribble, ("model.safetensors", "not a safetensors file")),
        (remove_all, ("no *.safetensors",)),
        (repeat_in_second_file, ("'model.norm.weight'", "model.safetensors", "other.safetensors")),
        (repeat_under_other_prefix, ("'model.norm.weight'", "'model.language_model.norm.weight'", "repeats")),
        (lose_a_shard, ("part-1.safetensors",)),
        (break_index, (INDEX, "not JSON")),
        (index_a_missing_tensor, ("part-0.safetensors", "'model.layers.99.layer_scalar'")),
        (index_outside, ("'../elsewhere.safetensors'", "beside the index")),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name(
    damage: Callable[[Path], None], said: tuple[str, ...], copy: Callable[[str], Path]
) -> None:
    directory = copy("31B")
    damage(directory)
    with pytest.raises(InvalidCheckpoint) as caught:
        load_checkpoint(directory)
    assert caught.value.reason is TerminationReason.InvalidCheckpoint
    assert [word for word in said if word not in str(caught.value)] == []


def test_a_checkpoint_with_many_faults_names_three_and_counts_the_rest(copy: Callable[[str], Path]) -> None:
    directory = copy("31B")
    rewrite(directory, rename={"model.layers.0": "model.layers.50"})
    with pytest.raises(InvalidCheckpoint, match="and 25 more"):
        load_checkpoint(directory)


@pytest.mark.parametrize(
    ("variant", "size", "what"), [("31B", 3, "num_attention_heads 8"), ("26B-A4B", 16, "num_attention_heads 4")]
)
def test_a_tensor_parallel_size_that_does_not_fit(
    variant: str, size: int, what: str, checkpoint: Callable[[str], Path]
) -> None:
    with pytest.raises(InvalidInput, match=what):
        load_checkpoint(checkpoint(variant), parallel=TensorParallel(rank=0, size=size))


@pytest.mark.parametrize("size", [1, 2])
def test_progress_counts_this_ranks_bytes(size: int, checkpoint: Callable[[str], Path]) -> None:
    calls: list[tuple[int, int]] = []
    model = load_model(
        read_architecture(checkpoint("E2B")),
        checkpoint("E2B"),
        Placement(CPU, torch.float32, TensorParallel(rank=0, size=size)),
        progress=lambda done, total: calls.append((done, total)),
    )
    done = [call[0] for call in calls]
    assert done == sorted(done)
    assert {call[1] for call in calls} == {model.parameter_bytes()} == {done[-1]}


def test_a_large_tensor_is_copied_in_blocks(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    directory = checkpoint("26B-A4B")
    expected = dict(load_checkpoint(directory).named_parameters())
    monkeypatch.setattr(weights_reading, "PIECE_BYTES", 1000)
    for name, parameter in load_checkpoint(directory).named_parameters():
        assert torch.equal(parameter, expected[name]), name


@pytest.mark.parametrize(("piece", "least_run"), [(64, 1), (64, 1 << 12), (1 << 12, 1), (1 << 20, 1)])
def test_pieces_of_any_size_put_every_share_where_it_belongs(
    piece: int, least_run: int, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs shorter and longer than a piece, read one by one and with what lies between them, converted and not."""
    directory = checkpoint("26B-A4B")
    parallel = TensorParallel(rank=1, size=2)
    expected = dict(load_checkpoint(directory, parallel=parallel).named_parameters())
    monkeypatch.setattr(weights_reading, "PIECE_BYTES", piece)
    monkeypatch.setattr(weights_reading, "LEAST_RUN_BYTES", least_run)
    for dtype in (torch.float32, torch.bfloat16):
        for name, parameter in load_checkpoint(directory, parallel=parallel, dtype=dtype).named_parameters():
            assert torch.equal(parameter, expected[name].to(dtype)), name


def test_a_rank_reads_its_share_and_no_more(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    real = os.preadv

    def counted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        count = real(descriptor, buffers, offset)
        read.append(count)
        return count

    monkeypatch.setattr(os, "preadv", counted)
    monkeypatch.setattr(weights_reading, "LEAST_RUN_BYTES", 1)
    model = load_checkpoint(checkpoint("31B"), parallel=TensorParallel(rank=1, size=4))
    assert sum(read) == model.parameter_bytes()


@pytest.mark.parametrize("fault", ["shrinks", "fails"])
def test_a_file_that_fails_while_it_is_read_is_named_with_tensor_and_byte(
    fault: str, copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread of the load is left, and the next load of a sound copy works."""
    directory = copy("31B")
    broken = directory / "model.safetensors"
    sound = broken.read_bytes()
    last = read_header(broken)[-1]
    real = os.preadv

    def read(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if offset < last.start:
            return real(descriptor, buffers, offset)
        if fault == "fails":
            raise OSError(errno.EIO, "Input/output error")
        os.truncate(broken, last.start)
        return real(descriptor, buffers, offset)

    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", read)
        with pytest.raises(InvalidCheckpoint) as caught:
            load_checkpoint(directory)
    said = (
        f"{broken}",
        f"tensor {last.name!r} at byte {last.start}",
        "Input/output" if fault == "fails" else "cut short",
    )
    assert [word for word in said if word not in str(caught.value)] == []
    assert [each.name for each in threading.enumerate() if "weights" in each.name or "watchdog" in each.name] == []
    broken.write_bytes(sound)
    assert load_checkpoint(directory).parameter_bytes() > 0


def test_the_watchdog_names_what_has_waited_longest() -> None:
    said: list[str] = []
    stalled = threading.Event()
    with LoadProgress(stall_limit_s=0.2, on_stall=lambda text: (said.append(text), stalled.set())) as progress:
        progress.reading("tensor 'stuck'")
        other = threading.Thread(target=lambda: (progress.reading("tensor 'late'"), progress.advance(1)))
        other.start()
        other.join()
        assert stalled.wait(60)
    assert "reading tensor 'stuck'" in said[0]


def test_the_watchdog_speaks_when_no_byte_comes() -> None:
    stalled = threading.Event()
    said: list[str] = []

    def on_stall(message: str) -> None:
        said.append(message)
        stalled.set()

    with LoadProgress(stall_limit_s=0.1, on_stall=on_stall) as progress:
        progress.expect(100)
        progress.reading("tensor 'x' of y.safetensors")
        progress.advance(40)
        assert stalled.wait(60)
    assert "40 of 100 bytes" in said[0]
    assert "tensor 'x' of y.safetensors" in said[0]


def test_the_watchdog_is_silent_while_bytes_come() -> None:
    said: list[str] = []
    pause = threading.Event()
    with LoadProgress(stall_limit_s=5.0, on_stall=said.append) as progress:
        progress.expect(100)
        for _ in range(5):
            pause.wait(0.02)
            progress.advance(20)
    assert said == []
    assert progress.done_bytes == 100


def test_stalled_storage_ends_the_process_with_its_reason(tmp_path: Path) -> None:
    """A pipe nobody writes to is a file whose bytes never come."""
    os.mkfifo(tmp_path / "model.safetensors")
    code = (
        "from pathlib import Path\n"
        "from modelserve_worker.weights.files import CheckpointFiles\n"
        "from modelserve_worker.weights.progress import LoadProgress\n"
        "with LoadProgress(stall_limit_s=0.3) as progress:\n"
        f"    CheckpointFiles.scan(Path({str(tmp_path)!r}), opening=lambda file: progress.reading(str(file)))\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == TERMINAL_EXIT_CODE, done.stderr
    assert "loading stalled" in done.stderr
    assert f"reading {tmp_path}/model.safetensors" in done.stderr


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"attention_bias": True}, "attention_bias True"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all'"),
        ({"hidden_activation": "silu"}, "hidden_activation 'silu'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_type of global layers 'default'"),
        ({"rope_parameters": {"full_attention": {"factor": 8.0}}}, "rope factor of global layers 8.0"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused(
    change: dict[str, object], said: str, checkpoint: Callable[[str], Path]
) -> None:
    """Each of these would load and answer wrongly."""
    config = json.loads((checkpoint("31B") / "config.json").read_text())
    with pytest.raises(InvalidInput, match=said):
        ModelArchitecture.from_config(config | change)
