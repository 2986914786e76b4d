"""Adapters as tools lay them out, read by the worker: each answers as trained, or is refused whole and hurts nobody."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted_engine import TOLERANCE, engine_of, load, prompts, reference, request, scored, train
from adapter_layouts import LAYOUTS, ROOT, Tensors, laid_out, layout_of, one_by_one, peft
from model_checkpoints import make_checkpoint
from peft_adapters import EXPERT_WIDTH, EXPERTS, LINEARS
from transformers import Gemma4ForCausalLM

from modelserve.model.adapters.config import ADAPTER_FILE
from modelserve.sizing.adapters import DEFAULT_TARGETS

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

Change = Callable[[Tensors, dict[str, Any]], Tensors]
LAYER = f"{ROOT}layers.1."


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("26B-A4B") / "base"
    make_checkpoint("26B-A4B", directory, seed=5, **EXPERT_WIDTH)
    return directory


@pytest.fixture(scope="module")
def trained(base: Path) -> Gemma4ForCausalLM:
    """With the adapter merged that lies beside it."""
    return train(base, base.parent / "trained", seed=2, target_modules=LINEARS, target_parameters=EXPERTS)


def test_every_tools_layout_answers_as_trained(base: Path, trained: Gemma4ForCausalLM, tmp_path: Path) -> None:
    """Five at once, over two slots."""
    engine = engine_of(base, max_loras=2, max_cpu_loras=len(LAYOUTS))
    names = {tool: tool.replace(" ", "-") for tool in LAYOUTS}
    for tool, name in names.items():
        assert load(engine, name, laid_out(base.parent / "trained", tmp_path / name, layout_of(tool))) is None, tool
    (tokens,) = prompts(1, 256)
    results = scored(engine, [request("base", tokens), *(request(name, tokens, name) for name in names.values())])
    for tool, name in names.items():
        of_prompt, drawn, of_tokens = results[name]
        expected = reference(trained, [*tokens, *drawn])
        assert float((torch.cat((of_prompt, of_tokens)) - expected).abs().max()) <= TOLERANCE, tool
        assert float((of_prompt - results["base"][0]).abs().max()) > 100 * TOLERANCE


def _renamed(old: str, new: str) -> Change:
    return lambda tensors, _: {name.replace(old, new): tensor for name, tensor in tensors.items()}


def _without(part: str) -> Change:
    return lambda tensors, _: {name: tensor for name, tensor in tensors.items() if part not in name}


def _set(**fields: object) -> Change:
    def change(tensors: Tensors, config: dict[str, Any]) -> Tensors:
        config |= fields
        return tensors

    return change


def _beside(name: str, shape: tuple[int, ...]) -> Change:
    return lambda tensors, _: tensors | {name: torch.ones(shape)}


def _damaged(tensors: Tensors, _: dict[str, Any]) -> Tensors:
    """In the last factor that is read, when all others are in place."""
    last = list(tensors)[-1]
    tensors[last][-1, -1] = torch.inf
    return tensors


def _as_a_has_it(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """B of stacked experts with an expert's columns together, as rows of A are, and so of another shape."""
    return {
        name: tensor.view(len(tensor), config["r"], -1).permute(2, 1, 0).flatten(0, 1)
        if ".experts." in name and ".lora_B." in name
        else tensor
        for name, tensor in tensors.items()
    }


REFUSED: dict[str, tuple[tuple[Change, ...], str]] = {
    "a factor of one expert is missing": ((one_by_one, _without("1.experts.3.up_proj.lora_B")), "1 of its"),
    "an expert too many": ((one_by_one, _renamed(".experts.3.", ".experts.16.")), "no such module"),
    "another order of B's rows": ((peft, _as_a_has_it), "fit none of the experts' parameters"),
    "another layer's number": ((peft, _renamed(".layers.1.", ".layers.5.")), "the model has 5 layers"),
    "a router": (
        (_beside(f"{LAYER}router.proj.lora_A.weight", (4, 64)), _beside(f"{LAYER}router.proj.lora_B.weight", (16, 4))),
        "routers are not served",
    ),
    "a tower": ((_beside(f"{ROOT}vision_tower.layers.0.fc1.lora_A.weight", (4, 64)),), "tower"),
    "DoRA": ((_set(use_dora=True),), "use_dora"),
    "another rank than is said": ((_set(r=5),), "of rank 5"),
    "an element that is not finite": ((_damaged,), "not finite"),
    "a scale that is not finite": ((_set(lora_alpha=1e40),), "is not finite in float32"),
}


