"""A model whose quantised matrices are repacked and multiplied by kernels says what their elements say."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from chosen_operations import ChosenOperations, product
from dense_attention import dense_logits
from gguf_files import write_gguf
from model_checkpoints import load_checkpoint, make_checkpoint, random_tokens
from pretended_gpu import DEVICE, pretended_gpu
from quantise import quantise
from torch import Tensor

from modelserve.inspection import read_architecture, read_weight_format
from modelserve.model.weight_format import StoredType
from modelserve.sizing.backends.resolve import Formats, resolve
from modelserve_worker.kernels.experts.experts import NO_EXPERT, Choice, PlainExperts
from modelserve_worker.kernels.operations import Operations
from modelserve_worker.kernels.products.fp8_linear_triton import fp8_grouped, fp8_unpacked_product
from modelserve_worker.kernels.products.int4_linear_triton import int4_fused_product, int4_grouped
from modelserve_worker.kernels.products.int8_linear_triton import int8_fused_product, int8_grouped
from modelserve_worker.kernels.products.linear_tiles import SharedBuffers
from modelserve_worker.layers.stored.int4 import Int4Matrix
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM

pytestmark = pytest.mark.drawn

CAPABILITY = 80
IDS = random_tokens(17, seed=20)  # one more than few rows


def checkpoint(variant: str, name: str, root: Path) -> Path:
    make_checkpoint(variant, root / "dense", seed=3)
    quantise(root / "dense", root / "quantised", name, rounds_inputs=False)
    return root / "quantised"


def error(actual: Tensor, exact: Tensor) -> float:
    return float((actual.double() - exact.double()).norm() / exact.double().norm())


def on_kernels(directory: Path) -> Gemma4ForCausalLM:
    """The model as a GPU would have it, its matrices in the order of the kernels, on the interpreter."""
    shared = SharedBuffers(torch.device("cpu"))
    products = {
        StoredType.INT4: (product(partial(int4_fused_product, capability=CAPABILITY, shared=shared)),),
        StoredType.INT8: (product(partial(int8_fused_product, capability=CAPABILITY, shared=shared)),),
        StoredType.FP8: (product(partial(fp8_unpacked_product, capability=CAPABILITY, shared=shared)),),
    }
    grouped = {
        StoredType.INT4: (product(partial(int4_grouped, capability=CAPABILITY)),),
        StoredType.INT8: (product(partial(int8_grouped, capability=CAPABILITY)),),
        StoredType.FP8: (product(partial(fp8_grouped, capability=CAPABILITY)),),
    }
    operations = ChosenOperations(products=products, grouped=grouped)
    model = load_checkpoint(directory, dtype=torch.bfloat16, operations=operations)
    assert not any(matrix.dequantises for _, matrix in model.stored_matrices())
    return model


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        ("31B", "int4_g32_asym_actorder"),
        ("E2B", "fp8_channel"),
        ("E2B", "int8_channel_packed"),
        ("31B", "gptq_8bit_g32"),
    ],
)
def test_logits_are_as_near_to_float32_as_those_of_plain_products(variant: str, name: str, tmp_path: Path) -> None:
    directory = checkpoint(variant, name, tmp_path)
    exact = dense_logits(load_checkpoint(directory), IDS)
    plain = dense_logits(load_checkpoint(directory, dtype=torch.bfloat16), IDS)
    model = on_kernels(directory)
    for count in (len(IDS), 3):
        logits = dense_logits(model, IDS[:count])
        assert error(logits, exact[:count]) < 1.3 * error(plain[:count], exact[:count]) + 2e-3


@pytest.mark.parametrize("name", ["int4_g32_asym", "fp8_block", "int8_g32"])
def test_experts_multiply_as_their_dequantised_matrices(name: str, tmp_path: Path) -> None:
    """One layer: which experts a token takes hangs on its last bits, so logits of rounded models lie far apart."""
    directory = checkpoint("26B-A4B", name, tmp_path)
    models = load_checkpoint(directory), on_kernels(directory)
    wide, narrow = (model.decoder_layer(1).moe.experts for model in models if model.decoder_layer(1).moe is not None)
    generator = torch.Generator().manual_seed(7)
    x = torch.randn((9, 64), generator=generator).bfloat16()
    weights = torch.rand((9, 3), generator=generator)
    chosen = torch.rand((9, 16), generator=generator).topk(3).indices.to(torch.int32)
    chosen[4] = NO_EXPERT  # a row that only pads the step
    choice = Choice(weights, chosen)
    expected, actual = (PlainExperts().weighted_sum(each) for each in (wide(x.float(), choice), narrow(x, choice)))
    assert not actual[4].any()
    assert error(actual, expected) < 2e-2  # three roundings to bfloat16, one after the other


@pytest.mark.parametrize("name", ["gptq_g32_asym", "Q4_0"])
def test_scales_of_float16_take_kernels_on_a_gpu(name: str, tmp_path: Path) -> None:
    """As they are, whoever made the checkpoint."""
    make_checkpoint("31B", tmp_path / "dense", seed=3, dtype=torch.bfloat16, head_dim=64, global_head_dim=256)
    directory = tmp_path / "quantised"
    if name == "Q4_0":
        directory.mkdir()
        write_gguf(tmp_path / "dense", name, directory / "m.gguf")
    else:
        quantise(tmp_path / "dense", directory, name)
    elements = {name: matrix.dense().double() for name, matrix in load_checkpoint(directory).stored_matrices()}
    architecture, stored = read_architecture(directory), read_weight_format(directory)
    with pretended_gpu(CAPABILITY):
        operations = Operations(resolve(CAPABILITY, architecture, Formats(stored)), DEVICE)
        model = load_checkpoint(directory, dtype=torch.bfloat16, device=DEVICE, operations=operations)
        matrices = dict(model.stored_matrices())
        assert not any(matrix.dequantises for matrix in matrices.values())
        quantised = {name: each for name, each in matrices.items() if isinstance(each, Int4Matrix)}
        one_of_each_shape = {(matrix.rows, matrix.columns): name for name, matrix in quantised.items()}.values()
        assert len(one_of_each_shape) > 2
        for name in one_of_each_shape:
            matrix = quantised[name]
            assert matrix.scale.dtype == torch.float16
            x = torch.randn(3, matrix.columns).bfloat16()
            product = matrix.linear(x.to(DEVICE)).cpu()
            assert error(product, x.double() @ elements[name].t()) < 4e-3
