"""The weights a rank allocates are the weights that sizing counts, to the byte."""

from __future__ import annotations

import pytest
import torch

from modelserve.errors import InvalidInput
from modelserve.model.weight_format import StoredType, WeightFormat, int4
from modelserve.published import published_model, published_uris
from modelserve.sizing.weights.text import tensor_parallel_problem, weight_bytes
from modelserve_worker.layers.parallel import TensorParallel
from modelserve_worker.layers.placement import Placement
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM

BASE = [uri for uri in published_uris() if not uri.endswith(("-it", "-ct"))]
FORMATS = [
    int4(32),
    int4(128, symmetric=False),
    WeightFormat(stored=StoredType.FP8, scales="channel"),
    WeightFormat(stored=StoredType.FP8, scales="block"),
]


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("uri", BASE)
def test_published_models(uri: str, size: int) -> None:
    facts = published_model(uri)
    assert facts is not None
    architecture = facts.architecture

    def build(rank: int) -> Gemma4ForCausalLM:
        parallel = TensorParallel(rank=rank, size=size)
        placement = Placement(torch.device("meta"), getattr(torch, architecture.dtype), parallel)
        return Gemma4ForCausalLM(architecture, placement)

    if tensor_parallel_problem(architecture, size):
        with pytest.raises(InvalidInput, match=f"tensor parallel size {size}"):
            build(0)
        return
    counted = weight_bytes(architecture, tensor_parallel_size=size)
    assert {build(rank).parameter_bytes() for rank in (0, size - 1)} == {counted}


@pytest.mark.parametrize("stored", FORMATS, ids=str)
@pytest.mark.parametrize("uri", BASE)
def test_published_models_in_quantised_formats(uri: str, stored: WeightFormat) -> None:
    """On one rank and on two, with scales and zero points; where a split cuts what a scale spans, both refuse it."""
    facts = published_model(uri)
    assert facts is not None
    architecture = facts.architecture

    def build(size: int) -> Gemma4ForCausalLM:
        parallel, device = TensorParallel(rank=size - 1, size=size), torch.device("meta")
        return Gemma4ForCausalLM(architecture, Placement(device, torch.bfloat16, parallel, stored))

    for size in (1, 2):
        if problem := tensor_parallel_problem(architecture, size, weight_format=stored):
            with pytest.raises(InvalidInput) as caught:
                build(size)
            assert str(caught.value) == problem
        else:
            counted = weight_bytes(architecture, tensor_parallel_size=size, weight_format=stored)
            assert build(size).parameter_bytes() == counted


def test_what_the_published_sizes_split_into() -> None:
    """26B-A4B's experts are 704 wide: 5.5 groups or blocks of 128. Every other size splits in two."""
    refused = {
        (uri.removeprefix("hf://google/gemma-4-"), str(stored), size)
        for uri in BASE
        for stored in FORMATS
        for size in (1, 2)
        if (facts := published_model(uri)) and tensor_parallel_problem(facts.architecture, size, weight_format=stored)
    }
    grouped = {("26B-A4B", "int4_g128_asym", 1), ("26B-A4B", "int4_g128_asym", 2)}
    assert refused == grouped | {("26B-A4B", "fp8_block", 2)}
