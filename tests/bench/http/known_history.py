"""Times the next turn of a long chat in the front end, without a server.

    python tests/bench known_history

A chat of `--characters` (280,000 are about 65,000 tokens of English) sends one more question. Prints the milliseconds
of CPU from its validated body to token ids, as the first request of it and as one whose history was encoded before; the
best of five chats. Without --model the tokenizer has as many pieces as the published one, of made-up words.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path

from bench.engine.host_memory import write_tokenizer
from modelserve_tools.tiny.tokenizer_files import write_tokenizer as write_text_files
from modelserve_worker.server.answers.preparation import chat_prompt
from modelserve_worker.server.bodies.protocol import ChatCompletionRequest
from modelserve_worker.server.state import ServedModel
from modelserve_worker.text.checkpoint_text import load_checkpoint_text

ROOT = Path(__file__).resolve().parents[3]
TINY = ROOT / "tests/models/gemma4-tiny-ple"
VOCABULARY = 262_144


def conversation(seed: int, characters: int, turns: int) -> list[dict[str, str]]:
    words = (ROOT / "docs/sizing.md").read_text().split(" ")
    rng = random.Random(seed)
    each = characters // (2 * turns)

    def said() -> str:
        text = ""
        while len(text) < each:
            begin = rng.randrange(len(words) - 50)
            text += " ".join(words[begin : begin + 50]) + " "
        return text[:each]

    roles = ("user", "assistant") * turns
    return [{"role": role, "content": said()} for role in roles] + [{"role": "user", "content": "And what is next?"}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint's directory, for its tokenizer and template")
    parser.add_argument("--characters", type=int, default=280_000)
    parser.add_argument("--turns", type=int, default=10)
    flags = parser.parse_args()
    first, again = [], []
    with tempfile.TemporaryDirectory() as made:
        directory = flags.model or Path(made)
        if flags.model is None:
            write_text_files(directory, chat_template=(TINY / "chat_template.jinja").read_text())
            write_tokenizer(directory, vocab_size=VOCABULARY)
        model = ServedModel("m", load_checkpoint_text(directory), vocab_size=1 << 20)
        for seed in range(5):
            messages = conversation(seed, flags.characters, flags.turns)
            for times, said in ((first, messages[:-2]), (again, messages)):
                body = ChatCompletionRequest.model_validate({"model": "m", "messages": said})
                began = time.process_time()
                ids = chat_prompt(body, model, max_model_len=1 << 20)
                times.append(1e3 * (time.process_time() - began))
    print(f"{len(ids)} tokens: {min(first):.1f} ms of CPU the first time, {min(again):.1f} ms with a known history")