def test_what_does_not_bind_is_refused_whole_and_hurts_nobody(
    base: Path, trained: Gemma4ForCausalLM, tmp_path: Path
) -> None:
    """While a request of an adapter that is there is answered, step by step, and one of the base."""
    engine = engine_of(base, max_loras=2, max_cpu_loras=3)
    saved = base.parent / "trained"
    assert load(engine, "good", saved) is None
    (tokens,) = prompts(1, 256)
    before = scored(engine, [request("good", tokens, "good"), request("base", tokens)])
    running = [request(f"running-{name or 'base'}", tokens, name, max_tokens=len(REFUSED) + 4) for name in ("good", "")]
    for each in running:
        engine.add(each)
    for number, (case, (changes, says)) in enumerate(REFUSED.items()):
        engine.step()

        def changed(tensors: Tensors, config: dict[str, Any], *, by: tuple[Change, ...] = changes) -> Tensors:
            for change in by:
                tensors = change(tensors, config)
            return tensors

        problem = load(engine, f"bad-{number}", laid_out(saved, tmp_path / str(number), changed))
        assert problem is not None, case
        assert says in problem, case
        with pytest.raises(Exception, match=f"the adapter 'bad-{number}' is not loaded"):
            engine.add(request("never", tokens, f"bad-{number}"))
    while engine.has_work:
        assert all(each.error is None for each in engine.step())
    models = {"good": trained, "": Gemma4ForCausalLM.from_pretrained(base).eval()}
    for each in running:
        logits = models[each.adapter](torch.tensor([[*tokens, *each.output_token_ids]])).logits[0, len(tokens) - 1 : -1]
        assert logits.argmax(-1).tolist() == each.output_token_ids
    after = scored(engine, [request("good", tokens, "good"), request("base", tokens)])
    for name, (of_prompt, drawn, _) in before.items():
        assert torch.allclose(after[name][0], of_prompt, atol=1e-5)
        assert after[name][1] == drawn
    # What was refused can be put right, and is read anew.
    assert load(engine, "bad-0", laid_out(saved, tmp_path / "right", peft)) is None
    (of_prompt, _, _) = scored(engine, [request("right", tokens, "bad-0")])["right"]
    assert torch.allclose(of_prompt, before["good"][0], atol=1e-5)


def test_experts_are_refused_by_name_where_slots_have_no_room_for_them(
    base: Path, trained: Gemma4ForCausalLM, tmp_path: Path
) -> None:
    engine = engine_of(base, max_loras=1, max_cpu_loras=2, lora_targets=DEFAULT_TARGETS)
    saved = base.parent / "trained"
    for number, layout in enumerate((peft, one_by_one)):
        problem = load(engine, "experts", laid_out(saved, tmp_path / str(number), layout))
        assert problem is not None
        assert "it adapts expert_down, expert_gate_up; this worker's slots have room for qkv, o, gate_up" in problem
        assert "add them to the targets" in problem
    dense = laid_out(saved, tmp_path / "dense", _without(".experts."))
    assert json.loads((dense / "adapter_config.json").read_text())["r"] == 4
    assert (dense / ADAPTER_FILE).stat().st_size < (saved / ADAPTER_FILE).stat().st_size
    assert load(engine, "dense", dense) is None
    (tokens,) = prompts(1, 256)
    results = scored(engine, [request("dense", tokens, "dense"), request("base", tokens)])
    assert float((results["dense"][0] - results["base"][0]).abs().max()) > 100 * TOLERANCE
