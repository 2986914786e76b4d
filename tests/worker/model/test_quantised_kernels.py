"""A model whose quantised matrices are repacked and multiplied by the kernels says what its dequantised elements say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dense_attention import dense_logits
from model_checkpoints import load_checkpoint, make_checkpoint, random_tokens
from quantise import quantise
from torch import Tensor

from modelserve_worker.kernels.fp8_linear_triton import TritonFp8
from modelserve_worker.kernels.int4_linear_triton import TritonInt4
from modelserve_worker.layers import stored_matrix
from modelserve_worker.layers.stored_matrix import DenseMatrix

CAPABILITY = 80  # inputs are not rounded there
IDS = random_tokens(20, seed=20)  # more than few rows
CASES = [
    ("31B", "int4_g32"), ("31B", "int4_g32_asym_actorder"), ("E2B", "fp8_channel"), ("31B", "fp8_block"),
    ("26B-A4B", "int4_g32_asym"), ("26B-A4B", "fp8_block"),
]  # fmt: skip


@pytest.fixture(scope="module", params=CASES, ids=[" ".join(case) for case in CASES])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    variant, name = request.param
    root = tmp_path_factory.mktemp("kernels")
    make_checkpoint(variant, root / "dense", seed=3)
    quantise(root / "dense", root / "quantised", name)
    return root / "quantised"


def error(logits: Tensor, exact: Tensor) -> float:
    return float((logits - exact).norm() / exact.norm())


def test_logits_are_as_near_to_float32_as_those_of_plain_products(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = dense_logits(load_checkpoint(checkpoint), IDS)
    plain = dense_logits(load_checkpoint(checkpoint, dtype=torch.bfloat16), IDS)
    doors: list[type] = []

    def door_of(kind: type[TritonInt4] | type[TritonFp8]) -> object:
        def door(_: torch.device) -> object:
            doors.append(kind)
            return kind(CAPABILITY)

        return door

    monkeypatch.setattr(stored_matrix, "int4_door", door_of(TritonInt4))
    monkeypatch.setattr(stored_matrix, "fp8_door", door_of(TritonFp8))
    model = load_checkpoint(checkpoint, dtype=torch.bfloat16)
    assert len(doors) == sum(not isinstance(matrix, DenseMatrix) for _, matrix in model.stored_matrices()) > 0
    for count in (len(IDS), 3):
        logits = dense_logits(model, IDS[:count])
        assert not torch.equal(logits, plain[:count]), "the kernels were not asked"
        assert error(logits, exact[:count]) < 1.3 * error(plain[:count], exact[:count]) + 2e-3
