"""The DFlash drafter as it is trained is the one that is served, and training teaches it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from batches import Stream, batches
from configs import TEMPLATE_OF
from decoder import IGNORED, Decoder, Rows
from dflash import Context, DFlashModel, dflash_geometry, initial_dflash, labels_of, loss_of
from dflash_drafters import DenseDraftAttention
from train import read_decoder
from train_dflash import read_dflash, some_anchors, write_dflash

from modelserve_worker.layers.placement import Placement
from modelserve_worker.weights.checkpoint_config import read_architecture
from modelserve_worker.weights.loader import load_dflash, load_model

TARGET = Path(__file__).parent / "gemma4-tiny-keqv"
LENGTH, DRAFTS = 256, 7


@pytest.fixture(scope="module")
def target() -> Decoder:
    return read_decoder(TARGET, device=torch.device("cpu"), dtype=torch.float32, compiled=False)


@pytest.fixture(scope="module")
def context(target: Decoder) -> Context:
    stream = Stream(length=LENGTH, rows=1, answers=128, lessons=0.0)
    rows = next(batches(stream, variant=TEMPLATE_OF[TARGET.name], seed="dflash test", workers=0))
    return Context.of(target, rows, dflash_geometry().taps)


def test_a_trained_drafter_is_the_one_that_is_served(target: Decoder, context: Context, tmp_path: Path) -> None:
    """Of anchors within a window of their document's begin, and behind it."""
    weights = initial_dflash(target, seed=1)
    write_dflash({name: value + 0.05 * torch.randn_like(value) for name, value in weights.items()}, tmp_path)
    table = target.weights["embed_tokens.weight"]
    trained, placement = read_dflash(tmp_path, table), Placement(torch.device("cpu"), torch.float32)
    model = load_model(read_architecture(TARGET), TARGET, placement)
    served = load_dflash(tmp_path, model)
    one = Rows(**vars(context.rows) | {"documents": torch.zeros_like(context.rows.documents),
                                       "positions": torch.arange(LENGTH)[None]})  # fmt: skip
    anchors = torch.tensor([[5, 64, 200]])
    expected = trained.logits(Context(context.tapped, one), anchors)[0]
    rows = served.context_rows(served.context(context.tapped[0]), torch.arange(LENGTH))
    dense = [tuple(each.expand(3, *each.shape) for each in pair) for pair in rows]
    attention = DenseDraftAttention(served.architecture, dense, anchors[0])
    tokens = one.input_ids[0, anchors[0]].int()
    logits = served.rows(tokens, anchors[0].int(), attention)[:, 1:] @ table.T
    assert float((logits - expected).abs().max()) <= 1e-3 * float(expected.abs().max())
    assert torch.equal(served(tokens, anchors[0].int(), attention).tokens.long(), expected.argmax(-1))


def test_labels_are_the_tokens_behind_an_anchor_up_to_the_end_of_its_answer() -> None:
    ids = torch.arange(100, 112)[None]
    places = torch.tensor([[2, 3, 4, 7, 8, 0]])  # predict 3, 4, 5 and 8, 9
    labels = torch.where(torch.arange(6) < 5, ids.gather(1, places + 1), IGNORED)
    rows = Rows(ids, ids - 100, torch.zeros_like(ids), places, labels)
    found = labels_of(rows, torch.tensor([[3, 4, 8, 9]]), 3)
    assert found.tolist() == [[[104, 105, -100], [105, -100, -100], [109, -100, -100], [-100] * 3]]


def test_training_teaches(target: Decoder, context: Context) -> None:
    weights = initial_dflash(target, seed=1)
    model = DFlashModel(weights, target.weights["embed_tokens.weight"])
    optimizer = torch.optim.AdamW(weights.values(), lr=5e-3)
    rng, losses = random.Random(1), []
    for _ in range(8):
        anchors = some_anchors(context.rows, rng, 4)
        loss = loss_of(model.logits(context, anchors), labels_of(context.rows, anchors, DRAFTS))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-3:]) < 0.85 * sum(losses[:3]), losses
