"""A tokenizer of whole words: Gemma 4's special tokens and bytes at their published ids, and the exercises' vocabulary.

Text outside the vocabulary falls back to bytes. As in Gemma's own tokenizer a space is written U+2581, so that this
one character is read back as a space; any other text comes back as it was.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path

from format_words import FIELD_WORDS, LEADING_WORDS, PHRASE_WORDS
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from modelserve_tools.evaluation import words
from modelserve_tools.evaluation.facts import CITIES, COUNTRIES
from modelserve_tools.tiny.tokenizer_files import FIRST_BYTE_ID, SPECIAL_TOKENS, write_tokenizer

VOCAB_SIZE = 2048
NEWLINE_ID = 107
SPACE = "\u2581"

_FORMAT_WORDS = (
    "system", "user", "model", "thought", "declaration", "description", "parameters", "properties", "required", "type",
    "OBJECT", "STRING", "INTEGER", "BOOLEAN", "call", "response", "value", "tool",
)  # fmt: skip
_SIGNS = [*'0123456789!"+,-.:<=>?[]{}', *(SPACE + sign for sign in '"+-=')]
_BOTH_FORMS = (*words.ADJECTIVES, *words.VALUES, *words.NAMES, *words.COLORS, *words.SKIES, *CITIES)
_SPACED = (
    *words.NOUNS, *words.PEOPLE, *words.PLACES, *words.THINGS, *words.MOVES, *words.DEEDS,
    *words.MANNERS, *words.TIMES, *PHRASE_WORDS, *COUNTRIES,
)  # fmt: skip
_BARE = (*LEADING_WORDS, *FIELD_WORDS, *_FORMAT_WORDS)


def build_word_tokenizer() -> Tokenizer:
    """VOCAB_SIZE tokens; places that no word needs are `<unusedN>`. Equal scores: the fewest pieces win."""
    vocabulary = _vocabulary()
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in vocabulary], unk_id=3, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("<", behavior="isolated"),  # "<0x41>" in a text is six characters, not a byte
            pre_tokenizers.Split(Regex(SPACE), behavior="merged_with_next"),
        ]
    )
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", 2)]
    )
    special = [piece for token_id, piece in enumerate(vocabulary) if token_id in SPECIAL_TOKENS or _is_unused(piece)]
    tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in special])
    return tokenizer


def write_word_tokenizer(directory: Path, *, chat_template: str) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    write_tokenizer(directory, chat_template=chat_template, tokenizer=build_word_tokenizer())


def _vocabulary() -> list[str]:
    """Pieces by id. Raises ValueError when the words do not fit."""
    fixed = SPECIAL_TOKENS | {NEWLINE_ID: "\n"} | {FIRST_BYTE_ID + byte: f"<0x{byte:02X}>" for byte in range(256)}
    pieces = chain(
        [SPACE], _SIGNS, _BOTH_FORMS, _BARE, (SPACE + word for word in chain(_BOTH_FORMS, _SPACED))
    )  # fmt: skip
    distinct = list(dict.fromkeys(pieces))
    after_bytes = FIRST_BYTE_ID + 256
    free = [i for i in chain(range(after_bytes, VOCAB_SIZE), range(after_bytes)) if i not in fixed]
    if len(distinct) > len(free):
        raise ValueError(f"{len(distinct)} pieces, but {VOCAB_SIZE} ids leave room for {len(free)}; use fewer words")
    names = fixed | dict(zip(free, distinct, strict=False))
    return [names.get(token_id, f"<unused{token_id}>") for token_id in range(VOCAB_SIZE)]


def _is_unused(piece: str) -> bool:
    return piece.startswith("<unused")
