"""JSON is read as Python's own parser reads it, strictly: same documents, same values, same words for a fault. What is
written is, read by that parser, what its own encoder would have written."""

from __future__ import annotations

import json
import math
import random
from typing import Any, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelserve_worker.server.json_text import read_json, to_json

_SEEDS = (
    b'{"prompt":[1,2,30,40000],"t":0.5,"s":null,"u":"\\u00e9\\ud83d\\ude00 \xc3\xa9","n":-1.5e10,"o":{"a":[{}],"":[]}}',
    b'[1e308,-0.0,123456789012345678901234567890,0.1,1E-5,"\\n\\t\\"",false,12345678901234567.890123,5e-324]',
    '{"текст":"привет","k":["a","b",[[]]]}'.encode(),
)
_INSERTED = (
    *(bytes([byte]) for byte in b'{}[]",:\\/eE+-.0123456789 tfnu\n\x00\x1f\x7f\x80\xc3\xed\xa0\xf4\xff'),
    b"", b"NaN", b"Infinity", b"\\ud800", b"\\udc00", b"e309", b"99999999999999999999", b"\xef\xbb\xbf",
)  # fmt: skip


def _strictly(text: bytes) -> Any:
    def refuse(name: str) -> NoReturn:
        raise ValueError(name)

    def finite(number: str) -> float:
        value = float(number)
        return value if math.isfinite(value) else refuse(number)

    return json.loads(text.decode("utf-8-sig"), parse_constant=refuse, parse_float=finite)


def _outcome(read: Any, text: bytes) -> str:
    """Types and signs of zero show in a repr."""
    try:
        return repr(read(text))
    except ValueError:
        return "refused"


def test_damaged_documents_are_read_as_pythons_parser_reads_them() -> None:
    rng = random.Random(7)
    outcomes = []
    for _ in range(6000):
        text = bytearray(rng.choice(_SEEDS))
        for _ in range(rng.randint(1, 3)):
            begin = rng.randrange(len(text) + 1)
            text[begin : begin + rng.choice((0, 0, 1, 4))] = rng.choice(_INSERTED)
        outcomes.append(_outcome(read_json, bytes(text)))
        assert outcomes[-1] == _outcome(_strictly, bytes(text)), bytes(text)
    refused = outcomes.count("refused")
    assert min(refused, len(outcomes) - refused) > 500, "both outcomes are met often"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (b"[1, 2", "Expecting ',' delimiter: line 1 column 6"),
        (b"[NaN]", "NaN is not JSON"),
        (b"[1e400]", "the number 1e400 is too large"),
        (b"[" * 100_000, "nested too deeply"),
        (b'"\xff"', "can't decode byte 0xff"),
    ],
)
def test_faults_are_named(text: bytes, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        read_json(text)


def test_what_only_pythons_parser_reads_is_read() -> None:
    assert read_json(b"\xef\xbb\xbf{}") == {}
    assert read_json(b'"\\ud800"') == "\ud800", "refused later, with the name of its field"


_PLAIN = st.characters(codec="utf-8")
_DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(_PLAIN),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(_PLAIN), inner, max_size=4),
)


class _Named(str):
    """A subclass of a string, which msgspec does not write."""


@given(_DOCUMENTS)
def test_what_is_written_is_read_as_it_was(document: Any) -> None:
    written = to_json(document)
    assert repr(json.loads(written)) == repr(document)
    assert b"\n" not in written, "an event is one line"


@pytest.mark.parametrize(
    "document",
    [
        {"logprob": -9999.0, "small": 5e-324, "large": 1e308, "zero": -0.0, "third": 1 / 3},
        {"integers": [1 << 63, -(1 << 64), 10**4000]},
        ['"\\/\b\f\n\r\t\x00\x1f\x7f', "\u2028\u2029", "naïve ☃ 👩‍🚀 \ufffd"],
        {1: 2, "a": {}, "": []},
        {"name": _Named("a\nb")},
    ],
)
def test_what_is_written_is_what_pythons_encoder_would_have(document: Any) -> None:
    expected = json.loads(json.dumps(document, ensure_ascii=False))
    assert repr(json.loads(to_json(document))) == repr(expected)


def test_half_of_a_surrogate_pair_is_not_written() -> None:
    for document in ("\ud800", {"\udc00": 1}, [_Named("\ud800")]):
        with pytest.raises(UnicodeEncodeError):
            to_json(document)
