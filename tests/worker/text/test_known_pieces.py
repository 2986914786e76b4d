"""What was encoded before is not encoded again, and no answer can tell: ids, marks and errors are the same."""

from __future__ import annotations

import random
import sys
from array import array
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from modelserve_worker.text.known_pieces import LEAST_CHARACTERS, KnownPieces
from modelserve_worker.text.prompt_encoder import PromptEncoder, TooManyTokensError

MODELS = Path(__file__).resolve().parents[2] / "models"
MARKERS = ("<|turn>", "<turn|>", "<bos>", "<eos>", "<|channel>", "<channel|>", "<|tool_call>", "<|think|>")
PARTS = (
    "the cat sat on the mat. ", "ünïcödé ", "漢字かな交じり文", "👩\u200d👩\u200d👧 ", "e\u0301\u0300", "\u200d\ufeff",
    "  \n\n\t", "<|tu", "rn>", "|>", "<turn", "0123456789 ", "def f(x): return x\n", "\U0010ffff", "a" * 40, "▁▁",
    "<unk>", "<0x0A>",
)  # fmt: skip
MOST = 1 << 20


def _encoder(name: str, **settings: int) -> PromptEncoder:
    return PromptEncoder(Tokenizer.from_file(str(MODELS / name / "tokenizer.json")), longest_token_bytes=64, **settings)


class Chats:
    """Texts as templates render them: turns that are sent again, grow, and are edited."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._turns: list[str] = []

    def text(self, encoder: PromptEncoder) -> str:
        rng = self._random
        if self._turns and rng.random() < 0.2:
            self._turns.pop(rng.randrange(len(self._turns)))
        if self._turns and rng.random() < 0.2:
            self._turns[-1] = self._turns[-1][: -rng.randint(1, 30)] + self._said(encoder)
        self._turns += [self._said(encoder) for _ in range(rng.randint(0, 3))]
        return "".join(rng.choice(MARKERS) * (rng.random() < 0.9) + turn for turn in self._turns)

    def _said(self, encoder: PromptEncoder) -> str:
        """As it is rendered: what spells a marker is guarded, or it is one."""
        text = "".join(self._random.choices((*PARTS, *MARKERS), k=self._random.randint(0, 30)))
        guarded: str = encoder.guarded(text)
        return guarded if self._random.random() < 0.8 else text


@pytest.mark.parametrize("name", ["gemma4-tiny-ple", "gemma4-tiny-keqv"])
def test_ids_and_marks_are_those_of_encoding_everything(name: str) -> None:
    knows, plain = _encoder(name), _encoder(name, known_bytes=0)
    for seed in range(12):
        chats, place = Chats(seed), random.Random(seed)
        for _ in range(12):
            text, ends = chats.text(plain), bool(place.randrange(2))
            mark = place.randint(0, len(text))
            asked = {"add_special_tokens": ends, "most_tokens": MOST}
            assert knows.encode_marked(text, mark, **asked) == plain.encode_marked(text, mark, **asked)
    assert knows._known.bytes > 0
    assert plain._known.bytes == 0


def test_what_is_kept_counts_with_the_name_of_whom_it_is_for() -> None:
    known, text, ids = KnownPieces(MOST), "a" * LEAST_CHARACTERS, array("i", range(50))
    known.keep("t" * 5_000, text, ids)
    assert known.bytes >= 5_000 + sys.getsizeof(text) + sys.getsizeof(ids)


def test_known_pieces_are_not_encoded_again_but_in_their_own_namespace() -> None:
    honest = Tokenizer.from_file(str(MODELS / "gemma4-tiny-ple" / "tokenizer.json"))
    asked: list[str] = []

    class Watched:
        def encode_batch_fast(self, texts: list[str], **settings: bool) -> object:
            asked.extend(texts)
            return honest.encode_batch_fast(texts, **settings)

        def __getattr__(self, name: str) -> object:
            return getattr(honest, name)

    encoder = PromptEncoder(Watched(), longest_token_bytes=64)  # type: ignore[arg-type]
    old, new = "what was said " * 20, "and what is new " * 20

    def encode(text: str, namespace: str) -> list[str]:
        asked.clear()
        encoder.encode_marked(text, 0, add_special_tokens=True, most_tokens=MOST, namespace=namespace)
        return list(asked)

    assert encode(f"<|turn>{old}<turn|>", "a") == [old]
    assert encode(f"<|turn>{old}<turn|><|turn>{new}<turn|>", "a") == [new]
    assert encode(f"<|turn>{old}<turn|>", "b") == [old]


def test_a_text_of_too_many_tokens_is_refused_alike_whether_or_not_it_is_known() -> None:
    encoder, text = _encoder("gemma4-tiny-ple"), "x1 " * 3_000
    told = []
    for most in (50, MOST, 50):
        try:
            encoder.encode(text, add_special_tokens=False, most_tokens=most)
        except TooManyTokensError as error:
            told.append(error.at_least)
    assert len(told) == 2
    assert told[0] == told[1]


def test_memory_is_bounded_and_the_oldest_go_first() -> None:
    known = KnownPieces(4_000)
    texts = [f"{number:04}" * LEAST_CHARACTERS for number in range(40)]
    for text in texts:
        known.keep("", text, array("i", [1, 2]))
        assert known.bytes <= 4_000
        assert known.find("", texts[0]) is not None, "it is asked for all the time"
    assert known.find("", texts[-1]) == array("i", [1, 2])
    assert known.find("", texts[1]) is None
    real = sum(sys.getsizeof(text) + sys.getsizeof(ids) for (_, text), ids in known._ids.items())
    assert real <= known.bytes
    known.keep("", "y" * 4_000, array("i", [1]))
    assert known.find("", "y" * 4_000) is None, "it would take the place of too many"
