"""Which inputs should an FP8 product have: those of the layer before, or the same rounded to e4m3 by row?

    PYTHONPATH=operator:worker:tests/worker/model:tests/worker/kernels python tests/models/fp8_inputs.py [--n 12]

Two trained checkpoints are quantised to `fp8_channel` and teacher forced on exercises in float32. Prints, over the
tokens of the answers, the mean KL divergence in nats from the checkpoint itself, and the exercises that greedy decoding
would get right.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import torch
from plain_products import rounded_inputs, unpaired
from quantise import quantise
from teacher_forcing import EngineLogits, checkpoint_renderer, divergence, is_exact, render_cell
from torch import Tensor

from modelserve_tools.evaluation.cells import Cell
from modelserve_worker.layers.stored_matrix import Fp8Matrix

MODELS = ("gemma4-tiny-keqv", "gemma4-tiny-ple")
SKILLS = (("facts", None), ("tool_call", None), ("copying", None), ("lookback", None))


def with_rounded_inputs() -> mock._patch[object]:
    """Products as `torch._scaled_mm` has them, but for the order of sums."""
    plain = Fp8Matrix.linear

    def linear(self: Fp8Matrix, x: Tensor) -> Tensor:
        rounded, scales = rounded_inputs(x)
        return plain(self, (unpaired(rounded.float())[:, : x.shape[1]] * scales).to(x.dtype))

    return mock.patch.object(Fp8Matrix, "linear", linear)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=12, help="exercises of each skill")
    n = parser.parse_args().n
    for name in MODELS:
        directory = Path(__file__).parent / name
        renderer = checkpoint_renderer(directory)
        asked = [each for skill, far in SKILLS for each in render_cell(renderer, Cell(skill, far, n), seed=7)]
        with tempfile.TemporaryDirectory() as made:
            quantise(directory, Path(made), "fp8_channel")
            engines = {
                path: EngineLogits(path, dtype=torch.float32, device=torch.device("cpu"))
                for path in (directory, Path(made))
            }
        reference = engines[directory](asked)
        for what, patch in (("as they are", nullcontext()), ("rounded to e4m3", with_rounded_inputs())):
            with patch:
                said = engines[Path(made)](asked)
            far = torch.cat([divergence(*pair) for pair in zip(reference, said, strict=True)])
            right = sum(is_exact(*pair) for pair in zip(asked, said, strict=True))
            print(f"{name:18} inputs {what:16} KL {far.mean():.2e} nats over {len(far)} tokens, the largest "
                  f"{far.max():.2e}; right {right} of {len(asked)}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
