"""How large terms are beside their products: as float64 has it, and in an engine as PEFT's own layers do."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from adapted_engine import engine_of, load, prompts, request, scored
from model_checkpoints import make_checkpoint
from peft_adapters import EXPERT_WIDTH, EXPERTS, LINEARS, adapted
from torch import Tensor, nn

from modelserve_worker.kernels.adapters.expert_terms import PlainExpertTerms
from modelserve_worker.kernels.adapters.terms import AdapterBlocks, PlainTerms, SlotFactors, row_blocks
from modelserve_worker.kernels.experts.experts import Choice, PlainExperts
from modelserve_worker.layers.adapter_strengths import StrengthRecorder, rows_to_measure


def _blocks(slots: np.ndarray) -> AdapterBlocks:
    return AdapterBlocks(*(torch.from_numpy(each) for each in (*row_blocks(slots), slots)))


def _factors(*shape: int, parts: tuple[int, ...], rank: int, inputs: int) -> SlotFactors:
    return SlotFactors(
        torch.randn(*shape, len(parts) * rank, inputs), torch.randn(*shape, sum(parts), rank),
        torch.rand(*shape, len(parts)) + 0.5, parts,
    )  # fmt: skip


@pytest.mark.parametrize("split", [False, True])
def test_a_matrix_is_measured_part_by_part(split: bool) -> None:
    slots = np.array([1, 0, 1, -1, 1, 0], dtype=np.int32)
    factors, x = _factors(2, parts=(24, 8), rank=3, inputs=16), torch.randn(6, 16)
    factors.b[1, 24:] = 0
    product = torch.randn(2, 6, 32) if split else torch.randn(6, 32)
    recorder = StrengthRecorder(1, *map(torch.from_numpy, rows_to_measure(1, slots)))
    recorder.note(factors, PlainTerms().shrink(x, factors, _blocks(slots)), product)
    (found,) = recorder.squares.values()
    rows = np.flatnonzero(slots == 1)
    whole = (product.sum(0) if split else product)[rows].double()
    for part, (outputs, a) in enumerate(zip((slice(0, 24), slice(24, 32)), (slice(0, 3), slice(3, 6)), strict=True)):
        term = (
            factors.scales[1, part] * (x[rows].double() @ factors.a[1, a].double().T) @ factors.b[1, outputs].double().T
        )
        assert torch.isclose(found[part, 0], term.square().sum(), rtol=1e-4)
        assert torch.isclose(found[part, 1], whole[:, outputs].square().sum(), rtol=1e-4)
    assert found[1, 0] == 0


def test_experts_are_measured_by_what_rows_chose() -> None:
    slots = np.array([0, 1, 1, 0, 1], dtype=np.int32)
    chosen = torch.stack([torch.randperm(6)[:2] for _ in slots]).int()
    dealt = PlainExperts().deal(torch.randn(5, 16), Choice(torch.ones(chosen.shape), chosen), 6)
    factors = _factors(2, 6, parts=(12, 12), rank=3, inputs=16)
    terms, product = PlainExpertTerms(), torch.randn(10, 24)
    blocks = terms.blocks(_blocks(slots), chosen, dealt.places, factors)
    recorder = StrengthRecorder(1, *map(torch.from_numpy, rows_to_measure(1, slots)))
    recorder.routed(chosen, dealt.places)
    recorder.note_experts(factors, terms.shrink(dealt.rows, factors, blocks), product)
    (found,) = recorder.squares.values()
    expected = torch.zeros(2, 2, dtype=torch.float64)
    for row in np.flatnonzero(slots == 1):
        for choice in range(2):
            place, expert = int(dealt.places[row, choice]), int(chosen[row, choice])
            for part in range(2):
                a, b = factors.a[1, expert, 3 * part : 3 * part + 3], factors.b[1, expert, 12 * part : 12 * part + 12]
                term = factors.scales[1, expert, part] * (b.double() @ (a.double() @ dealt.rows[place].double()))
                expected[part, 0] += term.square().sum()
                expected[part, 1] += product[place, 12 * part : 12 * part + 12].double().square().sum()
    assert torch.allclose(found, expected, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_engine_measures_the_first_prompt_that_it_scores(tmp_path: Path) -> None:
    base = tmp_path / "base"
    make_checkpoint("26B-A4B", base, seed=5, **EXPERT_WIDTH)
    peft = adapted(base, tmp_path / "one", target_modules=LINEARS, target_parameters=EXPERTS).eval()
    engine = engine_of(base, max_loras=1)
    assert load(engine, "one", tmp_path / "one") is None
    assert engine.adapter_strengths("one") == ()
    (tokens,) = prompts(1, 256)
    scored(engine, [request("base", tokens), request("adapted", tokens, "one")])
    found = {(each.linear, each.layer): each for each in engine.adapter_strengths("one")}
    layers = engine.runner.model.architecture.num_hidden_layers  # type: ignore[attr-defined]
    kinds = ("qkv", "o", "gate_up", "down", "expert_gate_up", "expert_down")
    assert set(found) == {(kind, layer) for kind in kinds for layer in range(layers)}
    outputs: dict[str, tuple[Tensor, Tensor]] = {}

    def heard(name: str, module: nn.Module) -> None:
        plain: list[Tensor] = []
        module.base_layer.register_forward_hook(lambda _, __, result: plain.append(result))  # type: ignore[union-attr,arg-type]
        module.register_forward_hook(lambda _, __, result: outputs.update({name: (result, plain[-1])}))

    names = {"o": ["self_attn.o_proj"], "gate_up": ["mlp.gate_proj", "mlp.up_proj"], "down": ["mlp.down_proj"]}
    modules = dict(peft.base_model.model.model.named_modules())
    for layer in range(layers):
        for name in itertools.chain.from_iterable(names.values()):
            heard(f"layers.{layer}.{name}", modules[f"layers.{layer}.{name}"])
    with torch.no_grad():
        peft(torch.tensor([tokens]))
    for layer in range(layers):
        for kind, of in names.items():
            pairs = [outputs[f"layers.{layer}.{name}"] for name in of]
            term, product = (
                sum(float(each.double().square().sum()) for each in parts)
                for parts in ([whole - plain for whole, plain in pairs], [plain for _, plain in pairs])
            )
            assert found[kind, layer].ratio == pytest.approx((term / product) ** 0.5, rel=1e-3)
    assert all(each.ratio and not each.silent for each in found.values())
    engine.scheduler.adapters.remove("one")
    scored(engine, [request("again", tokens)])
    assert engine.adapter_strengths("one") == ()
