"""On a GPU: what images of the unified 12B take, in the engine without HTTP, and what they take of its memory.

    python tests/bench images_on_gpu
    python tests/bench images_on_gpu --rows 280 1120 --repeat 50

Random weights of the published embedder in bfloat16. Prints milliseconds of an image's rows by how many there are, the
largest difference from float32 on the CPU beside the rows' own size, and the bytes that embedding takes beside those
that a plan counts (`image_rows_bytes`). Exit code 1 where rows differ by more than 3 % of their size, or a plan counts
less than there is.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch

from bench.deadline import add_deadline, within
from modelserve.published import published_model
from modelserve.sizing.media.embedder import image_rows_bytes
from modelserve_worker.embedded_spans import ImagePatches
from modelserve_worker.layers.placement import Placement
from modelserve_worker.models.image_embedder import ImageEmbedder

URI = "hf://google/gemma-4-12B-it"


def embedders() -> tuple[ImageEmbedder, ImageEmbedder]:
    """The same weights on the GPU in bfloat16, and on the CPU in float32."""
    facts = published_model(URI)
    assert facts is not None
    assert facts.images is not None
    hidden = facts.architecture.hidden_size
    on_gpu = ImageEmbedder(facts.images, hidden, Placement(torch.device("cuda"), torch.bfloat16))
    on_cpu = ImageEmbedder(facts.images, hidden, Placement(torch.device("cpu"), torch.float32))
    torch.manual_seed(1)
    for theirs, ours in zip(on_cpu.parameters(), on_gpu.parameters(), strict=True):
        scale = theirs.shape[-1] ** -0.5 if theirs.dim() > 1 else 0.2
        ours.copy_(torch.randn(theirs.shape) * scale + (theirs.dim() == 1))
        theirs.copy_(ours)
    return on_gpu, on_cpu


def patches_of(rows: int, values: int) -> ImagePatches:
    noise = np.random.default_rng(rows).integers(0, 256, (rows, values), dtype=np.uint8)
    return ImagePatches(noise, min(rows, 28))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[70, 280, 1120])
    parser.add_argument("--repeat", type=int, default=30)
    add_deadline(parser)
    options = parser.parse_args()
    failed = False
    with within(options.deadline) as time_left, torch.inference_mode():
        on_gpu, on_cpu = embedders()
        facts = published_model(URI)
        assert facts is not None
        for rows in options.rows:
            patches = patches_of(rows, on_gpu.images.patch_values)
            made = on_gpu(patches)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            held, times = torch.cuda.memory_allocated(), []
            for _ in range(options.repeat):
                began = time.perf_counter()
                on_gpu(patches)
                torch.cuda.synchronize()
                times.append(1000 * (time.perf_counter() - began))
            taken = torch.cuda.max_memory_allocated() - held
            counted = image_rows_bytes(on_gpu.images, facts.architecture, max_num_batched_tokens=rows)
            wanted = on_cpu(patches)
            off = float((made.float().cpu() - wanted).norm() / wanted.norm())
            failed |= off > 0.03 or taken > counted
            print(
                f"{rows:>5} rows {statistics.median(times):7.3f} ms with the copy of their pixels, off by {off:.4f}, "
                f"{taken / 2**20:.1f} MiB of {counted / 2**20:.1f} planned"
            )
    return time_left.code(failed)
