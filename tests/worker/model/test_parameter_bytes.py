"""The weights a rank allocates are the weights that sizing counts, to the byte."""

from __future__ import annotations

import pytest
import torch

from modelserve.errors import InvalidInput
from modelserve.published import published_model, published_uris
from modelserve.sizing.weights import tensor_parallel_problem, weight_bytes
from modelserve_worker.execution.parallel import TensorParallel
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM

BASE = [uri for uri in published_uris() if not uri.endswith("-it")]


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("uri", BASE)
def test_published_models(uri: str, size: int) -> None:
    facts = published_model(uri)
    assert facts is not None
    architecture = facts.architecture

    def build(rank: int) -> Gemma4ForCausalLM:
        parallel = TensorParallel(rank=rank, size=size)
        return Gemma4ForCausalLM(
            architecture, parallel=parallel, device=torch.device("meta"), dtype=getattr(torch, architecture.dtype)
        )

    if tensor_parallel_problem(architecture, size):
        with pytest.raises(InvalidInput, match=f"tensor parallel size {size}"):
            build(0)
        return
    counted = weight_bytes(architecture, tensor_parallel_size=size)
    assert {build(rank).parameter_bytes() for rank in (0, size - 1)} == {counted}
