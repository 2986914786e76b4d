"""Requests of every kind in profile `exact`, with drafts and without: whether one byte differs.

    python tests/bench drafts_change_nothing [--requests 1000] [--model keqv ple] [--only "k = 2" chunks]
        [--profile exact|fast] [--device cpu|cuda] [--deadline SECONDS]

Of both trained checkpoints: prompts that begin alike or repeat themselves, greedy and drawn, with n answers, penalties,
filters, stop strings, grammars, log probabilities, scored prompts. They are answered without drafts, and then in other
chunks and another order of arrival; with a drafter that is right with probability 0, 0.5 and 1 at k = 1 to 4, and half
the time at k = 8 and 15; with prompt lookup; with an assistant: the trained one, a damaged one, or a random one with
centroids; with both; with drafters of blocks: the trained DFlash, random ones of 16 rows and of a DSpark; and with an
assistant, a drafter of blocks and lookup at once, of which every few steps another one is asked, or none. All with the
prefix cache, steps launched ahead, one abort, and preemptions in a pool that is too small. Prints a line each,
and ends with 1 where tokens, a text, a reason or a log probability differ, in `exact` to the bit.
"""

from __future__ import annotations

import argparse
import itertools
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from assisted import ASSISTANT, TARGET, assistant_for, damage_checkpoint, write_assistant
from block_drafts import TurnByTurn, block_drafter, geometry_beside, write_block_drafter
from model_checkpoints import load_checkpoint, read_architecture
from test_drafts import BODIES, LONGEST, MODEL, SEQUENCES, TEXT, Said, assert_same, engine_of, run
from trained_answers import TrainedModel
from true_drafter import TrueDrafter

from bench.deadline import add_deadline, within
from modelserve.engine_args import EngineArgs
from modelserve_worker.drafters.block_drafter import BlockDrafter
from modelserve_worker.drafters.drafter import Drafter, LongestProposal
from modelserve_worker.drafters.prompt_lookup import PromptLookup
from modelserve_worker.kernels.operations import PLAIN, PLAIN_EXACT, Operations
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM
from modelserve_worker.server.answers.preparation import SequenceSpec
from modelserve_worker.startup.device import device_facts, kernel_table, select_geometry

CHECKPOINTS = {"keqv": TARGET, "ple": MODEL}
DFLASH = TARGET.parent / "gemma4-tiny-keqv-dflash"
ALONE_CHUNK, CHUNK = 64, 24
STEP_ROWS = CHUNK + SEQUENCES * 16  # more than any step has


class Tried(NamedTuple):
    """A line: what proposes tokens, over steps of so many rows."""

    name: str
    drafter: Drafter | None
    chunk: int = CHUNK
    block: BlockDrafter | None = None  # the one of these that keeps rows of its own
    costs: TurnByTurn | None = None


def requests(trained: TrainedModel, count: int) -> list[SequenceSpec]:
    """The same each time: bodies of all kinds, half of them greedy, prompts that begin alike or repeat themselves."""
    rng, words, found, earlier = random.Random(0), TEXT.split(), list[SequenceSpec](), [TEXT]
    while len(found) < count:
        body = {"max_tokens": rng.randint(25, 44), "seed": rng.randrange(1 << 30), "ignore_eos": rng.random() < 0.5}
        begin = [rng.choice(earlier[-5:])] if rng.random() < 0.5 else []
        prompt = " ".join(begin + rng.sample(words, 6) * rng.randint(1, 4))[:240]
        earlier.append(prompt)
        body |= {"prompt": prompt} | rng.choice(BODIES)
        found += trained.completion(**body)
    for number, spec in enumerate(found):
        spec.request.request_id = f"r{number}"
    return found


