"""Random schemas, grammars and forced calls on the trained checkpoint; every finished answer must validate:

    PYTHONPATH=operator:worker python tests/worker/grammar/fuzz_answers.py --cases 1000 [--seed N]

Prints by kind how many answers were finished and how many cut by their length; ends with 1 at the first wrong one.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Sequence

from schemas import Case, random_case
from trained_answers import TrainedModel

AT_ONCE = 64


def run_cases(model: TrainedModel, cases: Sequence[Case], *, max_tokens: int) -> Counter[tuple[str, str]]:
    """Counts of (kind, finish reason). Raises AssertionError, naming the case, where a finished answer is wrong."""
    specs = []
    for number, case in enumerate(cases):
        body = {"messages": case.messages, "max_tokens": max_tokens, "seed": number, "temperature": number % 3 / 2}
        specs += model.chat(**body, **case.body)
    counts: Counter[tuple[str, str]] = Counter()
    for case, reply in zip(cases, model.run(specs), strict=True):
        assert reply.finish_reason in ("stop", "length"), reply.finish_reason
        counts[case.name, reply.finish_reason] += 1
        if reply.finish_reason == "stop":
            try:
                case.check(reply)
            except Exception as error:
                raise AssertionError(f"{case.name}: {case.body}: {reply.content!r}, {reply.tool_calls}") from error
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=160)
    flags = parser.parse_args()
    rng, model = random.Random(flags.seed), TrainedModel(max_num_seqs=AT_ONCE)
    total: Counter[tuple[str, str]] = Counter()
    for first in range(0, flags.cases, AT_ONCE):
        cases = [random_case(rng, number) for number in range(first, min(flags.cases, first + AT_ONCE))]
        total += run_cases(model, cases, max_tokens=flags.max_tokens)
        print(f"{sum(total.values())} of {flags.cases}", file=sys.stderr, flush=True)
    for kind in sorted({kind for kind, _ in total}):
        print(f"{kind:26} finished {total[kind, 'stop']:4}  cut {total[kind, 'length']:4}")
    print(f"{'all':26} finished {sum(n for (_, how), n in total.items() if how == 'stop'):4}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
