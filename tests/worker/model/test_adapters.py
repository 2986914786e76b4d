"""Requests with adapters get what transformers computes of the merged weights, whatever lies beside them in a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapted_engine import TARGETS, TOLERANCE, engine_of, load, prompts, reference, request, scored, train
from model_checkpoints import make_checkpoint
from peft_adapters import EXPERT_WIDTH, EXPERTS, LINEARS
from transformers import Gemma4ForCausalLM

from modelserve_worker.request import Request, SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.mark.parametrize("variant", list(TARGETS))
def test_a_mixed_batch_is_what_merged_weights_compute(variant: str, tmp_path: Path) -> None:
    """Three adapters on two slots and the base, in steps that they share, prompts in chunks and tokens behind them."""
    base = tmp_path / "base"
    of_experts = variant == "26B-A4B"
    config = make_checkpoint(variant, base, seed=5, **(EXPERT_WIDTH if of_experts else {}))
    models = {"": Gemma4ForCausalLM.from_pretrained(base).eval()}
    every: dict[str, Any] = {"target_modules": TARGETS[variant]} | (
        {"target_parameters": EXPERTS} if of_experts else {}
    )
    settings: list[dict[str, Any]] = [
        every,
        {"target_modules": TARGETS[variant][:2], "r": 8, "use_rslora": True},
        every | {"rank_pattern": {"down_proj": 2}, "alpha_pattern": {"o_proj": 1.5}},
    ]
    for number, each in enumerate(settings):
        models[f"adapter-{number}"] = train(base, tmp_path / f"adapter-{number}", seed=number, **each)
    engine = engine_of(base, max_loras=2, max_cpu_loras=3)
    for name in models:
        if name:
            assert load(engine, name, tmp_path / name) is None
    asked = {
        f"{number}-{name}": request(f"{number}-{name}", tokens, name)
        for number, tokens in enumerate(prompts(3, config["vocab_size"]))
        for name in models
    }
    results = scored(engine, list(asked.values()))
    assert len(results) == len(asked)
    base_scores = {}
    for name, each in asked.items():
        of_prompt, tokens, of_tokens = results[name]
        expected = reference(models[each.adapter], [*each.prompt_token_ids, *tokens])
        assert float((torch.cat((of_prompt, of_tokens)) - expected).abs().max()) <= TOLERANCE, name
        if not each.adapter:
            base_scores[name.split("-")[0]] = of_prompt
        else:  # no adapter is its base
            assert float((of_prompt - base_scores[name.split("-")[0]]).abs().max()) > 100 * TOLERANCE, name


def test_what_no_slot_takes_is_refused_and_others_serve_on(tmp_path: Path) -> None:
    base = tmp_path / "base"
    config = make_checkpoint("12B", base, seed=5)
    train(base, tmp_path / "wide", seed=1, target_modules=LINEARS, r=16)
    train(base, tmp_path / "good", seed=2, target_modules=LINEARS)
    engine = engine_of(base, max_loras=1, lora_targets=("qkv", "o", "gate_up", "down"))
    problem = load(engine, "wide", tmp_path / "wide")
    assert problem is not None
    assert "its rank is 16; this worker's slots have 8" in problem
    assert load(engine, "good", tmp_path / "good") is None
    (tokens,) = prompts(1, config["vocab_size"])
    assert scored(engine, [request("one", tokens, "good"), request("two", tokens)])
    with pytest.raises(Exception, match="the adapter 'wide' is not loaded"):
        engine.add(request("three", tokens, "wide"))


def test_a_prefix_is_shared_within_an_adapter_alone(tmp_path: Path) -> None:
    base = tmp_path / "base"
    config = make_checkpoint("31B", base, seed=5)
    models = {name: train(base, tmp_path / name, seed=number, target_modules=LINEARS)
              for number, name in enumerate(("one", "two"))}  # fmt: skip
    engine = engine_of(base, max_loras=2)
    for name in models:
        assert load(engine, name, tmp_path / name) is None
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(6, config["vocab_size"], (100,), generator=generator).tolist()
    first = request("first", tokens, "one")
    scored(engine, [first])
    plain = SamplingParams(seed=1, max_tokens=3, temperature=0.0, logprobs=0, ignore_eos=True)
    later = [Request(f"later-{name or 'base'}", tokens, plain, adapter=name) for name in ("one", "two", "")]
    for each in later:
        engine.add(each)
    while engine.has_work:
        engine.step()
    assert [each.cached_tokens > 0 for each in later] == [True, False, False]
    for each, name in zip(later, ("one", "two"), strict=False):
        whole = [*tokens, *each.output_token_ids]
        logits = models[name](torch.tensor([whole])).logits[0, len(tokens) - 1 : -1]
        assert logits.argmax(-1).tolist() == each.output_token_ids


def test_two_ranks_hold_their_shares(tmp_path: Path) -> None:
    """Rows and columns of both factors are cut as their matrices are; the second rank reads the files by itself."""
    base = tmp_path / "base"
    config = make_checkpoint("26B-A4B", base, seed=5, **EXPERT_WIDTH)
    adapted = train(base, tmp_path / "one", seed=1, target_parameters=EXPERTS)
    models = {"": Gemma4ForCausalLM.from_pretrained(base).eval(), "one": adapted}
    engine = engine_of(base, max_loras=1, tensor_parallel_size=2)
    try:
        assert load(engine, "one", tmp_path / "one") is None
        (tokens,) = prompts(1, config["vocab_size"])
        asked = [request(name or "base", tokens, name) for name in models]
        for each, (of_prompt, drawn, of_tokens) in zip(asked, scored(engine, asked).values(), strict=True):
            expected = reference(models[each.adapter], [*tokens, *drawn])
            assert float((torch.cat((of_prompt, of_tokens)) - expected).abs().max()) <= TOLERANCE
    finally:
        engine.runner.shutdown()


def test_a_rows_bits_do_not_depend_on_others_adapters_in_profile_exact(tmp_path: Path) -> None:
    base = tmp_path / "base"
    config = make_checkpoint("26B-A4B", base, seed=5, **EXPERT_WIDTH)
    for number, name in enumerate(("one", "two")):
        train(base, tmp_path / name, seed=number, target_parameters=EXPERTS)
    engine = engine_of(base, max_loras=2, profile="exact", prefix_caching=False)
    for name in ("one", "two"):
        assert load(engine, name, tmp_path / name) is None
    texts = list(prompts(3, config["vocab_size"]))
    named = zip(("one", "two", ""), texts, strict=True)
    together = [request(f"together-{name or 'base'}", text, name) for name, text in named]
    beside = scored(engine, together)
    for each in together:
        (alone,) = scored(engine, [request(f"alone-{each.request_id}", each.prompt_token_ids, each.adapter)]).values()
        of_prompt, tokens, of_tokens = beside[each.request_id]
        assert torch.equal(alone[0], of_prompt)
        assert alone[1] == tokens
        assert torch.equal(alone[2], of_tokens)
