"""The MTP assistant: which tokens it is asked for, that it can learn them, and the layout of its checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from assistant import Assistant, Target, accepted, following, initial_assistant
from configs import config_json
from decoder import Decoder, Rows, loss_of
from initial_weights import initial_weights
from safetensors.torch import load_file
from train_assistant import read_assistant, write_assistant

from modelserve.model.architecture import ModelArchitecture

CPU = torch.device("cpu")
LENGTH = 128


def conversation() -> Rows:
    """One row: the answer is the tokens at 10 to 14, and a second answer those at 20 and 21; one place of padding."""
    ids = torch.randint(110, 200, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    places = torch.tensor([[9, 10, 11, 12, 13, 19, 20, 0]])
    labels = ids.gather(1, places + 1)
    labels[0, -1] = -100
    documents = torch.zeros_like(ids)
    return Rows(ids, torch.arange(LENGTH)[None], documents, places, labels)


def test_drafts_follow_the_first_token_and_end_with_the_answer() -> None:
    rows = conversation()
    tokens, labels = following(rows, 3)
    ids = rows.input_ids[0]
    assert tokens[0, 0].tolist() == ids[10:13].tolist()
    assert labels[0, 0].tolist() == ids[11:14].tolist()
    assert labels[0, 3].tolist() == [ids[14].item(), -100, -100]  # from place 12: 14 is the answer's last token
    assert labels[0, 4].tolist() == [-100] * 3
    assert labels[0, 5].tolist() == [ids[21].item(), -100, -100]  # the first answer does not run into the second
    assert labels[0, 7].tolist() == [-100] * 3


def test_an_assistant_learns_to_draft_and_its_checkpoint_holds_it(tmp_path: Path) -> None:
    architecture = ModelArchitecture.from_config(config_json("gemma4-tiny-keqv"))
    target = Decoder(architecture, initial_weights(architecture, seed=0, device=CPU), dtype=torch.float32)
    weights = initial_assistant(target, seed=0)
    assistant, rows = Assistant(weights, target), conversation()
    of = Target.of(target, rows)
    tokens, labels = following(rows, 2)
    optimizer = torch.optim.AdamW(weights.values(), lr=3e-3)
    for _ in range(40):
        loss = loss_of(assistant.drafts(rows, of, tokens, ahead=0).flatten(1, 2), labels.flatten(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    possible = (labels >= 0).sum((0, 1)).tolist()
    right, counted = accepted(assistant, rows, count=2, ahead=0)
    assert counted.tolist() == possible == [5, 3]
    assert right.tolist() == possible

    assert write_assistant(weights, tmp_path) <= 8_000_000
    names = set(load_file(tmp_path / "model.safetensors"))
    assert {
        "pre_projection.weight",
        "post_projection.weight",
        "model.embed_tokens.weight",
        "model.norm.weight",
    } <= names
    assert not any("k_proj" in name or "v_proj" in name for name in names)
    again, _ = accepted(read_assistant(tmp_path, target), rows, count=2, ahead=0)
    assert again.tolist() == possible  # rounded to bfloat16
