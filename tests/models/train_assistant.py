"""Train the MTP assistant of a trained target: `python tests/models/train_assistant.py --target DIR --output DIR`."""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from assistant import DRAFTS, Assistant, Target, accepted, following, initial_assistant
from batches import Stream, batches
from configs import GENERATION_CONFIG, TEMPLATE_OF, assistant_config_json
from decoder import Decoder, loss_of
from safetensors.torch import load_file
from torch import Tensor
from train import read_decoder

from modelserve_tools.tiny.weights import save_weights

TARGET = "gemma4-tiny-keqv"
STREAM = Stream(length=1024, rows=32, answers=512, lessons=0.1, single=0.1)


def write_assistant(weights: Mapping[str, Tensor], directory: Path) -> int:
    """The gemma4_assistant layout in bfloat16. Returns the weights' bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(assistant_config_json(), indent=2) + "\n")
    (directory / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG, indent=2) + "\n")
    outside = ("pre_projection.", "post_projection.")
    tensors = {
        name if name.startswith(outside) else f"model.{name}": w.detach().to("cpu", torch.bfloat16).contiguous()
        for name, w in weights.items()
    }
    return save_weights(tensors, directory)


def read_assistant(directory: Path, target: Decoder, *, compiled: bool = False) -> Assistant:
    device = target.weights["norm.weight"].device
    tensors = load_file(directory / "model.safetensors")
    weights = {name.removeprefix("model."): tensor.float().to(device) for name, tensor in tensors.items()}
    return Assistant(weights, target, compiled=compiled)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--rate", type=float, default=2e-3)
    options = parser.parse_args()
    began = time.monotonic()
    device = torch.device("cuda")
    torch._dynamo.config.recompile_limit = 64
    target = read_decoder(options.target, device=device, dtype=torch.bfloat16, compiled=True)
    weights = initial_assistant(target, seed=options.seed)
    assistant = Assistant(weights, target, compiled=True)
    optimizer = torch.optim.AdamW(weights.values(), lr=options.rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    variant = TEMPLATE_OF[TARGET]
    stream = batches(STREAM, variant=variant, seed=f"{options.seed} assistant", workers=options.workers)
    rng = random.Random(f"training {options.seed} assistant")
    recent: list[Tensor] = []
    for step in range(options.steps):
        rate = options.rate * min(1.0, (step + 1) / 50, 2 * (1 - step / options.steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        rows = next(stream).to(device)
        tokens, labels = following(rows, DRAFTS)
        logits = assistant.drafts(rows, Target.of(target, rows), tokens, ahead=rng.randrange(2))
        loss = loss_of(logits.flatten(1, 2), labels.flatten(1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(weights.values()), 1.0)
        optimizer.step()
        recent.append(loss.detach())
        if (step + 1) % 100 == 0:
            print(
                f"{time.monotonic() - began:6.1f} s step {step + 1:5} loss {torch.stack(recent).mean():.4f}", flush=True
            )
            recent = []
    size = write_assistant(weights, options.output)
    held_out = batches(STREAM, variant=variant, seed=f"{options.seed} held out", workers=2)
    for ahead in (0, 1):
        judged = [accepted(assistant, next(held_out).to(device), count=DRAFTS, ahead=ahead) for _ in range(8)]
        right, possible = (sum(part).tolist() for part in zip(*judged, strict=True))
        rates = " ".join(f"{100 * r / p:.1f}" for r, p in zip(right, possible, strict=True))
        print(f"position p + {ahead}: accepted at step 1..{DRAFTS}: {rates} %", flush=True)
    print(f"{size} bytes, {time.monotonic() - began:.0f} s on {torch.cuda.get_device_name()}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
