"""The assistant's own parts: bytes as sizing counts them, the head with centroids, checkpoints that do not fit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from architecture_of import architecture_of
from assisted import ASSISTANT, TARGET, write_assistant
from model_checkpoints import load_checkpoint, make_checkpoint, rewrite
from safetensors.torch import load_file, save_file

from modelserve.errors import InvalidInput
from modelserve.published import assistant_of
from modelserve.sizing.weights.assistant import assistant_weight_bytes, drafter_buffer_bytes
from modelserve_worker.drafters.assistant_drafter import AssistantDrafter
from modelserve_worker.layers.parallel import TensorParallel
from modelserve_worker.layers.placement import Placement
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM
from modelserve_worker.models.gemma4_assistant import CentroidHead, Gemma4Assistant
from modelserve_worker.weights.files import InvalidCheckpoint
from modelserve_worker.weights.loader import load_assistant


@pytest.mark.parametrize("variant", ["E2B", "E4B", "12B", "26B-A4B", "31B"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_rank_holds_the_bytes_that_sizing_counts(variant: str, ranks: int) -> None:
    parallel = TensorParallel(rank=ranks - 1, size=ranks)
    meta, dtype = torch.device("meta"), torch.bfloat16
    target = Gemma4ForCausalLM(architecture_of(variant), Placement(meta, dtype, parallel))
    held = Gemma4Assistant(assistant_of(variant), target).parameter_bytes()
    assert held == assistant_weight_bytes(assistant_of(variant), tensor_parallel_size=ranks)


def test_ranks_that_do_not_divide_its_heads_are_refused() -> None:
    placement = Placement(torch.device("meta"), torch.bfloat16, TensorParallel(size=8))
    target = Gemma4ForCausalLM(architecture_of("E4B"), placement)
    with pytest.raises(InvalidInput, match="tensor parallel size 8 does not divide the drafter's 4 query heads"):
        Gemma4Assistant(assistant_of("E4B"), target)


def test_the_head_with_centroids_takes_the_best_token_of_the_nearest(tmp_path: Path) -> None:
    """In more rows than one selection has; the best of all tokens is often in none of the nearest centroids."""
    assistant = assistant_of("E4B").model_copy(
        update={"hidden_size": 24, "vocab_size": 512, "num_centroids": 32, "centroid_top_k": 4}
    )
    head = CentroidHead(assistant, Placement(torch.device("cpu"), torch.float32))
    generator = torch.Generator().manual_seed(5)
    head.weight.copy_(torch.randn(32, 24, generator=generator))
    head.ordering.copy_(torch.randperm(512, generator=generator))
    table, x = torch.randn(512, 24, generator=generator), torch.randn(21, 24, generator=generator)
    said = head(x, table)
    for row, token in zip(x.double(), said.tolist(), strict=True):
        nearest = (head.weight.double() @ row).argsort(descending=True)[:4].tolist()
        tokens = [int(t) for centroid in nearest for t in head.ordering[16 * centroid : 16 * centroid + 16]]
        assert token == max(tokens, key=lambda t: float(table[t].double() @ row))
    assert (said != (x @ table.T).argmax(-1)).any()


def test_the_assistant_of_another_model_is_refused(tmp_path: Path) -> None:
    make_checkpoint("E4B", tmp_path, seed=1)
    with pytest.raises(InvalidInput, match="backbone_hidden_size 128 is not the model's hidden_size 64") as refused:
        load_assistant(ASSISTANT, load_checkpoint(tmp_path))
    assert refused.value.field == "drafter"


@pytest.mark.parametrize("fault", ["missing", "shape", "ordering"])
def test_a_checkpoint_that_does_not_match_is_refused(fault: str, tmp_path: Path) -> None:
    directory = tmp_path / "drafter"
    if fault == "ordering":
        write_assistant(directory, TARGET, seed=1, centroids=64)
        tensors = load_file(directory / "model.safetensors")
        rewrite(
            directory, add={"masked_embedding.token_ordering": tensors["masked_embedding.token_ordering"].clamp(min=1)}
        )
    else:
        shutil.copytree(ASSISTANT, directory)
        tensors = load_file(directory / "model.safetensors")
        taken = tensors.pop("post_projection.weight")
        if fault == "shape":
            tensors["post_projection.weight"] = taken[:-1].contiguous()
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    said = {
        "missing": "'post_projection.weight' is in no file", "shape": r"has shape \[127, 128\], expected \[128, 128\]",
        "ordering": "does not name every token once",
    }[fault]  # fmt: skip
    with pytest.raises(InvalidCheckpoint, match=said):
        load_assistant(directory, load_checkpoint(TARGET))


def test_random_weights_draft(tmp_path: Path) -> None:
    """As benchmarks load them: from a config.json alone."""
    write_assistant(tmp_path, TARGET, seed=1, centroids=64)
    (tmp_path / "model.safetensors").unlink()
    assistant = load_assistant(tmp_path, load_checkpoint(TARGET), load_format="dummy")
    assert all(parameter.float().isfinite().all() for parameter in assistant.parameters())
    drafter = AssistantDrafter(assistant, num_tokens=3, max_num_seqs=2)
    named = [*vars(drafter).values(), *vars(drafter._buffers).values()]
    held = {each.untyped_storage().data_ptr(): each for each in named if isinstance(each, torch.Tensor)}
    counted = drafter_buffer_bytes(assistant.architecture, num_tokens=3, max_num_seqs=2)
    assert sum(each.untyped_storage().nbytes() for each in held.values()) == counted
