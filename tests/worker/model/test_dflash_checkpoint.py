"""A DFlash drafter's bytes as sizing counts them, and checkpoints that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from architecture_of import architecture_of
from dflash_configs import ZLAB_31B, deepspec_12b, published_configs
from dflash_drafters import KINDS, checkpoint_shapes, target_architecture, write_drafter
from model_checkpoints import rewrite
from safetensors.torch import load_file, save_file

from modelserve.errors import InvalidInput
from modelserve.model.drafters.dflash import DFlashArchitecture
from modelserve.model.drafters.reading import drafter_architecture
from modelserve.sizing.backends.resolve import Formats, resolve, with_drafter
from modelserve.sizing.weights.dflash import dflash_weight_bytes
from modelserve_worker.kernels.operations import Operations
from modelserve_worker.layers.parallel import TensorParallel
from modelserve_worker.layers.placement import Placement
from modelserve_worker.models.dflash import DFlash
from modelserve_worker.models.dflash_checkpoint import dflash_sources
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM
from modelserve_worker.weights.files import InvalidCheckpoint
from modelserve_worker.weights.loader import load_dflash, load_model

PUBLISHED = published_configs()


@pytest.fixture(scope="module")
def target() -> Gemma4ForCausalLM:
    placement = Placement(torch.device("cpu"), torch.float32)
    return load_model(target_architecture(), Path(), placement, load_format="dummy", seed=1)


def _published(name: str, ranks: int, operations: Operations | None = None) -> DFlash:
    config, variant = PUBLISHED[name]
    placement = Placement(torch.device("meta"), torch.bfloat16, TensorParallel(rank=ranks - 1, size=ranks))
    if operations is not None:
        placement = Placement(placement.device, placement.dtype, placement.parallel, None, operations)
    drafter = drafter_architecture(config)
    assert isinstance(drafter, DFlashArchitecture)
    return DFlash(drafter, Gemma4ForCausalLM(architecture_of(variant), placement))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_rank_holds_the_bytes_that_sizing_counts(name: str, ranks: int) -> None:
    drafter = _published(name, ranks)
    assert drafter.parameter_bytes() == dflash_weight_bytes(drafter.architecture, tensor_parallel_size=ranks)


@pytest.mark.parametrize("name", PUBLISHED)
def test_names_and_shapes_are_those_of_published_files(name: str) -> None:
    config = PUBLISHED[name][0]
    expected = checkpoint_shapes({"enable_confidence_head": True} | config)
    held = {source.name: source.shape for source in dflash_sources(_published(name, 1))}
    assert {key: shape for key, shape in held.items() if key != "d2t"} == expected


def test_every_product_of_a_drafter_is_in_the_table_of_a_gpu() -> None:
    for name, (config, variant) in PUBLISHED.items():
        for ranks in (1, 2):
            table = resolve(90, architecture_of(variant), Formats(), "fast", ranks=ranks)
            operations = Operations(table, torch.device("meta"))
            assert _published(name, ranks, operations) is not None  # a matrix that no row takes raises
            drafter = drafter_architecture(config)
            assert with_drafter(table, drafter, ranks=ranks).choices[: len(table.choices)] == table.choices


def test_ranks_that_do_not_divide_it_are_refused() -> None:
    target = Gemma4ForCausalLM(
        architecture_of("12B"), Placement(torch.device("meta"), torch.bfloat16, TensorParallel(size=8))
    )
    drafter = drafter_architecture(deepspec_12b() | {"intermediate_size": 15364})
    assert isinstance(drafter, DFlashArchitecture)
    with pytest.raises(InvalidInput, match="15364 intermediate channels are not shared evenly by 8 GPUs"):
        DFlash(drafter, target)


def test_the_drafter_of_another_model_is_refused(target: Gemma4ForCausalLM, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(ZLAB_31B))
    with pytest.raises(InvalidInput, match="hidden_size 5376 is not the model's hidden_size 64") as refused:
        load_dflash(tmp_path, target)
    assert refused.value.field == "drafter"


@pytest.mark.parametrize("kind", KINDS)
def test_random_weights_draft(kind: str, target: Gemma4ForCausalLM, tmp_path: Path) -> None:
    """As benchmarks load them: from a config.json alone."""
    write_drafter(kind, tmp_path, seed=1)
    (tmp_path / "model.safetensors").unlink()
    drafter = load_dflash(tmp_path, target, load_format="dummy")
    assert all(parameter.float().isfinite().all() for parameter in drafter.parameters())
    assert drafter.parameter_bytes() == dflash_weight_bytes(drafter.architecture, tensor_parallel_size=1)
    if drafter.head.tokens is not None:
        assert drafter.head.tokens.unique().numel() == drafter.architecture.draft_vocab_size


@pytest.mark.parametrize("kind", KINDS)
def test_names_may_begin_with_model_and_copies_of_the_targets_are_not_read(
    kind: str, target: Gemma4ForCausalLM, tmp_path: Path
) -> None:
    write_drafter(kind, tmp_path, seed=1)
    plain = load_dflash(tmp_path, target).state_dict()
    tensors = load_file(tmp_path / "model.safetensors")
    copies = {"embed_tokens.weight": torch.zeros(256, 64), "verifier_norm.weight": torch.zeros(64)}
    named = {f"model.{name}": tensor for name, tensor in {**copies, **tensors}.items()}
    save_file(named, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = load_dflash(tmp_path, target).state_dict()
    assert loaded.keys() == plain.keys()
    assert all(torch.equal(loaded[name], plain[name]) for name in plain)


def _far(tokens: torch.Tensor) -> torch.Tensor:
    return tokens.index_fill(0, torch.tensor([3]), 1 << 20)


@pytest.mark.parametrize(("kind", "fault", "said"), [
    ("zlab", {"fc.weight": None}, "tensor 'fc.weight' is in no file"),
    ("zlab", {"fc.weight": torch.zeros(64, 128)}, r"'fc.weight' .* has shape \[64, 128\], expected \[64, 192\]"),
    ("zlab", {"mask_embedding": torch.zeros(64)}, "unexpected tensor 'mask_embedding'"),
    ("zlab", {"lm_head.bias": torch.zeros(256)}, "unexpected tensor 'lm_head.bias'"),
    ("dflash", {"lm_head.weight": None}, "'lm_head.weight' is in no file"),
    ("dflash", {"d2t": None}, "'d2t' is in no file"),
    ("dflash", {"d2t": torch.zeros(47, dtype=torch.int64)}, r"'d2t' .* has shape \[47\], expected \[48\]"),
    ("dflash", {"d2t": torch.full((48,), -1)}, "'d2t' does not name 48 different tokens of 256"),
    ("dflash", {"d2t": torch.full((48,), 1 << 20)}, "'d2t' does not name 48 different tokens of 256"),
    ("dflash", {"d2t": -torch.arange(48)}, "'d2t' does not name 48 different tokens of 256"),
    ("dflash", {"d2t": torch.zeros(48)}, "tensor 'd2t' has dtype F32"),
    ("dspark", {"markov_head.markov_w2.weight": torch.zeros(256, 8)}, r"expected \[48, 8\]"),
    ("deepspec", {"embed_tokens.weight": None}, "'embed_tokens.weight' is in no file"),
    ("dflash2", {"layers.1.mlp_conv.base_kernel": torch.zeros(2, 3, 64)}, r"expected \[2, 2, 64\]"),
])  # fmt: skip
def test_a_checkpoint_that_does_not_match_is_refused(
    kind: str, fault: dict[str, Any], said: str, target: Gemma4ForCausalLM, tmp_path: Path
) -> None:
    write_drafter(kind, tmp_path, seed=1)
    ((name, tensor),) = fault.items()
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop(name, None)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    if tensor is not None:
        rewrite(tmp_path, add={name: tensor})
    with pytest.raises(InvalidCheckpoint, match=said):
        load_dflash(tmp_path, target)
