"""Times the masks of a step of constrained requests.

    python tests/bench token_masks --requests 32

Needs no GPU and no model: a made-up tokenizer of 262,144 tokens, a schema of nested objects, and answers that follow
it, each request at its own place. Prints what building the tables and compiling take, then the milliseconds of a step's
masks, and of telling the matchers the sampled tokens; last their total, as a share of --itl, the milliseconds between
two tokens. All are CPU time of all threads together, so that other programs on the machine do not count; the engine
shares the masks of a step out to as many as 8 threads. On a GPU they run while the device computes the step's logits.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path

from modelserve_worker.grammar.answer import AnswerGrammar, Thought
from modelserve_worker.grammar.compiler import GrammarCompiler
from modelserve_worker.grammar.schema import json_grammar
from modelserve_worker.text.markers import Markers

TOKENIZER = Path(__file__).parents[2] / "models" / "gemma4-tiny-ple" / "tokenizer.json"
VOCABULARY = 262_144
TEXT = {"type": "string"}
ADDRESS = {
    "type": "object",
    "properties": {"street": TEXT, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
    "required": ["street", "zip"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": TEXT, "age": {"type": "integer"}, "tags": {"type": "array", "items": TEXT},
        "address": ADDRESS, "kind": {"enum": ["person", "firm"]},
    },
    "required": ["name", "age", "tags", "address", "kind"],
    "additionalProperties": False,
}  # fmt: skip


def tokenizer_json(rng: random.Random) -> dict[str, object]:
    """The tiny model's tokenizer, filled up with pieces of words, punctuation and other scripts."""
    document = json.loads(TOKENIZER.read_text())
    pieces = document["model"]["vocab"]
    known = {piece for piece, _ in pieces}
    while len(pieces) < VOCABULARY:
        piece = "".join(rng.choices("etaoinshrdlucmfwypvbgkqxjz", k=rng.randint(2, 8)))
        form = rng.random()
        if form < 0.5:
            piece = "▁" + piece
        elif form < 0.7:
            piece += rng.choice(['"', '",', ".", ", ", ":", "<", "1", '":'])
        elif form < 0.85:
            piece = "".join(chr(rng.randint(0x4E00, 0x9FFF)) for _ in range(rng.randint(1, 3)))
        if piece not in known:
            known.add(piece)
            pieces.append([piece, -8.0])
    return document


def answer(rng: random.Random) -> str:
    word = lambda: "".join(rng.choices("etaoinshrdlu", k=rng.randint(3, 9)))  # noqa: E731
    return json.dumps(
        {
            "name": f"{word()} {word()}", "age": rng.randint(1, 99), "tags": [word() for _ in range(3)],
            "address": {"street": f"{word()} {word()}", "zip": "12345"}, "kind": "person",
        },
        indent=rng.choice([None, 2]),
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--itl", type=float, default=34.0, help="31B, 2,048 in / 512 out, 32 at once, one H200")
    flags = parser.parse_args()
    rng = random.Random(1)
    text = json.dumps(tokenizer_json(rng))
    began = time.process_time()
    compiler = GrammarCompiler(text, vocab_size=VOCABULARY, eos_token_ids=[1, 106, 50])
    print(f"tables   {time.process_time() - began:8.3f} s")
    source = AnswerGrammar(part=json_grammar(SCHEMA)).source(Markers.of({}), Thought.NONE)
    began = time.process_time()
    compiled = compiler.compile(source).result()
    print(f"compile  {(time.process_time() - began) * 1e3:8.3f} ms")

    def begin() -> tuple[object, list[int]]:
        matcher = compiler.matcher(compiled, stop_token_ids=(), ignore_eos=False, min_tokens=0)
        return matcher, compiler._tokenizer.tokenize_str(answer(rng))

    running = [begin() for _ in range(flags.requests)]
    for place, (matcher, tokens) in enumerate(running):  # each at a place of its own
        for _ in range(place % (len(tokens) // 2)):
            matcher.consume(tokens.pop(0))
    masks_ms, tell_ms = [], []
    for _ in range(flags.steps):
        began = time.process_time()
        masks = compiler.masks([(matcher, ()) for matcher, _ in running])
        computed = time.process_time()
        for row, (matcher, tokens) in enumerate(running):
            token = tokens.pop(0)
            assert masks[row, token // 32] >> (token % 32) & 1, "the answer follows its schema"
            matcher.consume(token)
        masks_ms.append((computed - began) * 1e3)
        tell_ms.append((time.process_time() - computed) * 1e3)
        running = [begin() if not tokens or matcher.complete else (matcher, tokens) for matcher, tokens in running]
    print(f"masks    {statistics.median(masks_ms):8.3f} ms a step, p90 {sorted(masks_ms)[int(0.9 * flags.steps)]:.3f}")
    print(f"tell     {statistics.median(tell_ms):8.3f} ms a step")
    total = statistics.median(masks_ms) + statistics.median(tell_ms)
    print(f"total    {total:8.3f} ms, {total / flags.itl:.1%} of {flags.itl:g} ms")
    return 0
