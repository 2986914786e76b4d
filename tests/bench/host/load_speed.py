"""Times the loading of a checkpoint whose files are in the page cache.

    python tests/bench load_speed [--gigabytes 2.5] [--tensor-parallel-size 1] [--device cpu]

Writes layers of the 31B model (bfloat16, no real weights) in several shards under --folder, which is in memory by
default, loads rank 0's share of them --repeats times, and removes them. Prints bytes, seconds and GB/s of each load
(those of one core do not change when other programs run), and the best GB/s last.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from modelserve.model.architecture import ModelArchitecture
from modelserve.published import published_model
from modelserve_worker.layers.parallel import TensorParallel
from modelserve_worker.layers.placement import Placement
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM
from modelserve_worker.models.gemma4_checkpoint import TEXT_PREFIXES, weight_sources
from modelserve_worker.weights.loader import load_model

SHARDS = 4
VOCABULARY = 32_768
PATTERN_BYTES = 1 << 26


def shortened(layers: int) -> ModelArchitecture:
    """The 31B model with fewer layers, the last one global, and a small vocabulary."""
    facts = published_model("hf://google/gemma-4-31B-it")
    assert facts is not None
    changes = {"full_attention_layers": (layers - 1,), "num_hidden_layers": layers, "vocab_size": VOCABULARY}
    return ModelArchitecture.model_validate(facts.architecture.model_dump() | changes)


def tensor_shapes(architecture: ModelArchitecture) -> dict[str, tuple[int, ...]]:
    model = Gemma4ForCausalLM(architecture, Placement(torch.device("meta"), torch.bfloat16))
    return {source.name: source.shape for source in weight_sources(model)}


def write(folder: Path, shapes: dict[str, tuple[int, ...]]) -> int:
    """Tensors dealt out to SHARDS files in the model's order; returns their bytes."""
    pattern = torch.randint(0, 255, (PATTERN_BYTES,), dtype=torch.uint8)
    total, names = 0, list(shapes)
    for shard in range(SHARDS):
        tensors = {}
        for name in names[shard * len(names) // SHARDS : (shard + 1) * len(names) // SHARDS]:
            size = 2 * math.prod(shapes[name])
            values = pattern.repeat(-(-size // PATTERN_BYTES))[:size].view(torch.bfloat16)
            tensors[TEXT_PREFIXES[0] + name] = values.view(shapes[name])
            total += size
        save_file(tensors, folder / f"model-{shard}.safetensors")
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.5)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    layers = 2
    while sum(2 * math.prod(s) for s in tensor_shapes(shortened(layers + 1)).values()) <= options.gigabytes * 1e9:
        layers += 1
    architecture = shortened(layers)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="load-speed-") as name:
        size = write(Path(name), tensor_shapes(architecture))
        print(f"{json.dumps({'layers': layers, 'shards': SHARDS, 'bytes': size})}")
        best = 0.0
        for _ in range(options.repeats):
            held = [0]
            began, worked = time.monotonic(), time.process_time()
            parallel = TensorParallel(rank=0, size=options.tensor_parallel_size)
            model = load_model(
                architecture, Path(name), Placement(torch.device(options.device), torch.bfloat16, parallel),
                progress=lambda done, _, held=held: held.__setitem__(0, done),
            )  # fmt: skip
            seconds, cores = time.monotonic() - began, time.process_time() - worked
            del model
            best = max(best, held[0] / seconds / 1e9)
            print(
                f"{held[0]} bytes in {seconds:.2f} s: {held[0] / seconds / 1e9:.2f} GB/s; "
                f"{cores:.2f} s of cores: {held[0] / cores / 1e9:.2f} GB/s per core"
            )
    print(f"{best:.2f}")
