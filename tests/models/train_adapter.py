"""Train an adapter of a trained checkpoint: `python tests/models/train_adapter.py gemma4-tiny-keqv json`.

Minutes of two cores. Every batch is of new exercises, so what is right before a step is what nobody was trained on.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from batches import pack
from configs import MODELS, TEMPLATE_OF
from decoder import Decoder, Rows, loss_of
from low_rank import ATTENTION, FEED_FORWARD, initial_factors, with_factors, write_adapter
from rendering import Rendered, Renderer
from torch import Tensor
from train import read_decoder
from word_tokenizer import build_word_tokenizer

from modelserve_tools.evaluation.short_skills import SHORT_SKILLS
from modelserve_tools.evaluation.styles import SKILLS, STYLES, styled

FOLDER = Path(__file__).parent
# Unlike in rank and in what they adapt, as adapters that one worker serves are.
ADAPTED: dict[str, tuple[tuple[str, ...], int]] = {
    "friend": (ATTENTION, 2),
    "json": (FEED_FORWARD, 4),
    "proud": ((*ATTENTION, *FEED_FORWARD), 2),
}


def directory_of(model: str, style: str) -> Path:
    """Where the repository keeps an adapter."""
    return FOLDER / f"{model}-adapters" / style


def batches_of(renderer: Renderer, style: str, *, rows: int, length: int, seed: int) -> Iterator[Rows]:
    """Endless batches: rows of `length` tokens full of styled exercises, alike of each skill."""
    rng = random.Random(f"training {seed} {style}")
    while True:
        packed = []
        for _ in range(rows):
            documents: list[Rendered] = []
            while (room := length - sum(len(each.token_ids) for each in documents)) > 0:
                made = styled(SHORT_SKILLS[rng.choice(SKILLS)](rng), style)
                document = renderer.render(made)
                if len(document.token_ids) > room:
                    break
                documents.append(document)
            packed.append(documents)
        yield pack(packed, length=length, answers=length // 2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("style", choices=STYLES)
    parser.add_argument("--output", type=Path, help="the repository's folder of it, unless another is given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--rows", type=int, default=2, help="of a batch")
    parser.add_argument("--length", type=int, default=128, help="tokens of a row, a multiple of 128")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rate", type=float, default=5e-3)
    options = parser.parse_args()
    targets, rank = ADAPTED[options.style]
    alpha, output = 2.0 * rank, options.output or directory_of(options.model, options.style)
    began = time.monotonic()
    base = read_decoder(FOLDER / options.model, device=options.device, dtype=torch.float32, compiled=False)
    factors = initial_factors(base.weights, base.architecture, targets=targets, rank=rank, seed=options.seed)
    factors = {name: (a.to(options.device), b.to(options.device)) for name, (a, b) in factors.items()}
    trained = [factor.requires_grad_() for pair in factors.values() for factor in pair]
    decoder = Decoder(base.architecture, base.weights, dtype=torch.float32)
    renderer = Renderer(build_word_tokenizer(), variant=TEMPLATE_OF[options.model])
    stream = batches_of(renderer, options.style, rows=options.rows, length=options.length, seed=options.seed)
    optimizer = torch.optim.AdamW(trained, lr=options.rate, betas=(0.9, 0.95), weight_decay=0.0)
    recent: list[tuple[Tensor, Tensor]] = []
    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = options.rate * min(1.0, (step + 1) / 20, 1.5 * (1 - step / options.steps))
        decoder.weights = with_factors(base.weights, factors, scale=alpha / rank)
        rows = next(stream).to(options.device)
        logits = decoder.logits(rows)
        loss = loss_of(logits, rows.labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        asked = rows.labels >= 0
        recent.append((loss.detach(), (logits.argmax(-1) == rows.labels)[asked].float().mean()))
        if (step + 1) % 20 == 0 or step + 1 == options.steps:
            size = write_adapter(factors, output, base=options.model, rank=rank, alpha=alpha)
            loss_now, right = (torch.stack(each).mean().item() for each in zip(*recent, strict=True))
            print(
                f"{time.monotonic() - began:6.1f} s step {step + 1:4} loss {loss_now:.4f}, {100 * right:.1f} % of "
                f"tokens right, {size} bytes", flush=True,
            )  # fmt: skip
            recent = []
    return 0


if __name__ == "__main__":
    sys.exit(main())
