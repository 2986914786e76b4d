"""The trained assistant beside its target: what it drafts, here and in transformers, and how much of it is right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from acceptance import acceptance
from assistant import DRAFTS, Assistant, Target
from batches import pack
from decoder import Decoder
from rendering import Rendered
from teacher_forcing import checkpoint_renderer, reference_model, render_cell
from torch.nn import Module
from train import read_decoder
from train_assistant import read_assistant
from transformers import Gemma4AssistantForCausalLM as ReferenceAssistant
from transformers import Gemma4TextConfig, GenerationConfig

from modelserve_tools.evaluation.cells import Cell

MODELS = Path(__file__).parent
TARGET, ASSISTANT = MODELS / "gemma4-tiny-keqv", MODELS / "gemma4-tiny-keqv-assistant"
CELLS = (Cell("tool_call", None, 4), Cell("thinking", None, 4), Cell("lookback", None, 4), Cell("recall", 400, 4))
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def target() -> Decoder:
    return read_decoder(TARGET, device=torch.device("cpu"), dtype=torch.float32, compiled=False)


@pytest.fixture(scope="module")
def assistant(target: Decoder) -> Assistant:
    return read_assistant(ASSISTANT, target)


def kv_sharing_modes(config: Gemma4TextConfig) -> list[str | None]:
    """Which layers read the caches of others, and which ones lend theirs."""
    kinds = config.layer_types
    if config.num_kv_shared_layers:
        return ["reuse"] * len(kinds)
    last = {kind: layer for layer, kind in enumerate(kinds)}
    return ["store" if last[kind] == layer else None for layer, kind in enumerate(kinds)]


@pytest.fixture
def reference_target(monkeypatch: pytest.MonkeyPatch) -> Module:
    """transformers 5.23 lends no caches of a target without shared layers, and builds no assistant at all.

    Its own rule for the two is replaced; everything that computes is its own.
    """
    monkeypatch.setattr(Gemma4TextConfig, "kv_sharing_modes", property(kv_sharing_modes))
    return reference_model(TARGET, dtype=torch.float32)


@pytest.fixture
def reference_assistant(reference_target: Module) -> Module:
    return ReferenceAssistant.from_pretrained(ASSISTANT, dtype=torch.float32).eval()


def rendered(cell: Cell) -> list[Rendered]:
    return render_cell(checkpoint_renderer(TARGET), cell, seed=11)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.skill)
@pytest.mark.parametrize("ahead", [0, 1])
def test_nearly_every_draft_is_what_the_target_says(assistant: Assistant, cell: Cell, ahead: int) -> None:
    right, possible = acceptance(assistant, rendered(cell), ahead=ahead)
    assert possible[0] >= 8
    assert (right >= 0.95 * possible).all(), (right, possible)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.skill)
def test_transformers_drafts_the_same(
    assistant: Assistant,
    reference_target: Module,
    reference_assistant: Module,
    cell: Cell,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Logits of the first draft, with prompts shorter and longer than the window (plus the one row more it sees)."""
    monkeypatch.setattr(assistant, "window", assistant.window + 1)
    each = rendered(cell)[0]
    seen = each.prompt_tokens
    prompt, said = torch.tensor([each.token_ids[:seen]]), torch.tensor([[each.token_ids[seen]]])
    with torch.no_grad():
        outputs = reference_target(prompt, output_hidden_states=True, return_shared_kv_states=True)
        embedded = torch.cat((reference_target.get_input_embeddings()(said), outputs.hidden_states[-1][:, -1:]), dim=-1)
        theirs = reference_assistant(
            inputs_embeds=embedded, position_ids=torch.tensor([[seen]]), shared_kv_states=outputs.shared_kv_states
        ).logits[0, 0]
        rows = pack([[Rendered(each.token_ids, each.answers[-1:])]], length=512, answers=1)
        ours = assistant.drafts(rows, Target.of(assistant.target, rows), said[None], ahead=1)[0, 0, 0]
    assert float((ours - theirs).abs().max()) <= TOLERANCE


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.skill)
def test_assisted_decoding_in_transformers_needs_fewer_passes(
    reference_target: Module, reference_assistant: Module, cell: Cell
) -> None:
    """The tokens stay the target's own; a pass of the target yields several of them."""
    passes = [0]
    reference_target.model.register_forward_hook(lambda *_: passes.__setitem__(0, passes[0] + 1))
    greedy = GenerationConfig.from_pretrained(TARGET, max_new_tokens=128)
    reference_assistant.generation_config.num_assistant_tokens = DRAFTS
    for each in rendered(cell):
        answer = list(each.token_ids[each.prompt_tokens :])
        prompt = torch.tensor([each.token_ids[: each.prompt_tokens]])
        passes[0] = 0
        said = reference_target.generate(prompt, generation_config=greedy, assistant_model=reference_assistant)
        assert said[0, each.prompt_tokens :].tolist() == answer
        assert passes[0] <= 1 + -(-len(answer) // 3)
