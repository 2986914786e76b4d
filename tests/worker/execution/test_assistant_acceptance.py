"""The engine's assistant is as often right as the one that was trained, draft by draft; over wrong pages it is not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from acceptance import acceptance
from assistant import DRAFTS
from assisted import ASSISTANT, TARGET, Between, assistant_for, damage_checkpoint, engine_with
from model_checkpoints import load_checkpoint
from paged_logits import geometry_of
from rendering import Rendered
from teacher_forcing import checkpoint_renderer, render_cell
from torch import Tensor
from train import read_decoder
from train_assistant import read_assistant

from modelserve.model.architecture import LayerKind
from modelserve_tools.evaluation.cells import Cell
from modelserve_worker.attention.cache_reader import PlainCacheReader
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM
from modelserve_worker.request import Request, SamplingParams

CELLS = (Cell("tool_call", None, 3), Cell("lookback", None, 3), Cell("recall", 400, 2))
SLOTS, LONGEST = 4, 704


@pytest.fixture(scope="module")
def model() -> Gemma4ForCausalLM:
    return load_checkpoint(TARGET)


@pytest.fixture(scope="module")
def conversations() -> list[Rendered]:
    renderer = checkpoint_renderer(TARGET)
    return [each for cell in CELLS for each in render_cell(renderer, cell, seed=11)]


def judged(model: Gemma4ForCausalLM, assistant: Path, conversations: Sequence[Rendered]) -> tuple[Tensor, Tensor]:
    """(accepted, possible), int64 [DRAFTS] each, of drafts made at every token of the answers. The engine is handed
    other tokens, of which it accepts none, so that it comes to each."""
    made: dict[tuple[str, int], list[int]] = {}

    def look(names: list[str], positions: list[int], proposed: Tensor) -> Tensor:
        made.update(zip(zip(names, positions, strict=True), proposed.tolist(), strict=True))
        return torch.full_like(proposed, 4)

    drafter = Between(assistant_for(model, assistant, num_tokens=DRAFTS, slots=SLOTS), look)
    engine = engine_with(
        model, geometry_of(model), drafter, chunk=256, slots=SLOTS, longest=LONGEST, pool_of=SLOTS, stamps=True
    )
    requests = []
    for number, each in enumerate(conversations):
        answer = len(each.token_ids) - each.prompt_tokens
        most = answer + DRAFTS + 1  # they end by themselves; who has no room left asks for no drafts
        sampling = SamplingParams(seed=0, max_tokens=most, temperature=0.0)
        requests.append(Request(str(number), each.token_ids[: each.prompt_tokens], sampling))
        engine.add(requests[-1])
    while engine.has_work:
        engine.step()
    right, possible = torch.zeros(DRAFTS, dtype=torch.int64), torch.zeros(DRAFTS, dtype=torch.int64)
    for request, each in zip(requests, conversations, strict=True):
        assert (*request.prompt_token_ids, *request.output_token_ids) == each.token_ids, "the target knows these"
        for position in range(each.prompt_tokens, len(each.token_ids)):
            follows = torch.tensor(each.token_ids[position + 1 : position + 1 + DRAFTS])
            drafts = torch.tensor(made[request.request_id, position])[: len(follows)]
            right[: len(follows)] += (drafts == follows).cumprod(0)
            possible[: len(follows)] += 1
    return right, possible


@pytest.mark.drawn
@pytest.mark.parametrize("noise", [0.0, 0.8])
def test_drafts_are_accepted_as_often_as_those_of_the_trained_assistant(
    model: Gemma4ForCausalLM, conversations: list[Rendered], noise: float, tmp_path: Path
) -> None:
    """And of an assistant that is damaged in the same way here and there, as seldom."""
    assistant = damage_checkpoint(ASSISTANT, tmp_path / "assistant", noise=noise) if noise else ASSISTANT
    target = read_decoder(TARGET, device=torch.device("cpu"), dtype=torch.float32, compiled=False)
    expected, of = acceptance(read_assistant(assistant, target), conversations, ahead=1)
    right, possible = judged(model, assistant, conversations)
    print("accepted", right.tolist(), "of", possible.tolist())
    assert possible.tolist() == of.tolist()
    assert right.tolist() == expected.tolist()
    assert (right > 0.9 * possible).all() == (noise == 0.0)


@pytest.mark.drawn
@pytest.mark.parametrize("kind", LayerKind)
def test_over_wrong_pages_few_drafts_are_right(
    model: Gemma4ForCausalLM, conversations: list[Rendered], kind: LayerKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table of the slot beside, of one kind: the answers stay the target's, and acceptance tells."""
    begin = PlainCacheReader._row

    def of_another(self: PlainCacheReader, layer: int, of: LayerKind, q: Tensor, slot: int, last: int) -> Tensor:
        return begin(self, layer, of, q, (slot + 1) % SLOTS if of is kind else slot, last)

    monkeypatch.setattr(PlainCacheReader, "_row", of_another)
    monkeypatch.setattr(PlainCacheReader, "_audit", lambda *_: None)
    right, possible = judged(model, ASSISTANT, conversations)
    print("accepted", right.tolist(), "of", possible.tolist())
    assert right.sum() < 0.6 * possible.sum()
