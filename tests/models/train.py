"""Train one of the small checkpoints: `python tests/models/train.py gemma4-tiny-keqv --output DIR`.

One GPU, bfloat16, under 15 minutes on an H200. The same seed and the same number of workers see the same batches.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from configs import GENERATION_CONFIG, MODELS, TEMPLATE_OF, config_json
from decoder import Decoder
from initial_weights import initial_weights
from rendering import Renderer
from safetensors.torch import load_file
from schedule import SCHEDULES, Phase
from torch import Tensor
from training import Trainer, accuracy
from word_tokenizer import build_word_tokenizer, write_word_tokenizer

from modelserve.model.architecture import ModelArchitecture
from modelserve_tools.evaluation.short_skills import SHORT_SKILLS
from modelserve_tools.tiny.__main__ import chat_template
from modelserve_tools.tiny.weights import PREFIX, save_weights

REPORTED: list[tuple[str, int | None]] = [
    *((skill, None) for skill in SHORT_SKILLS),
    *((skill, distance) for skill in ("recall", "needle") for distance in (10, 100, 1000, 4000, 16_000)),
]


LOUDER_KEYS = 16


def with_louder_keys(weights: Mapping[str, Tensor], architecture: ModelArchitecture) -> dict[str, Tensor]:
    """The same function with a factor moved from q_norm to k_norm where keys are derived from values.

    Exact, since the factor is a power of two. Training leaves k_norm below one, so keys derived without it would only
    make attention sharper, which changes no answer; with weights above one that fault flattens attention.
    """
    moved = dict(weights)
    for layer in range(architecture.num_hidden_layers):
        if architecture.k_from_v(layer):
            name = f"layers.{layer}.self_attn"
            moved[f"{name}.q_norm.weight"] = weights[f"{name}.q_norm.weight"] / LOUDER_KEYS
            moved[f"{name}.k_norm.weight"] = weights[f"{name}.k_norm.weight"] * LOUDER_KEYS
    return moved


def write_checkpoint(model: str, weights: Mapping[str, Tensor], directory: Path) -> int:
    """config.json, bfloat16 weights, tokenizer, template, generation defaults. Returns the weights' bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config_json(model), indent=2) + "\n")
    (directory / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG, indent=2) + "\n")
    write_word_tokenizer(directory, chat_template=chat_template(TEMPLATE_OF[model]))
    tensors = {PREFIX + name: w.detach().to("cpu", torch.bfloat16).contiguous() for name, w in weights.items()}
    return save_weights(tensors, directory)


def read_decoder(directory: Path, *, device: torch.device, dtype: torch.dtype, compiled: bool) -> Decoder:
    """A written checkpoint, its weights in float32."""
    architecture = ModelArchitecture.from_config(json.loads((directory / "config.json").read_text()))
    tensors = load_file(directory / "model.safetensors")
    weights = {name.removeprefix(PREFIX): tensor.float().to(device) for name, tensor in tensors.items()}
    return Decoder(architecture, weights, dtype=dtype, compiled=compiled)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=14, help="processes that make batches; part of what is repeated")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the number of steps")
    options = parser.parse_args()
    device = torch.device("cuda")
    torch._dynamo.config.recompile_limit = 64  # head dims, KV heads and row lengths each have kernels of their own
    architecture = ModelArchitecture.from_config(config_json(options.model))
    weights = initial_weights(architecture, seed=options.seed, device=device)
    decoder = Decoder(architecture, weights, dtype=torch.bfloat16, compiled=True)
    variant = TEMPLATE_OF[options.model]
    renderer = Renderer(build_word_tokenizer(), variant=variant)
    schedule = SCHEDULES[options.model].scaled(options.scale)
    trainer = Trainer(decoder, schedule, variant=variant, seed=options.seed, workers=options.workers)
    print(
        f"{options.model}: {sum(w.numel() for w in weights.values())} parameters, {schedule.steps()} steps", flush=True
    )

    def after_phase(phase: Phase) -> None:
        size = write_checkpoint(options.model, with_louder_keys(weights, architecture), options.output)
        longest = max(stream.length for stream, _ in phase.streams)
        cells = [(skill, distance) for skill, distance in REPORTED if (distance or 0) < longest]
        shares = accuracy(decoder, renderer, cells=cells, count=100 if phase.decay else 20, seed=1)
        reached = " ".join(
            f"{skill}{'' if d is None else f'@{d}'} {100 * share:.0f}" for (skill, d), share in shares.items()
        )
        print(f"{trainer.seconds():6.1f} s after {phase.name}: {size} bytes; {reached}", flush=True)

    trainer.run(after_phase=after_phase)
    print(f"{options.model}: {trainer.seconds():.0f} s on {torch.cuda.get_device_name()}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
