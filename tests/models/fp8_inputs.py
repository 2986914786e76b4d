"""Which inputs should an FP8 product have: those of the layer before, or the same rounded, and by which scale?

    PYTHONPATH=operator:worker:tests/worker/model:tests/worker/kernels python tests/models/fp8_inputs.py [--n 12]
        [--planted 13]

Two trained checkpoints are quantised to `fp8_channel` and teacher forced on exercises in float32. Prints, over the
tokens of the answers, the mean difference of logits and the mean KL divergence in nats from the checkpoint itself, and
the exercises that greedy decoding would get right. With --planted E three channels of every norm before a product are
2^E times as large, and the columns that read them as much smaller: the same model, whose rows have outliers.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from plain_products import rounded_inputs, unpaired
from quantise import quantise
from safetensors.torch import load_file, save_file
from teacher_forcing import EngineLogits, checkpoint_renderer, divergence, is_exact, render_cell
from torch import Tensor

from modelserve_tools.evaluation.cells import Cell
from modelserve_worker.kernels.products.fp8_linear import e4m3_precision
from modelserve_worker.layers.stored.fp8 import Fp8Matrix

MODELS = ("gemma4-tiny-keqv", "gemma4-tiny-ple")
SKILLS = (("facts", None), ("tool_call", None), ("copying", None), ("lookback", None))


def by_largest(x: Tensor) -> Tensor:
    """To e4m3, the largest element of a row to its largest number, 448."""
    scales = (x.abs().amax(1, keepdim=True) / 448).clamp(min=1e-30)
    return (x / scales).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * scales


def by_power(x: Tensor) -> Tensor:
    """As products of many rows have them."""
    rounded, scales = rounded_inputs(x)
    return (unpaired(rounded.float())[:, : x.shape[1]] * scales).to(x.dtype)


ROUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "as they are": lambda x: x,
    "bfloat16": lambda x: x.bfloat16().to(x.dtype),
    "e4m3 by the largest": by_largest,
    "e4m3 by a power of 2": by_power,
    "four bits": e4m3_precision,
}


PLANTED_CHANNELS = [5, 41, 77]
READERS = {
    "input_layernorm.weight": ("q_proj.weight", "k_proj.weight", "v_proj.weight"),
    "pre_feedforward_layernorm.weight": ("gate_proj.weight", "up_proj.weight"),
}


def plant(model: Path, output: Path, exponent: int) -> None:
    """Write the checkpoint with channels of norms 2^exponent times as large, and what reads them as much smaller."""
    readers = tuple(reader for each in READERS.values() for reader in each)
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, output)
            continue
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if name.endswith(tuple(READERS)):
                tensor[PLANTED_CHANNELS] *= 2.0**exponent
            elif name.endswith(readers):
                tensor[:, PLANTED_CHANNELS] *= 2.0**-exponent
        save_file(tensors, output / file.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=12, help="exercises of each skill")
    parser.add_argument("--planted", type=int, default=0, metavar="E", help="outliers of 2^E in three channels")
    arguments = parser.parse_args()
    n = arguments.n
    for name in MODELS:
        directory = Path(__file__).parent / name
        renderer = checkpoint_renderer(directory)
        asked = [each for skill, far in SKILLS for each in render_cell(renderer, Cell(skill, far, n), seed=7)]
        with tempfile.TemporaryDirectory() as planted, tempfile.TemporaryDirectory() as made:
            plant(directory, Path(planted), arguments.planted)
            quantise(Path(planted), Path(made), "fp8_channel")
            engines = {
                path: EngineLogits(path, dtype=torch.float32, device=torch.device("cpu"))
                for path in (directory, Path(made))
            }
        reference = engines[directory](asked)
        for what, rounded in ROUNDED.items():
            with mock.patch.object(Fp8Matrix, "_rounded", lambda _, x, rounded=rounded: rounded(x)):
                said = engines[Path(made)](asked)
            far = torch.cat([divergence(*pair) for pair in zip(reference, said, strict=True)])
            apart = torch.cat([(one - other).abs().mean(-1) for one, other in zip(reference, said, strict=True)])
            right = sum(is_exact(*pair) for pair in zip(asked, said, strict=True))
            print(f"{name:18} inputs {what:20} |dlogit| {apart.mean():.4f}, KL {far.mean():.2e} nats over {len(far)} "
                  f"tokens, the largest {far.max():.2e}; right {right} of {len(asked)}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
