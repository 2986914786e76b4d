"""The tokenizer of a GGUF file as the tokenizer.json that it was made from: Gemma's BPE with byte fallback.

llama.cpp's converter (`Gemma4Model.set_vocab` in `conversion/gemma.py`) writes every token's text and type and the
merges in order. Control tokens, and those markers that it shows as text, were special; what else a user defined was
added without being so. Normalizer, decoder and merging are those of transformers' GemmaTokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from modelserve.errors import InvalidInput, UnsupportedModel
from modelserve.model.gguf.files import GgufCheckpoint, reading
from modelserve.model.gguf.header import ArraySpan, read_numbers, read_strings
from modelserve.model.gguf.tensor_names import TOKEN_EMBEDDING

KEYS = "tokenizer.ggml."
WHOLE = "tokenizer.huggingface.json"  # a key of the format that holds a tokenizer.json as it is
MODEL = "gemma4"
MERGES_PER_TOKEN = 8  # Gemma's vocabulary has two
SPACE = "\u2581"
_CONTROL, _USER_DEFINED = 3, 4  # types of tokens
_SHOWN = frozenset(  # special tokens that the converter calls user-defined, so that llama.cpp shows them
    {"<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>'}
)
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding", "mask_token": "mask"}


def tokenizer_json(checkpoint: GgufCheckpoint) -> str:
    """The text of a tokenizer.json. Raises UnsupportedModel for another tokenizer than Gemma's, InvalidInput for a
    vocabulary that is missing or contradicts itself."""
    whole = checkpoint.metadata.get(WHOLE)
    if isinstance(whole, str):
        return whole
    stated = checkpoint.metadata.get(f"{KEYS}model")
    if stated != MODEL:
        raise UnsupportedModel(
            f"{checkpoint.first}: {KEYS}model is {str(stated)[:64]!r}; {MODEL!r} is served, which llama.cpp's "
            "converter writes"
        )
    _check_counts(checkpoint)
    tokens = _strings(checkpoint, "tokens")
    types = read_numbers(reading(checkpoint.first), _span(checkpoint, "token_type"))
    if len(types) != len(tokens):
        raise InvalidInput(f"{checkpoint.first}: {len(tokens)} tokens have {len(types)} types: convert it again")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [_pair(checkpoint, merge) for merge in _strings(checkpoint, "merges")]
    _name_lone_bytes(vocabulary, merges)
    special = [i for i, kind in enumerate(types) if kind == _CONTROL or tokens[i] in _SHOWN]
    added = [i for i, kind in enumerate(types) if kind == _USER_DEFINED and tokens[i] not in _SHOWN]
    roles = special_tokens(checkpoint)
    bos, unknown = roles.get("bos_token"), roles.get("unk_token")
    return json.dumps(_document(vocabulary, merges, _added(tokens, special, added), bos=bos, unknown=unknown))


def _check_counts(checkpoint: GgufCheckpoint) -> None:
    """Raises InvalidInput for more tokens than the embedding has rows, and for merges without end."""
    tokens, merges = (_span(checkpoint, name).count for name in ("tokens", "merges"))
    embedding = checkpoint.tensors.get(TOKEN_EMBEDDING)
    rows = tokens if embedding is None else embedding[1].shape[0]
    if tokens > rows or merges > MERGES_PER_TOKEN * rows:
        raise InvalidInput(
            f"{checkpoint.first}: {tokens} tokens with {merges} merges, but {TOKEN_EMBEDDING!r} has {rows} rows; up to "
            f"{MERGES_PER_TOKEN} merges for each are read: convert it again"
        )


def repeated_tokens(checkpoint: GgufCheckpoint) -> dict[int, str]:
    """Texts of tokens that a later token has, too: no text becomes them, but a model may say them."""
    if WHOLE in checkpoint.metadata:
        return {}
    tokens = _strings(checkpoint, "tokens")
    last = {text: token_id for token_id, text in enumerate(tokens)}
    return {token_id: text for token_id, text in enumerate(tokens) if last[text] != token_id}


def special_tokens(checkpoint: GgufCheckpoint) -> dict[str, str]:
    """Texts of the tokens with a role: `bos_token`, `eos_token`, ... Raises InvalidInput for an id without a token."""
    ids = {role: checkpoint.metadata.get(f"{KEYS}{name}_token_id") for role, name in _ROLES.items()}
    wanted = {token_id for token_id in ids.values() if token_id is not None}
    stored = enumerate(read_strings(reading(checkpoint.first), _span(checkpoint, "tokens"))) if wanted else ()
    texts = {token_id: text.decode(errors="replace") for token_id, text in stored if token_id in wanted}
    for role, token_id in ids.items():
        if token_id is not None and token_id not in texts:
            raise InvalidInput(f"{checkpoint.first}: {role} is {str(token_id)[:64]}, which is no token of the file")
    return {role: texts[token_id] for role, token_id in ids.items() if isinstance(token_id, int)}


def _span(checkpoint: GgufCheckpoint, name: str) -> ArraySpan:
    span = checkpoint.metadata.get(f"{KEYS}{name}")
    if not isinstance(span, ArraySpan):
        raise InvalidInput(f"{checkpoint.first} has no array {KEYS}{name}: convert it again")
    return span


def _strings(checkpoint: GgufCheckpoint, name: str) -> list[str]:
    try:
        return [raw.decode() for raw in read_strings(reading(checkpoint.first), _span(checkpoint, name))]
    except UnicodeDecodeError as error:
        raise InvalidInput(
            f"{checkpoint.first}: {KEYS}{name} holds {error.object[:32]!r}, which is no UTF-8"
        ) from error


def _pair(checkpoint: GgufCheckpoint, merge: str) -> tuple[str, str]:
    """Both parts, which a space separates; the first may begin with one."""
    middle = merge.find(" ", 1)
    if middle < 0 or middle + 1 == len(merge):
        raise InvalidInput(f"{checkpoint.first}: the merge {merge[:32]!r} has no two parts")
    return merge[:middle], merge[middle + 1 :]


def _name_lone_bytes(vocabulary: dict[str, int], merges: Iterable[tuple[str, str]]) -> None:
    """Give characters that merges have, and no token, the id of their byte.

    Gemma's tokenizer.json calls token `<0x09>` a tab, too, and a file has one text for an id.
    """
    for part in {part for pair in merges for part in pair if len(part) == 1 and part not in vocabulary}:
        token_id = vocabulary.get(f"<0x{ord(part):02X}>") if ord(part) < 128 else None
        if token_id is not None:
            vocabulary[part] = token_id


def _added(tokens: list[str], special: Iterable[int], added: Iterable[int]) -> list[dict[str, Any]]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    marked = [(token_id, True) for token_id in special] + [(token_id, False) for token_id in added]
    return [{"id": i, "content": tokens[i], "special": is_special, **plain} for i, is_special in sorted(marked)]


def _document(
    vocabulary: Mapping[str, int],
    merges: list[tuple[str, str]],
    added: list[dict[str, Any]],
    *,
    bos: str | None,
    unknown: str | None,
) -> dict[str, Any]:
    start = [] if bos is None else [{"SpecialToken": {"id": bos, "type_id": 0}}]
    text = {"Sequence": {"id": "A", "type_id": 0}}
    ids = {} if bos is None else {bos: {"id": bos, "ids": [vocabulary[bos]], "tokens": [bos]}}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [*start, text],
            "pair": [*start, text, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": ids,
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": unknown,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": merges,
        },
    }
