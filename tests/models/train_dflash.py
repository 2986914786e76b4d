"""Train the DFlash drafter of a trained target: `python tests/models/train_dflash.py --target DIR --output DIR`.

On a GPU in two minutes or three: what the target computes of some thousand rows is computed once.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from batches import Stream, batches
from configs import GENERATION_CONFIG, TEMPLATE_OF, dflash_config_json
from decoder import Rows
from dflash import Context, DFlashModel, accepted, dflash_geometry, initial_dflash, labels_of, loss_of
from safetensors.torch import load_file
from torch import Tensor
from train import read_decoder

from modelserve_tools.tiny.weights import save_weights

TARGET = "gemma4-tiny-keqv"
ANSWERS = 256  # trained tokens of a row


def write_dflash(weights: Mapping[str, Tensor], directory: Path) -> int:
    """z-lab's layout in bfloat16. Returns the weights' bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dflash_config_json(), indent=2) + "\n")
    (directory / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG, indent=2) + "\n")
    return save_weights(
        {name: w.detach().to("cpu", torch.bfloat16).contiguous() for name, w in weights.items()}, directory
    )


def read_dflash(directory: Path, table: Tensor) -> DFlashModel:
    tensors = load_file(directory / "model.safetensors")
    return DFlashModel({name: tensor.float() for name, tensor in tensors.items()}, table.float())


def some_anchors(rows: Rows, rng: random.Random, count: int) -> Tensor:
    """int64 [B, count]: places of answers' tokens behind which an answer goes on."""
    chosen, device = [], rows.input_ids.device
    for predict, labels in zip(rows.predict.tolist(), rows.labels.tolist(), strict=True):
        answer = {place + 1 for place, label in zip(predict, labels, strict=True) if label >= 0}
        places = [place for place in sorted(answer) if place + 1 in answer] or [0]
        chosen.append(sorted(rng.choices(places, k=count)))
    return torch.tensor(chosen, device=device)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--batches", type=int, default=400, help="of rows that the target computes")
    parser.add_argument("--rows", type=int, default=16, help="of a batch")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row, a multiple of 128")
    parser.add_argument("--anchors", type=int, default=32, help="of a row, at a time")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--rate", type=float, default=2e-3)
    options = parser.parse_args()
    began = time.monotonic()
    torch.manual_seed(options.seed)
    target = read_decoder(options.target, device=options.device, dtype=torch.float32, compiled=False)
    taps, block = dflash_geometry().taps, dflash_geometry().block_rows
    stream = batches(
        Stream(length=options.length, rows=options.rows, answers=ANSWERS, lessons=0.1, single=0.1),
        variant=TEMPLATE_OF[TARGET], seed=f"{options.seed} dflash", workers=options.workers,
    )  # fmt: skip
    known = [Context.of(target, next(stream).to(options.device), taps) for _ in range(options.batches)]
    held_out, known = known[:2], known[2:]
    print(f"{time.monotonic() - began:6.1f} s: {len(known)} batches of {options.rows} rows", flush=True)
    weights = initial_dflash(target, seed=options.seed)
    model = DFlashModel(weights, target.weights["embed_tokens.weight"])
    optimizer = torch.optim.AdamW(weights.values(), lr=options.rate, betas=(0.9, 0.95), weight_decay=0.0)
    rng = random.Random(f"training {options.seed} dflash")
    recent: list[Tensor] = []
    for step in range(options.steps):
        rate = options.rate * min(1.0, (step + 1) / 50, 2 * (1 - step / options.steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        context = rng.choice(known)
        anchors = some_anchors(context.rows, rng, options.anchors)
        loss = loss_of(model.logits(context, anchors), labels_of(context.rows, anchors, block - 1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(weights.values()), 1.0)
        optimizer.step()
        recent.append(loss.detach())
        if (step + 1) % 100 == 0 or step + 1 == options.steps:
            judged = [accepted(model, each, some_anchors(each.rows, rng, options.anchors)) for each in held_out]
            right, possible = (sum(part).tolist() for part in zip(*judged, strict=True))
            rates = " ".join(f"{100 * r / max(1, p):.0f}" for r, p in zip(right, possible, strict=True))
            print(
                f"{time.monotonic() - began:6.1f} s step {step + 1:5} loss {torch.stack(recent).mean():.4f}, accepted "
                f"at place 1..{block - 1}: {rates} %", flush=True,
            )  # fmt: skip
            recent = []
            write_dflash(weights, options.output)
    print(f"{write_dflash(weights, options.output)} bytes, {time.monotonic() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