def drafters(checkpoint: str, model: Gemma4ForCausalLM, alone: dict[str, Said], scratch: Path) -> Iterator[Tried]:
    """What is tried."""
    vocab_size = model.architecture.vocab_size
    device = model.norm.weight.device
    answers = {name: said.tokens for name, said in alone.items()}
    for chunk in (17, 24, 150):
        yield Tried(f"no drafts, chunks of {chunk}", None, chunk)
    for k, right in [*itertools.product(range(1, 5), (0.0, 0.5, 1.0)), (8, 0.5), (15, 0.5)]:
        drafter = TrueDrafter(
            answers, num_tokens=k, right=right, slots=SEQUENCES, longest=LONGEST, vocab_size=vocab_size, device=device
        )
        yield Tried(f"k = {k}, right with probability {right}", drafter)
    sizes = {"max_num_seqs": SEQUENCES, "max_model_len": LONGEST, "device": device}
    yield Tried("prompt lookup", PromptLookup(num_tokens=8, **sizes))
    assistants = {"damaged assistant": scratch / checkpoint}
    if checkpoint == "keqv":
        damage_checkpoint(ASSISTANT, scratch / checkpoint, noise=0.8)
        assistants["trained assistant"] = ASSISTANT
    else:
        assistants = {"random assistant, with centroids": scratch / checkpoint}
        write_assistant(scratch / checkpoint, MODEL, seed=3, centroids=64)
    for name, directory in assistants.items():
        yield Tried(name, assistant_for(model, directory, num_tokens=4, slots=SEQUENCES))
    # The last of them: trained where there is one.
    both = [assistant_for(model, directory, num_tokens=4, slots=SEQUENCES), PromptLookup(num_tokens=8, **sizes)]
    yield Tried(f"{name} and prompt lookup", LongestProposal(both))
    blocks = {"random DFlash of 16 rows": write_block_drafter(scratch / "b16", CHECKPOINTS[checkpoint], block_rows=16)}
    blocks["random DSpark"] = write_block_drafter(scratch / "dspark", CHECKPOINTS[checkpoint], kind="dspark")
    if checkpoint == "keqv":
        blocks["trained DFlash"] = DFLASH
    for of_block, path in blocks.items():
        block = block_drafter(model, path, num_tokens=15, slots=SEQUENCES, step_rows=STEP_ROWS)
        yield Tried(of_block, block, block=block)
    # The last of each.
    block = block_drafter(model, path, num_tokens=15, slots=SEQUENCES, step_rows=STEP_ROWS)
    lookup = PromptLookup(num_tokens=8, **sizes)
    several = [lookup, assistant_for(model, directory, num_tokens=8, slots=SEQUENCES), block]
    label = f"{name}, {of_block} and prompt lookup by turns"
    yield Tried(label, LongestProposal(several), block=block, costs=TurnByTurn(2))


def compared(said: dict[str, Said], alone: dict[str, Said], *, apart: float) -> Iterator[str]:
    """Who differs, and in what."""
    for request, before in alone.items():
        try:
            assert_same(said[request], before, request, apart=apart)
        except AssertionError as error:
            yield f"{request}: {error}"[:700]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000)
    parser.add_argument("--model", choices=list(CHECKPOINTS), nargs="+", default=list(CHECKPOINTS))
    parser.add_argument("--only", nargs="+", default=[""], help="drafters whose line contains one of these")
    parser.add_argument("--profile", choices=["exact", "fast"], default="exact")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="cuda: by kernels, captured")
    add_deadline(parser)
    chosen = parser.parse_args()
    if chosen.device.type == "cuda" and chosen.profile != "exact":
        parser.error("--device cuda: in profile fast bfloat16 rows depend on those beside them; take --profile exact")
    torch.set_num_threads(1)
    apart = 0.0 if chosen.profile == "exact" else 2e-4
    different, lines = [], list[str]()
    with within(chosen.deadline) as time_left:
        for checkpoint in chosen.model:
            trained = TrainedModel(CHECKPOINTS[checkpoint])
            model = model_of(checkpoint, chosen.profile, chosen.device)
            engine = engine_of(trained, model, None, pool_of=SEQUENCES, chunk=ALONE_CHUNK)
            alone = run(trained, engine, requests(trained, chosen.requests))
            with tempfile.TemporaryDirectory() as scratch:
                for tried in drafters(checkpoint, model, alone, Path(scratch)):
                    name = tried.name
                    if not any(part in name for part in chosen.only):
                        continue
                    began = time.perf_counter()
                    engine = engine_of(
                        trained, model, tried.drafter, pool_of=3, chunk=tried.chunk, caching=True, costs=tried.costs,
                        geometry=geometry_beside(model, tried.block.network) if tried.block is not None else None,
                    )  # fmt: skip
                    engine.runner.launches_ahead |= tried.drafter is not None
                    wanted = requests(trained, chosen.requests)
                    said = run(trained, engine, wanted, aborted="r1", preempting=True, seed=tried.chunk)
                    failed = [*compared(said, alone, apart=apart)]
                    different += failed
                    stats = engine.scheduler.stats()
                    lines.append(
                        f"{checkpoint}, {name}: {len(said)} requests, {len(failed)} differ; "
                        f"{sum(stats.accepted_per_position)} of {stats.draft_tokens_total} drafts accepted, "
                        f"{stats.preemptions_total} preemptions, {stats.prefix_hits_total} prompt tokens found, "
                        f"{time.perf_counter() - began:.0f} s"
                    )
                    print(lines[-1], *failed[:5], sep="\n  ", flush=True)
    print(f"{len(lines)} comparisons, {len(different)} answers differ")
    return time_left.code(different)


def model_of(checkpoint: str, profile: str, device: torch.device) -> Gemma4ForCausalLM:
    """In float32 on the CPU; on a GPU in bfloat16, as its kernels take it."""
    directory = CHECKPOINTS[checkpoint]
    if device.type == "cpu":
        return load_checkpoint(directory, operations=PLAIN_EXACT if profile == "exact" else PLAIN)
    device = torch.device("cuda", 0)
    architecture = read_architecture(directory)
    args = EngineArgs(model=str(directory), profile=profile)
    table = kernel_table(device_facts(device), architecture, select_geometry(architecture, args), args)
    assert table.on_kernels, "the kernels do not take this model"
    return load_checkpoint(directory, dtype=torch.bfloat16, device=device, operations=Operations(table, device))
