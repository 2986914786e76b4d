"""The tool that times kernels runs all of a GPU without Hopper's at tiny shapes, interpreted."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch

from modelserve.model.architecture import ModelArchitecture
from modelserve.model.weight_format import WeightFormat, int4
from modelserve.published import published_model


@pytest.fixture
def tool() -> ModuleType:
    if torch.cuda.is_available():
        pytest.skip("the tool itself runs here")
    return importlib.import_module("bench.kernels.kernel_speed")


def tiny(name: str) -> ModelArchitecture:
    """Of the published layers and heads' widths, all else as small as kernels take it."""
    facts = published_model(f"hf://google/gemma-4-{name}")
    assert facts is not None
    small = {
        "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_global_key_value_heads": 1, "vocab_size": 512, "num_kv_shared_layers": 0,
    }  # fmt: skip
    if facts.architecture.num_experts:
        small |= {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 256}
    return facts.architecture.model_copy(update=small)


@pytest.mark.drawn
@pytest.mark.parametrize(("name", "weights"), [("31B", int4(32)), ("26B-A4B", None)], ids=str)
@torch.no_grad()
def test_every_kernel_of_an_ampere_gpu_is_run(tool: ModuleType, name: str, weights: WeightFormat | None) -> None:
    sizes = tool.Sizes(context=40, segments=(2,), chunk=8, few=(1,), many=(65,), sampled=(1,), arena=1 << 23, round=1)
    ran = {}
    for kernel, cells in tool.lines(tool.Model(tiny(name), weights), 80, sizes):
        works = [cell.make() for cell in cells]
        assert all(work.bytes > 0 for work in works), kernel
        assert not kernel.startswith("chunk") or works[0].operations > 0, kernel
        ran[kernel] = [tool.told(cell, 1e12, 1e12, 1e12) for cell in cells]
        assert ran[kernel] == [f"{cell.name} ran" for cell in cells]
    kernels = {kernel.split()[0] for kernel in ran}
    assert kernels >= ({"product"} if weights else {"decode", "chunk", "prepare", "commit", "product"})
    assert ("experts" in kernels) is (name == "26B-A4B")
    assert ("sampler" in kernels) is (weights is None)


def test_pytorchs_kernels_are_not_judged_and_tritons_are(tool: ModuleType) -> None:
    """What a GPU of another generation would have of PyTorch's is not what this one has."""
    of = {
        weights: {
            kernel: [cell.library for cell in cells]
            for kernel, cells in tool.lines(tool.Model(tiny("26B-A4B"), weights), 80, tool.Sizes())
        }
        for weights in (None, int4(32))
    }
    products = {
        weights: [kernel for kernel in kernels if kernel.startswith("product")] for weights, kernels in of.items()
    }
    assert len(products[None]) == len(products[int4(32)]) == 4
    assert all(all(of[None][kernel]) for kernel in products[None])
    assert of[int4(32)][products[int4(32)][0]] == [*[False] * 5, True]  # dequantised, then cuBLAS
    assert not any(of[None]["experts"] + of[int4(32)]["experts"])
    assert not any(any(cells) for kernel, cells in of[None].items() if kernel.startswith(("decode", "chunk", "gelu")))
