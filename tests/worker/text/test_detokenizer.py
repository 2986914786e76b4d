"""Streaming text equals decoding at once, whatever the bytes and wherever the tokens are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from modelserve.errors import InvalidInput
from modelserve_tools.tiny.tokenizer_files import FIRST_BYTE_ID, build_tokenizer
from modelserve_worker.text.detokenizer import IncrementalDetokenizer
from modelserve_worker.text.vocabulary import Vocabulary

BYTE_LEVEL = build_tokenizer()
BYTE_LEVEL_VOCABULARY = Vocabulary.from_tokenizer(BYTE_LEVEL)
PIECES = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁hello", "é", "日本", "👩‍🚀", "\n"]


def _byte_fallback() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(PIECES)}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


BYTE_FALLBACK = _byte_fallback()
BYTE_FALLBACK_VOCABULARY = Vocabulary.from_tokenizer(BYTE_FALLBACK)


def _stream(vocabulary: Vocabulary, token_ids: list[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(vocabulary)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.finish()]


@given(st.text())
def test_byte_level_text_comes_back_and_equals_the_library(text: str) -> None:
    token_ids = BYTE_LEVEL.encode(text, add_special_tokens=False).ids
    pieces = _stream(BYTE_LEVEL_VOCABULARY, token_ids)
    assert "".join(pieces) == BYTE_LEVEL.decode(token_ids)
    if "<" not in text:  # "<eos>" typed by a user is a special token, and skipped
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces if "\ufffd" not in text)


@given(st.binary())
def test_any_byte_string_decodes_like_the_library_does_at_once(data: bytes) -> None:
    token_ids = [FIRST_BYTE_ID + byte for byte in data]
    assert "".join(_stream(BYTE_LEVEL_VOCABULARY, token_ids)) == data.decode(errors="replace")
    assert data.decode(errors="replace") == BYTE_LEVEL.decode(token_ids)


@given(st.lists(st.sampled_from(range(1, len(PIECES)))))
def test_byte_fallback_tokens_are_their_bytes(token_ids: list[int]) -> None:
    data = b"".join(BYTE_FALLBACK_VOCABULARY.bytes_of(token_id) for token_id in token_ids)
    text = "".join(_stream(BYTE_FALLBACK_VOCABULARY, token_ids))
    assert text == data.decode(errors="replace")
    if "\ufffd" not in text:  # for malformed runs the library replaces every byte of the run
        assert text == BYTE_FALLBACK.decode(token_ids)


@given(st.text(alphabet="aé日👩🚀\u200d "))
def test_byte_fallback_streams_no_partial_character(text: str) -> None:
    token_ids = [1 + byte for byte in text.encode()]
    pieces = _stream(BYTE_FALLBACK_VOCABULARY, token_ids)
    assert "".join(pieces) == text == BYTE_FALLBACK.decode(token_ids)
    assert all(len(piece) <= 1 for piece in pieces)


@given(st.lists(st.integers(0, 700)))
def test_ids_beyond_the_tokenizer_and_special_ids_say_nothing(token_ids: list[int]) -> None:
    text = "".join(_stream(BYTE_LEVEL_VOCABULARY, token_ids))
    data = bytes(i - FIRST_BYTE_ID for i in token_ids if FIRST_BYTE_ID <= i < FIRST_BYTE_ID + 256)
    assert text == data.decode(errors="replace")


def test_special_tokens_are_text_when_asked_for() -> None:
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL_VOCABULARY, skip_special_tokens=False)
    assert detokenizer.push(106) + detokenizer.finish() == "<turn|>"


def test_a_decoder_that_looks_at_neighbours_is_refused() -> None:
    tokenizer = _byte_fallback()
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(InvalidInput, match=r"decoder \['WordPiece'\] is not supported"):
        Vocabulary.from_tokenizer(tokenizer)
