"""On a GPU: what rows of images take, in the engine without HTTP and without text, and what they take of its memory.

    python tests/bench images_on_gpu
    python tests/bench images_on_gpu --models 31B --images 1x280 4x280 1x1120 --repeat 50 --kernels

Random weights of the published towers, and of the 12B's embedder, in bfloat16. Prints, of so many images of so many
soft tokens that are encoded together: milliseconds with the copy of their pixels, of the first time too (libraries
look for a kernel of each new shape), how long the host is at it (what the device waits for where both are alike), the
share of the floor (operations at 790 TFLOP/s), the largest difference from the same in float32 beside the rows' own
size, and the bytes that encoding takes beside those that a plan counts (`image_rows_bytes`). `--attention` names
PyTorch's kernel of attention instead of leaving it the choice; `--kernels` prints the kernels of the last case, longest
first. Exit code 1 where rows differ by more than 3 % of their size (towers 5 %), or a plan counts less than there is.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.deadline import add_deadline, within
from modelserve.model.model_facts import ModelFacts
from modelserve.published import published_model
from modelserve.sizing.media.embedder import image_rows_bytes
from modelserve.sizing.media.image_input import ImageInput
from modelserve_worker.embedded_spans import ImagePatches
from modelserve_worker.layers.placement import Placement
from modelserve_worker.models.gemma4 import image_embedder
from modelserve_worker.models.image_checkpoint import image_sources
from modelserve_worker.models.image_embedder import ImageEmbedder
from modelserve_worker.models.image_tower import ImageTower
from modelserve_worker.step.image_rows import rows_of
from modelserve_worker.weights.dummy import DummyWeights

FLOOR_FLOPS = 790e12
WANTED_SHARE = {"26B-A4B": 0.5, "31B": 0.5, "E2B": 0.35, "E4B": 0.35}  # at 280 and 1,120 soft tokens, one image
ATTENTION = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
MOST_OFF = {True: 0.05, False: 0.03}  # with a tower, without one


class Case(NamedTuple):
    images: int
    rows: int

    @classmethod
    def of(cls, text: str) -> Case:
        return cls(*map(int, text.split("x")))


def facts_of(model: str) -> ModelFacts:
    facts = published_model(f"hf://google/gemma-4-{model}-it")
    assert facts is not None
    return facts


def embedders(facts: ModelFacts) -> tuple[ImageTower | ImageEmbedder, ImageTower | ImageEmbedder]:
    """The same weights on the GPU in bfloat16, and in float32."""
    device, hidden = torch.device("cuda"), facts.architecture.hidden_size
    assert facts.images is not None
    made, wide = (image_embedder(facts.images, hidden, Placement(device, t)) for t in (torch.bfloat16, torch.float32))
    weights = DummyWeights(seed=1, device=device, dtype=torch.bfloat16)
    for source in image_sources(made):
        weights.fill(source)
    for theirs, ours in zip(wide.parameters(), made.parameters(), strict=True):
        theirs.copy_(ours)
    return made, wide


def operations(facts: ModelFacts, case: Case) -> float:
    """Of the products, and of attention between the patches of each image."""
    images, hidden = facts.images, facts.architecture.hidden_size
    assert images is not None
    rows = case.images * case.rows
    projected = 2.0 * rows * images.embed_size * hidden
    tower = images.tower
    if tower is None:
        return projected + 2.0 * rows * images.patch_values * images.embed_size
    patches = rows * tower.patches
    layer = 4 * tower.hidden_size * tower.attention_size + 3 * tower.hidden_size * tower.intermediate_size
    linears = 2.0 * patches * (tower.layers * layer + images.patch_values // tower.patches * tower.hidden_size)
    attention = 4.0 * patches * case.rows * tower.patches * tower.attention_size * tower.layers
    return projected + linears + attention


def pictures(case: Case, values: int) -> list[ImagePatches]:
    generator = np.random.default_rng(case.rows)
    noise = (generator.integers(0, 256, (case.rows, values), dtype=np.uint8) for _ in range(case.images))
    return [ImagePatches(each, min(case.rows, 28)) for each in noise]


def timed(embedder: ImageTower | ImageEmbedder, images: Sequence[ImagePatches], repeat: int) -> tuple[float, float]:
    """Median milliseconds until the rows are there, and until the host has launched it all."""
    whole, launched = [], []
    for _ in range(repeat):
        began = time.perf_counter()
        rows_of(images, embedder)
        launched.append(1000 * (time.perf_counter() - began))
        torch.cuda.synchronize()
        whole.append(1000 * (time.perf_counter() - began))
    return statistics.median(whole), statistics.median(launched)


def measure(model: str, cases: Sequence[Case], *, attention: str | None, repeat: int, kernels: bool) -> bool:
    """Whether anything is amiss."""
    facts = facts_of(model)
    assert facts.images is not None
    made, wide = embedders(facts)
    failed = False
    attending = nullcontext if attention is None else partial(sdpa_kernel, ATTENTION[attention])
    rows_of(pictures(Case(1, 12), facts.images.patch_values), made)  # libraries are loaded
    for case in cases:
        images = pictures(case, facts.images.patch_values)
        torch.cuda.synchronize()
        with attending():
            began = time.perf_counter()
            ours = rows_of(images, made)
            torch.cuda.synchronize()
            first = 1000 * (time.perf_counter() - began)
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
            took, launched = timed(made, images, repeat)
        taken = torch.cuda.max_memory_allocated() - held
        total = case.images * case.rows
        counted = image_rows_bytes(ImageInput(1, total, facts.images), facts.architecture, max_num_batched_tokens=total)
        wanted = rows_of(images, wide)
        off = float((ours.float() - wanted).norm() / wanted.norm())
        floor = 1000 * operations(facts, case) / FLOOR_FLOPS
        share, least = floor / took, WANTED_SHARE.get(model)
        asked = f" (wanted {least:.0%})" if least and case.images == 1 and case.rows >= 280 else ""
        failed |= off > MOST_OFF[facts.images.tower is not None] or taken > counted
        print(
            f"{model:>7} {case.images:>2} x {case.rows:<4} {took:7.3f} ms, first {first:7.1f}, host {launched:7.3f}, "
            f"floor {floor:6.3f}: {share:.0%}{asked}, off by {off:.4f}, "
            f"{taken / 2**20:.1f} MiB of {counted / 2**20:.1f} planned",
            flush=True,
        )
    if kernels:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile, attending():
            rows_of(images, made)
            torch.cuda.synchronize()
        print(profile.key_averages().table(sort_by="cuda_time_total", row_limit=14, max_name_column_width=70))
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["12B", "E4B", "31B"])
    parser.add_argument(
        "--images", nargs="+", type=Case.of, default=[Case.of(each) for each in
        ("1x70", "1x280", "1x1120", "16x70", "4x280")], help="images x soft tokens of each, encoded together",
    )  # fmt: skip
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--attention", choices=ATTENTION)
    parser.add_argument("--kernels", action="store_true", help="kernels of the last case, longest first")
    add_deadline(parser)
    options = parser.parse_args()
    failed = False
    with within(options.deadline) as time_left, torch.inference_mode():
        for model in options.models:
            failed |= measure(
                model, options.images, attention=options.attention, repeat=options.repeat, kernels=options.kernels
            )
    return time_left.code(failed)
