"""Answers to random schemas over all that is accepted, each validated.

    python tests/bench schema_answers --schemas 10000

A random walk over the masks of the tiny model's vocabulary answers each schema. Prints how many schemas were refused
and why, how many answers were cut at their length and how many finished; ends with 1 where a finished one is wrong, a
walk fails, or fewer than 90 % finish.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from pathlib import Path

from schema_language import Walker, fault, random_schema, source_of

from modelserve.errors import InvalidInput
from modelserve_worker.grammar.check import check_grammar
from modelserve_worker.grammar.compiler import GrammarCompiler
from modelserve_worker.text.checkpoint_text import load_checkpoint_text

MODEL = Path(__file__).parents[2] / "models" / "gemma4-tiny-ple"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemas", type=int, default=10_000, help="accepted ones")
    parser.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args()
    rng = random.Random(flags.seed)
    compiler = GrammarCompiler((MODEL / "tokenizer.json").read_text(), vocab_size=2112, eos_token_ids=[1])
    walker = Walker(compiler, list(load_checkpoint_text(MODEL).vocabulary.token_bytes), eos=1)
    ends: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    while sum(ends.values()) < flags.schemas:
        schema = random_schema(rng)
        try:
            source = source_of(schema)
            check_grammar(source, field="schema")
        except InvalidInput as refusal:
            refused[str(refusal)[:44]] += 1
            continue
        try:
            answer = walker.walk(source, rng)
        except AssertionError as error:
            ends["failed"] += 1
            print(f"failed: {error}: {json.dumps(schema)}")
            continue
        wrong = None if answer is None else fault(answer, schema)
        ends["cut" if answer is None else "valid" if wrong is None else "wrong"] += 1
        if wrong is not None:
            print(f"wrong: {wrong}: {json.dumps(schema)}")
    print(f"{sum(ends.values())} schemas: {ends['valid']} finished and valid, {ends['wrong']} wrong, {ends['cut']} cut")
    print(f"{ends['failed']} failed; {sum(refused.values())} others were refused:")
    for reason, count in refused.most_common(8):
        print(f"    {count:5} {reason}...")
    return int(ends["wrong"] + ends["failed"] > 0 or ends["valid"] < 0.9 * flags.schemas)
