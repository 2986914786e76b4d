"""A byte-level tokenizer with Gemma 4's special tokens at their published ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from modelserve_tools.tiny.variants import VOCAB_SIZE
from modelserve_worker.text.vocabulary import BYTE_LEVEL_ALPHABET

FIRST_BYTE_ID = 238  # bytes 0..255 take ids 238..493
SPECIAL_TOKENS = {
    0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>", 4: "<mask>",
    46: "<|tool>", 47: "<tool|>", 48: "<|tool_call>", 49: "<tool_call|>", 50: "<|tool_response>",
    51: "<tool_response|>", 52: '<|"|>', 98: "<|think|>", 100: "<|channel>", 101: "<channel|>",
    105: "<|turn>", 106: "<turn|>",
}  # fmt: skip


def build_tokenizer() -> Tokenizer:
    """VOCAB_SIZE tokens: 256 bytes, the special tokens, and `<unusedN>` in every other place."""
    names = {FIRST_BYTE_ID + byte: letter for byte, letter in enumerate(BYTE_LEVEL_ALPHABET)} | SPECIAL_TOKENS
    vocabulary = {names.get(token_id, f"<unused{token_id}>"): token_id for token_id in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    bos = ("<bos>", 2)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[bos]
    )
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in vocabulary if name not in BYTE_LEVEL_ALPHABET]
    )
    return tokenizer


def write_tokenizer(directory: Path, *, chat_template: str, tokenizer: Tokenizer | None = None) -> None:
    """Write tokenizer.json (the byte-level one if none is given), tokenizer_config.json and chat_template.jinja.

    The tokenizer must have the special tokens at SPECIAL_TOKENS' ids.
    """
    (tokenizer or build_tokenizer()).save(str(directory / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "mask_token": "<mask>",
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (directory / "chat_template.jinja").write_text(chat_template)
