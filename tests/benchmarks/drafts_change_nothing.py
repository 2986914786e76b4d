"""Requests of every kind with drafts and without, on the CPU: `python tests/benchmarks/drafts_change_nothing.py [N]`.

N requests (1,000) are answered without a drafter, and then with prompt lookup, with an assistant that is right in 80 %
of its tokens, with both, and with one that is always wrong; with the prefix cache, steps launched ahead, and
preemptions among them. Ends with 1 where a token, a text, a reason or a log probability differs. Prints a line each.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import torch

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "worker" / folder) for folder in ("execution", "grammar", "model", "scheduling", "kernels")]

from model_checkpoints import load_checkpoint  # noqa: E402
from test_drafts import BODIES, LONGEST, MODEL, SEQUENCES, TEXT, assert_same, engine_of, run  # noqa: E402
from trained_answers import TrainedModel  # noqa: E402
from true_drafter import TrueDrafter  # noqa: E402

from modelserve_worker.execution.drafter import Drafter, LongestProposal  # noqa: E402
from modelserve_worker.execution.prompt_lookup import PromptLookup  # noqa: E402
from modelserve_worker.server.preparation import SequenceSpec  # noqa: E402


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


def main() -> int:
    torch.set_num_threads(1)
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000
    trained, model = TrainedModel(), load_checkpoint(MODEL)
    sizes = {"max_num_seqs": SEQUENCES, "max_model_len": LONGEST, "device": torch.device("cpu")}
    without = run(trained, engine_of(trained, model, None, pool_of=SEQUENCES), requests(trained, count))
    answers = {name: said.tokens for name, said in without.items()}
    assistants = [
        TrueDrafter(
            answers, num_tokens=4, right=right, slots=SEQUENCES, longest=LONGEST,
            vocab_size=model.architecture.vocab_size,
        )
        for right in (0.8, 0.0)
    ]  # fmt: skip
    lookup = PromptLookup(num_tokens=8, **sizes)
    drafters: dict[str, Drafter] = {
        "prompt lookup": lookup,
        "assistant": assistants[0],
        "both": LongestProposal([assistants[0], lookup]),
        "damaged assistant": assistants[1],
    }
    different = 0
    for name, drafter in drafters.items():
        engine, began = engine_of(trained, model, drafter, pool_of=3), time.perf_counter()
        engine.runner.launches_ahead = True
        said = run(trained, engine, requests(trained, count), preempting=True)
        failed = 0
        for request, alone in without.items():
            try:
                assert_same(said[request], alone, request)
            except AssertionError as error:
                failed += 1
                print(f"{name}: {request}: {error}"[:300])
        stats = engine.scheduler.stats()
        print(
            f"{name}: {len(said)} requests, {failed} differ; {sum(stats.accepted_per_position)} of "
            f"{stats.draft_tokens_total} drafts accepted, {stats.preemptions_total} preemptions, "
            f"{stats.prefix_hits_total} prompt tokens found, {time.perf_counter() - began:.0f} s",
            flush=True,
        )
        different += failed
    return int(different > 0)


if __name__ == "__main__":
    raise SystemExit(main())
