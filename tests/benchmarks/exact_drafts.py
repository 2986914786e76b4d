"""Prompts of both trained checkpoints, greedy and drawn: whether an assistant, sound or damaged, changes a token.

    PYTHONPATH=operator:worker:tests/models:tests/worker/model:tests/worker/execution \
        python tests/benchmarks/exact_drafts.py [--prompts 500] [--drafts 4]

On the CPU in float32, where a row's bits depend on its own request alone. Each prompt is asked twice, with temperature
0 and with temperature 1 and a seed. Prints a line per checkpoint and assistant: requests, those that say another token,
and accepted drafts of those verified. Ends with status 1 where one says another token.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

import torch
from assisted import ASSISTANT, MODELS, TARGET, assistant_for, damage_checkpoint, engine_with, write_assistant
from model_checkpoints import load_checkpoint
from paged_logits import geometry_of
from teacher_forcing import checkpoint_renderer

from modelserve_tools.evaluation.short_skills import SHORT_SKILLS
from modelserve_tools.evaluation.skills import exercise
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM
from modelserve_worker.request import Request, SamplingParams

SLOTS, LONGEST, CHUNK, OUTPUT = 16, 768, 256, 48


def prompts_of(directory: Path, count: int) -> list[tuple[int, ...]]:
    renderer, skills, found = checkpoint_renderer(directory), sorted(SHORT_SKILLS), []
    for index in range(4 * count):
        rendered = renderer.render(exercise(skills[index % len(skills)], seed=7, index=index, distance=None))
        if rendered.prompt_tokens + OUTPUT <= LONGEST and len(found) < count:
            found.append(rendered.token_ids[: rendered.prompt_tokens])
    return found


def answers(
    model: Gemma4ForCausalLM, prompts: list[tuple[int, ...]], assistant: Path | None, k: int
) -> tuple[list[list[int]], int, int]:
    """Tokens of each request, drafts that were accepted and that were verified; the pool is too small for all slots."""
    drafter = None if assistant is None else assistant_for(model, assistant, num_tokens=k, slots=SLOTS)
    engine = engine_with(
        model, geometry_of(model), drafter, chunk=CHUNK, slots=SLOTS, longest=LONGEST, pool_of=SLOTS // 2
    )
    engine.runner.launches_ahead = drafter is not None
    accepted = verified = 0
    update, schedule = engine.scheduler.update, engine.scheduler.schedule

    def counting_update(sampled):
        nonlocal accepted
        accepted += int((sampled.counts - 1).sum()) if len(sampled.counts) else 0
        return update(sampled)

    def counting_schedule():
        nonlocal verified
        batch = schedule()
        verified += 0 if batch is None else int((batch.drawn - (batch.drawn > 0)).sum())
        return batch

    engine.scheduler.update, engine.scheduler.schedule = counting_update, counting_schedule
    requests, rng = [], random.Random(1)
    for number, prompt in enumerate(prompts):
        for temperature in (0.0, 1.0):
            sampling = SamplingParams(seed=number, max_tokens=OUTPUT, temperature=temperature)
            requests.append(Request(f"{number}-{temperature}", prompt, sampling))
    waiting = list(requests)
    rng.shuffle(waiting)
    while waiting or engine.has_work:
        while waiting and len(engine.scheduler._running.by_id) < SLOTS and rng.random() < 0.6:
            engine.add(waiting.pop())
        for output in engine.step():
            assert output.error is None, output.error
    return [request.output_token_ids for request in requests], accepted, verified


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--drafts", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    wrong = 0
    with tempfile.TemporaryDirectory() as scratch:
        damaged, random_one = Path(scratch) / "damaged", Path(scratch) / "random"
        damage_checkpoint(ASSISTANT, damaged, noise=0.8)
        shared = MODELS / "gemma4-tiny-ple"
        write_assistant(random_one, shared, seed=3, centroids=64)
        for directory, assistants in (
            (TARGET, {"trained": ASSISTANT, "damaged": damaged}),
            (shared, {"random, with centroids": random_one}),
        ):
            model, prompts = load_checkpoint(directory), prompts_of(directory, options.prompts)
            alone, _, _ = answers(model, prompts, None, 0)
            for name, assistant in assistants.items():
                began = time.perf_counter()
                said, accepted, verified = answers(model, prompts, assistant, options.drafts)
                others = sum(mine != theirs for mine, theirs in zip(said, alone, strict=True))
                wrong += others
                print(
                    f"{directory.name}, assistant {name}: {len(said)} requests, {others} say another token, "
                    f"{accepted} of {verified} drafts accepted, {time.perf_counter() - began:.0f} s", flush=True,
                )  # fmt: skip
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
