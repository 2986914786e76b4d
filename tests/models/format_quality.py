"""What is left of two trained checkpoints in each format, beside themselves:

    PYTHONPATH=operator:worker:tests/worker/model python tests/models/format_quality.py [--n 3] [--json FILE]

Each is quantised as `quantise.py` does (round to nearest, no data) and teacher forced in float32 on exercises that no
training saw. Over the tokens of answers, and over those of prompts, which training never asked for: the mean KL
divergence in nats from the checkpoint itself, and how often both have the same likeliest token; over exercises: how
many greedy decoding solves. With --json this is the file that `modelserve plan --compare-formats` reads
(operator/modelserve/data/format_quality.json).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from paged_logits import Forced, Traffic, geometry_of, replay
from quantise import quantise
from rendering import Rendered
from teacher_forcing import EngineLogits, checkpoint_renderer, divergence, is_exact, render_cell
from torch import Tensor

from modelserve.model.weight_format import TextLinear
from modelserve_tools.evaluation.cells import Cell

MODELS = ("gemma4-tiny-keqv", "gemma4-tiny-ple")
SEED = 7  # training's is 0
CELLS = (
    *((skill, None) for skill in ("chat", "arithmetic", "sorting", "copying", "lookback", "facts", "json", "tool_call",
                                  "tool_response", "thinking")),
    ("recall", 100),
    ("needle", 100),
)  # fmt: skip
MLP = {TextLinear.GATE_UP, TextLinear.DOWN, TextLinear.EXPERT_GATE_UP, TextLinear.EXPERT_DOWN}
BESIDE_MLP = tuple(each for each in TextLinear if each not in MLP)
FORMATS: Sequence[tuple[str, tuple[TextLinear, ...]]] = (
    ("fp8_channel", ()), ("int8_channel", ()), ("int4_g32", ()), ("gptq_g32", ()), ("awq_g32", ()),
    ("int4_g128_asym", ()), ("nvfp4", ()), ("nvfp4", BESIDE_MLP),
)  # fmt: skip
ABOUT = (
    "Two trained checkpoints of 6.5 and 7.7 million parameters, rounded to nearest without data, beside themselves in "
    "float32: what tests/models/format_quality.py printed. By the format's name; _mlp: of the MLP alone."
)


def said(directory: Path, asked: Sequence[Rendered]) -> list[Tensor]:
    """float32 [tokens - 1, vocab] of each conversation, which is one prompt with its answer: row i predicts token
    i + 1."""
    engine = EngineLogits(directory, dtype=torch.float32, device=torch.device("cpu"))
    requests = tuple(Forced(each.token_ids, len(each.token_ids) - 1) for each in asked)
    return replay(
        engine.model, Traffic(requests, chunk=2048, max_num_seqs=16), geometry=geometry_of(engine.model), audited=False
    ).logits


def quality(asked: Sequence[Rendered], reference: Sequence[Tensor], made: Sequence[Tensor]) -> dict[str, Any]:
    """The figures of one checkpoint, by the names that the file has."""
    answers, prompts = [], []
    for each, one, other in zip(asked, reference, made, strict=True):
        compared = torch.stack([divergence(one, other), (one.argmax(-1) == other.argmax(-1)).double()])
        answers.append(compared[:, each.prompt_tokens - 1 :])
        prompts.append(compared[:, : each.prompt_tokens - 1])
    right = sum(is_exact(each, logits[each.prompt_tokens - 1 :]) for each, logits in zip(asked, made, strict=True))
    return {"answers": _means(answers), "prompts": _means(prompts), "right": right, "exercises": len(asked)}


def _means(compared: Sequence[Tensor]) -> dict[str, Any]:
    """Of [2, tokens] each: divergence, and whether the likeliest token is the same."""
    nats, same = torch.cat(list(compared), dim=1)
    return {
        "tokens": len(nats),
        "meanKlNats": float(f"{nats.mean():.2e}"),
        "top1Percent": round(100 * float(same.mean()), 2),
    }


def measured(directory: Path, asked: Sequence[Rendered]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each format's name with its figures, bfloat16's first."""
    reference = said(directory, asked)
    yield "bfloat16", quality(asked, reference, reference)
    for format_name, leave in FORMATS:
        with tempfile.TemporaryDirectory() as made:
            stored = quantise(directory, Path(made), format_name, leave=leave)
            logits = said(Path(made), asked)
        yield f"{stored.name}{'_mlp' if leave else ''}", quality(asked, reference, logits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=3, help="exercises of each skill")
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    formats: dict[str, dict[str, Any]] = {}
    for model in MODELS:
        directory = Path(__file__).parent / model
        renderer = checkpoint_renderer(directory)
        cells = [Cell(skill, far, arguments.n) for skill, far in CELLS]
        asked = [each for cell in cells for each in render_cell(renderer, cell, seed=SEED)]
        for name, row in measured(directory, asked):
            formats.setdefault(name, {})[model] = row
            answers, prompts = row["answers"], row["prompts"]
            print(f"{model:17} {name:18} answers {answers['meanKlNats']:.2e} nats, {answers['top1Percent']:6.2f} % of "
                  f"{answers['tokens']}; prompts {prompts['meanKlNats']:.2e}, {prompts['top1Percent']:6.2f} % of "
                  f"{prompts['tokens']}; right {row['right']} of {row['exercises']}", flush=True)  # fmt: skip
    if arguments.json:
        arguments.json.write_text(json.dumps({"about": ABOUT, "formats": formats}, indent=1) + "\n")


if __name__ == "__main__":
    main()
