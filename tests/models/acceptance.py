"""How many drafts of a trained assistant its target would say, for each skill of modelserve-eval.

    python tests/models/acceptance.py --target DIR --assistant DIR --skills all --distances 1000 --n 50 [--device cuda]

Drafting starts at every token of the answers. The draft at step k counts when it and all before it are right, out of
those that still lie in the answer. Computes in float32 and prints Markdown.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from assistant import DRAFTS, Assistant, accepted
from batches import pack_final_answers
from rendering import Rendered
from teacher_forcing import checkpoint_renderer, exercise_flags, render_cell
from torch import Tensor
from train import read_decoder
from train_assistant import read_assistant

from modelserve_tools.evaluation import flags as eval_flags


def acceptance(assistant: Assistant, conversations: Iterable[Rendered], *, ahead: int) -> tuple[Tensor, Tensor]:
    """(accepted, possible), int64 [DRAFTS] each, over the final answers; `ahead` as in Assistant.drafts."""
    device, window = assistant.target.weights["norm.weight"].device, assistant.target.architecture.sliding_window
    right, possible = torch.zeros(DRAFTS, dtype=torch.int64), torch.zeros(DRAFTS, dtype=torch.int64)
    for each in conversations:
        rows = pack_final_answers([each], window=window).to(device)
        of_one, possible_of_one = accepted(assistant, rows, count=DRAFTS, ahead=ahead)
        right, possible = right + of_one.cpu(), possible + possible_of_one.cpu()
    return right, possible


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--assistant", type=Path, required=True)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    options, rest = parser.parse_known_args(argv)
    flags = exercise_flags(rest)
    target = read_decoder(options.target, device=options.device, dtype=torch.float32, compiled=False)
    assistant = read_assistant(options.assistant, target)
    renderer = checkpoint_renderer(options.target)
    steps = " | ".join(f"draft {step}" for step in range(1, DRAFTS + 1))
    print(f"| skill, distance | n | {steps} |\n|---|---|{'---|' * DRAFTS}")
    for cell in eval_flags.cells(flags):
        right, possible = acceptance(assistant, render_cell(renderer, cell, seed=flags.seed), ahead=1)
        shares = (f"{r} of {p}" if p else "-" for r, p in zip(right.tolist(), possible.tolist(), strict=True))
        at = "" if cell.distance is None else f", {cell.distance}"
        print(f"| {cell.skill}{at} | {cell.n} | {' | '.join(shares)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
