"""Small further steps on a CPU for what a trained checkpoint is weak in, a core and some minutes:

    python tests/models/refine.py gemma4-tiny-ple --initial DIR --output DIR --skill thinking --steps 450

`--skill` is a short skill, or "recall". The other skills are asked as well, so that they are not forgotten.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from configs import MODELS, TEMPLATE_OF
from schedule import refinement
from train import read_decoder, write_checkpoint
from training import Trainer

from modelserve_worker.evaluation.short_skills import SHORT_SKILLS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--initial", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--skill", choices=["recall", *SHORT_SKILLS], required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    decoder = read_decoder(options.initial, device=torch.device("cpu"), dtype=torch.bfloat16, compiled=True)
    for weight in decoder.weights.values():
        weight.requires_grad_()
    schedule = refinement(options.skill, steps=options.steps)
    trainer = Trainer(decoder, schedule, variant=TEMPLATE_OF[options.model], seed=options.seed, workers=0)
    trainer.run()
    size = write_checkpoint(options.model, decoder.weights, options.output)
    print(f"{options.model}: {size} bytes after {trainer.seconds():.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
