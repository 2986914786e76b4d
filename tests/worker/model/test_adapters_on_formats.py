"""Adapters on quantised checkpoints: what transformers computes of the dequantised elements with the adapter merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from adapted_engine import TARGETS, TOLERANCE, engine_of, load, prompts, reference, request, scored, train
from model_checkpoints import make_checkpoint
from peft_adapters import EXPERTS
from published_layouts import write_dequantised
from quantise import quantise
from test_quantised_checkpoints import CHANGES
from transformers import Gemma4ForCausalLM

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

ADAPTERS, SLOTS = 8, 3


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("variant", "name"),
    [
        ("31B", "int4_g32_asym_actorder"),  # whose products take inputs in an order of their own
        ("31B", "fp8_block"),
        ("E2B", "fp8_channel"),
        ("26B-A4B", "int4_g32"),
    ],
)
def test_eight_adapters_and_none_in_steps_of_three_slots(variant: str, name: str, tmp_path: Path) -> None:
    source, base = tmp_path / "source", tmp_path / "base"
    config = make_checkpoint(variant, source, seed=5, **CHANGES[variant])
    quantise(source, base, name, rounds_inputs=False)
    dense = write_dequantised(base, tmp_path / "dense")
    models = {"": Gemma4ForCausalLM.from_pretrained(dense).eval()}
    for number in range(ADAPTERS):
        settings: dict[str, Any] = {"target_modules": TARGETS[variant][number % 3 :], "r": 2 + number % 7}
        settings |= {"target_parameters": EXPERTS[number % 2 :]} if variant == "26B-A4B" else {}
        models[f"adapter-{number}"] = train(dense, tmp_path / f"adapter-{number}", seed=number, **settings)
    engine = engine_of(base, max_loras=SLOTS, max_cpu_loras=ADAPTERS)
    for each in models:
        if each:
            assert load(engine, each, tmp_path / each) is None
    (tokens,) = prompts(1, config["vocab_size"])
    results = scored(engine, [request(each or "base", tokens, each, max_tokens=3) for each in models])
    for each, model in models.items():
        of_prompt, drawn, of_tokens = results[each or "base"]
        expected = reference(model, [*tokens, *drawn])
        assert float((of_prompt - expected[: len(of_prompt)]).abs().max()) <= TOLERANCE, each
        assert float((of_tokens - expected[len(of_prompt) :]).abs().max()) <= TOLERANCE, each
        if each:  # no adapter is its base
            assert float((of_prompt - results["base"][0]).abs().max()) > 100 * TOLERANCE, each
