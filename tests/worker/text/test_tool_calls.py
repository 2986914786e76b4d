"""What the template writes as a call is what the parser reads; anything else is refused, never guessed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelserve_tools.tiny.__main__ import chat_template
from modelserve_tools.tiny.tokenizer_files import build_tokenizer
from modelserve_worker.text.chat_template import ChatTemplate
from modelserve_worker.text.markers import Markers
from modelserve_worker.text.reply import CallArguments, CallBegun, ReplyFormat, ReplyParser, join_parts
from modelserve_worker.text.tool_calls import MAX_DEPTH, QUOTE, CallReader, ToolCall
from modelserve_worker.text.vocabulary import Vocabulary

TOKENIZER = build_tokenizer()
VOCABULARY = Vocabulary.from_tokenizer(TOKENIZER)
MARKERS = Markers.of(VOCABULARY.ids)
TEMPLATE = ChatTemplate(chat_template("e4b"), special_tokens={"bos_token": "<bos>"})

# Without '<', no text spells a special token, which a tokenizer would read as that token.
PLAIN = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=12) | st.sampled_from(
    [
        "",
        'a "quoted" word',
        "{x:1}",
        "a,b:c]",
        "zwei\nZeilen",
        "👩‍🚀",
        "call:f{",
        "|>",
        "true",
        "12",
        "\u00a0x ",
        "null",
    ]
)
SCALARS = st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    SCALARS | PLAIN,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(PLAIN, inner, max_size=4),
    max_leaves=12,
)


def _read(source: str, *, piece: int | None = None) -> ToolCall:
    """The call, read whole or `piece` characters at a time. What comes before its end is never JSON."""
    reader = CallReader()
    said = ""
    piece = piece or len(source) or 1
    for start in range(0, len(source), piece):
        said += reader.push(source[start : start + piece])
        with pytest.raises(ValueError, match=r"Expecting|Unterminated|Extra data"):
            json.loads(said)
    rest, call = reader.close()
    assert said + rest == call.arguments_json()
    return call


def _call_tokens(arguments: dict[str, Any]) -> list[int]:
    """The tokens of a call as the template writes it, markers included."""
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "get.it-2", "arguments": arguments}}]}
    text = TEMPLATE.render([message], add_generation_prompt=False)
    return TOKENIZER.encode(text.removeprefix("<bos><|turn>model\n"), add_special_tokens=False).ids


@given(st.dictionaries(PLAIN, VALUES, max_size=4))
def test_arguments_come_back_from_the_template_as_they_were(arguments: dict[str, Any]) -> None:
    parser = ReplyParser(VOCABULARY, ReplyFormat(MARKERS, tool_calls=True))
    parts = [part for token_id in _call_tokens(arguments) for part in parser.push(token_id)]
    begun, said, call = join_parts(parts)
    assert (begun, call) == (CallBegun("get.it-2"), ToolCall("get.it-2", arguments))
    assert isinstance(call, ToolCall)
    assert said == CallArguments(call.arguments_json())
    assert json.loads(ToolCall("get.it-2", arguments).arguments_json()) == arguments
    assert parser.finish() == []


@pytest.mark.parametrize(
    ("source", "arguments"),
    [
        ("call:f{}", {}),
        ("\n call:f{ a : 1 , b : [ 1 , 2 ] }", {"a": 1, "b": [1, 2]}),
        (f"call:f{{{QUOTE}a b{QUOTE}:{QUOTE}x{QUOTE}}}", {"a b": "x"}),
        ("call:f{a:None,b:nil,c:none,d:null}", dict.fromkeys("abcd")),
        ("call:f{a:123456789012345678901234567890}", {"a": 123456789012345678901234567890}),
        ("call:f{a:-0.5e-3,b:1.0}", {"a": -0.0005, "b": 1.0}),
        (f"call:f{{a:{QUOTE}{{,}}]{QUOTE}}}", {"a": "{,}]"}),
        ("call:f{" + "a:{" * (MAX_DEPTH - 1) + "}" * MAX_DEPTH, None),
    ],
)
def test_spellings_that_are_calls(source: str, arguments: dict[str, Any] | None) -> None:
    call = _read(source)
    assert call == _read(source, piece=1)
    assert call.name == "f"
    if arguments is not None:
        assert call.arguments == arguments
        assert [type(value) for value in call.arguments.values()] == [type(value) for value in arguments.values()]


@pytest.mark.parametrize(
    "source",
    [
        "", "call:f", "call:{}", "call:f g{}", f"call:{'f' * 65}{{}}", "f{}", "call:f{}x", "call:f{a}", "call:f{a:}",
        "call:f{a:1", "call:f{a:1,}", "call:f{,}", "call:f{a:1 b:2}", "call:f{a:1,a:2}", "call:f{a:[1,]}",
        "call:f{a:[1}", "call:f{a:Paris}", 'call:f{a:"Paris"}', 'call:f{"a":1}', f"call:f{{a:{QUOTE}x}}",
        "call:f{a:007}", "call:f{a:+1}", "call:f{a:1.}", "call:f{a:1e400}", "call:f{a:NaN}", "call:f{a:Infinity}",
        "call:f{a:" + "9" * 5000 + "}", "call:f{a:" + "[" * 100_000, "call:f{" + "a:{" * MAX_DEPTH + "}" * 33,
    ],
)  # fmt: skip
def test_spellings_that_are_no_calls(source: str) -> None:
    with pytest.raises(ValueError, match=r"expected|deeper than 32|stands twice|too large|4400 char|unfinished"):
        _read(source)


@given(st.text(alphabet=f'cal:f{{}}[],01.e-"{QUOTE} \n'))
def test_any_text_is_a_call_or_a_value_error(source: str) -> None:
    try:
        call = _read(f"call:f{{{source}")
    except ValueError:
        return
    assert call == _read(f"call:f{{{source}", piece=1)
