"""On a GPU: what rows of sounds take, in the engine without HTTP and without text, and what they take of its memory.

    python tests/bench audio_on_gpu
    python tests/bench audio_on_gpu --models E4B --sounds 1x30 4x7 --repeat 50 --kernels

Random weights of the published conformer, and of the 12B's embedder, in bfloat16. Prints, of so many sounds of so many
seconds that are encoded together: milliseconds with the copy of their frames, of the first time too, how long the host
is at it (what the device waits for where both are alike), the share of the floor (operations at 790 TFLOP/s), the
largest difference from the same in float32 beside the rows' own size, and the bytes that encoding takes beside those
that a plan counts (`audio_rows_bytes`). `--kernels` prints the kernels of the last case, longest first. Exit code 1
where rows differ by more than 3 % of their size (the conformer 5 %), or a plan counts less than there is.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from bench.deadline import add_deadline, within
from modelserve.model.audio import RATE, AudioArchitecture
from modelserve.model.model_facts import ModelFacts
from modelserve.planning.speed.encoding_cost import EncodingCost
from modelserve.planning.speed.step_time import layer_parameters
from modelserve.published import published_model
from modelserve.sizing.media.audio_embedder import audio_rows_bytes
from modelserve.sizing.media.audio_input import AudioInput
from modelserve_worker.embedded_spans import AudioFrames
from modelserve_worker.layers.placement import Placement
from modelserve_worker.models.audio_checkpoint import audio_sources
from modelserve_worker.models.audio_tower import AudioEmbedder, AudioTower
from modelserve_worker.models.gemma4 import audio_embedder
from modelserve_worker.step.audio_rows import rows_of_sounds
from modelserve_worker.weights.dummy import DummyWeights

FLOOR_FLOPS = 790e12
WANTED_SHARE = 0.25  # of 30 s by the conformer
MOST_OFF = {True: 0.05, False: 0.03}  # with a conformer, without one


class Case(NamedTuple):
    sounds: int
    seconds: int

    @classmethod
    def of(cls, text: str) -> Case:
        return cls(*map(int, text.split("x")))


def facts_of(model: str) -> tuple[ModelFacts, AudioArchitecture]:
    facts = published_model(f"hf://google/gemma-4-{model}-it")
    assert facts is not None
    assert facts.audio is not None
    return facts, facts.audio


def embedders(
    facts: ModelFacts, audio: AudioArchitecture
) -> tuple[AudioTower | AudioEmbedder, AudioTower | AudioEmbedder]:
    """The same weights on the GPU in bfloat16, and in float32."""
    device, hidden = torch.device("cuda"), facts.architecture.hidden_size
    made, wide = (audio_embedder(audio, hidden, Placement(device, each)) for each in (torch.bfloat16, torch.float32))
    weights = DummyWeights(seed=1, device=device, dtype=torch.bfloat16)
    for source in audio_sources(made):
        weights.fill(source)
    for theirs, ours in zip(wide.parameters(), made.parameters(), strict=True):
        theirs.copy_(ours)
    return made, wide


def operations(facts: ModelFacts, audio: AudioArchitecture, case: Case) -> float:
    """Of the products and convolutions; attention is next to none of them."""
    rows = case.sounds * audio.soft_tokens(case.seconds * RATE)
    if audio.tower is None:
        return 2.0 * rows * audio.embed_size * facts.architecture.hidden_size
    cost = EncodingCost.of(None, AudioInput(1, 30, audio), facts.architecture, tensor_parallel=1).audio
    return cost.rows(rows) * 2 * layer_parameters(facts.architecture)


def recordings(case: Case, audio: AudioArchitecture) -> list[AudioFrames]:
    generator = np.random.default_rng(case.seconds)
    samples = case.seconds * RATE
    shape, rows = (audio.frames(samples), audio.frame_values), audio.soft_tokens(samples)
    middle = -3.0 if audio.tower is not None else 0.0
    noise = (generator.standard_normal(shape) + middle for _ in range(case.sounds))
    return [AudioFrames(each.astype(np.float32), rows) for each in noise]


def timed(embedder: AudioTower | AudioEmbedder, sounds: Sequence[AudioFrames], repeat: int) -> tuple[float, float]:
    """Median milliseconds until the rows are there, and until the host has launched it all."""
    whole, launched = [], []
    for _ in range(repeat):
        began = time.perf_counter()
        rows_of_sounds(sounds, embedder)
        launched.append(1000 * (time.perf_counter() - began))
        torch.cuda.synchronize()
        whole.append(1000 * (time.perf_counter() - began))
    return statistics.median(whole), statistics.median(launched)


def measure(model: str, cases: Sequence[Case], *, repeat: int, kernels: bool) -> bool:
    """Whether anything is amiss."""
    facts, audio = facts_of(model)
    made, wide = embedders(facts, audio)
    failed = False
    rows_of_sounds(recordings(Case(1, 1), audio), made)  # libraries are loaded, bounds are read
    rows_of_sounds(recordings(Case(1, 1), audio), wide)
    for case in cases:
        sounds = recordings(case, audio)
        torch.cuda.synchronize()
        began = time.perf_counter()
        ours = rows_of_sounds(sounds, made)
        torch.cuda.synchronize()
        first = 1000 * (time.perf_counter() - began)
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        took, launched = timed(made, sounds, repeat)
        taken = torch.cuda.max_memory_allocated() - held
        room = AudioInput(case.sounds, case.seconds, audio)
        counted = audio_rows_bytes(room, facts.architecture, max_num_batched_tokens=len(ours))
        wanted = rows_of_sounds(sounds, wide)
        off = float((ours.float() - wanted).norm() / wanted.norm())
        floor = 1000 * operations(facts, audio, case) / FLOOR_FLOPS
        asked = f" (wanted {WANTED_SHARE:.0%})" if audio.tower is not None and case == Case(1, 30) else ""
        failed |= off > MOST_OFF[audio.tower is not None] or taken > counted
        print(
            f"{model:>7} {case.sounds:>2} x {case.seconds:<3} s {took:7.3f} ms, first {first:7.1f}, "
            f"host {launched:7.3f}, floor {floor:6.3f}: {floor / took:.0%}{asked}, off by {off:.4f}, "
            f"{taken / 2**20:.1f} MiB of {counted / 2**20:.1f} planned",
            flush=True,
        )
    if kernels:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            rows_of_sounds(sounds, made)
            torch.cuda.synchronize()
        print(profile.key_averages().table(sort_by="cuda_time_total", row_limit=14, max_name_column_width=70))
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["E2B", "E4B", "12B"])
    parser.add_argument(
        "--sounds", nargs="+", type=Case.of,
        default=[Case.of(each) for each in ("1x2", "1x10", "1x30", "8x5", "4x10")],
        help="sounds x seconds of each, encoded together",
    )  # fmt: skip
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--kernels", action="store_true", help="kernels of the last case, longest first")
    add_deadline(parser)
    options = parser.parse_args()
    failed = False
    with within(options.deadline) as time_left, torch.inference_mode():
        for model in options.models:
            failed |= measure(model, options.sounds, repeat=options.repeat, kernels=options.kernels)
    return time_left.code(failed)
