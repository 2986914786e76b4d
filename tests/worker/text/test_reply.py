"""Thoughts, content and calls are told apart by token ids, the same for every grouping of the tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelserve_tools.tiny.tokenizer_files import FIRST_BYTE_ID, SPECIAL_TOKENS, build_tokenizer
from modelserve_worker.text.markers import Markers
from modelserve_worker.text.reply import (
    CallArguments,
    CallBegun,
    Channel,
    Part,
    ReplyFormat,
    ReplyParser,
    Text,
    join_parts,
)
from modelserve_worker.text.tool_calls import ToolCall
from modelserve_worker.text.vocabulary import Vocabulary

TOKENIZER = build_tokenizer()
VOCABULARY = Vocabulary.from_tokenizer(TOKENIZER)
MARKERS = Markers.of(VOCABULARY.ids)
THINKS = ReplyFormat(MARKERS)
CALLS = ReplyFormat(MARKERS, tool_calls=True)
PARIS = '<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:2}<tool_call|>'
PARIS_CALL = ToolCall("weather", {"city": "Paris", "days": 2})


def _ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def _spelled(text: str) -> list[int]:
    """Ordinary tokens only, whatever the text spells."""
    return [FIRST_BYTE_ID + byte for byte in text.encode()]


def _content(text: str) -> Text:
    return Text(Channel.CONTENT, text)


def _reasoning(text: str) -> Text:
    return Text(Channel.REASONING, text)


def _read(parser: ReplyParser, token_ids: Sequence[int]) -> list[Part]:
    """Texts and calls of the whole answer."""
    return [part for part in _pieces(parser, token_ids) if not isinstance(part, CallBegun | CallArguments)]


def _pieces(parser: ReplyParser, token_ids: Sequence[int]) -> list[Part]:
    parts: list[Part] = []
    for token_id in token_ids:
        parts += parser.push(token_id)
        if parser.ended:
            return join_parts(parts)
    return join_parts([*parts, *parser.finish()])


def _parts(text: str, reply_format: ReplyFormat = CALLS) -> list[Part]:
    return _read(ReplyParser(VOCABULARY, reply_format), _ids(text))


def test_a_thought_before_the_answer() -> None:
    parser = ReplyParser(VOCABULARY, THINKS)
    assert _read(parser, _ids("<|channel>thought\nhm, hm\n<channel|>Yes.")) == [
        _reasoning("hm, hm\n"),
        _content("Yes."),
    ]
    assert parser.reasoning_tokens == len("thought\nhm, hm\n")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("just text", [_content("just text")]),
        ("<|channel>thought\n<channel|>Yes.", [_content("Yes.")]),
        ("<|channel>thought<channel|>Yes.", [_content("Yes.")]),
        ("<|channel>thoughtful<channel|>Yes.", [_reasoning("thoughtful"), _content("Yes.")]),
        ("<|channel>though<channel|>Yes.", [_reasoning("though"), _content("Yes.")]),
        ("<|channel>thought\ncut of", [_reasoning("cut of")]),
        ("<|channel>thought\nthought\ntwice<channel|>", [_reasoning("thought\ntwice")]),
        ("<|channel>thought\na<channel|>b<|channel>thought\nc<channel|>d",
         [_reasoning("a"), _content("b"), _reasoning("c"), _content("d")]),
        ("Yes.<channel|> No.", [_content("Yes. No.")]),
        (PARIS, [PARIS_CALL]),
        (f"Look: {PARIS}{PARIS} done", [_content("Look: "), PARIS_CALL, PARIS_CALL, _content(" done")]),
        (f"<|channel>thought\na{PARIS}", [_reasoning("a"), PARIS_CALL]),
        (f"<|channel>thought\na<channel|>{PARIS}<|tool_response>", [_reasoning("a"), PARIS_CALL]),
        ("<|tool_call>call:weather{city:Paris}<tool_call|>!", [_content("call:weather{city:Paris}!")]),
        ('a<|tool_call>call:weather{city:<|"|>Par', [_content("a")]),  # cut
        ("<|tool_call>call:weather{city:Par", []),
        (f"<|tool_call>call:a{{{PARIS}", [_content("call:a{"), PARIS_CALL]),
        ("<|tool_call>call:a{<|channel>thought\nb<channel|>c", [_content("call:a{"), _reasoning("b"), _content("c")]),
        ("<|tool_call>call:a{}<|tool_response>b", [_content("call:a{}b")]),
        ("<|tool_call>call:a{x:1<turn|>}<channel|><tool_call|>", [ToolCall("a", {"x": 1})]),
    ],
)  # fmt: skip
def test_parts_of_an_answer(text: str, parts: list[Part]) -> None:
    assert _parts(text) == parts


def test_without_tools_a_call_is_text() -> None:
    assert _parts(f"<|channel>thought\na{PARIS}", THINKS) == [
        _reasoning("a"),
        _content("call:weather{city:Paris,days:2}"),
    ]


def test_text_that_spells_markers_is_text() -> None:
    text = f"<|channel>thought\nno<channel|>{PARIS}<turn|>"
    assert _read(ReplyParser(VOCABULARY, CALLS), _spelled(text)) == [_content(text)]
    quoted = [*_ids('<|tool_call>call:f{a:<|"|>'), *_spelled('<|"|><tool_call|>'), *_ids('<|"|>}<tool_call|>')]
    assert _read(ReplyParser(VOCABULARY, CALLS), quoted) == [ToolCall("f", {"a": '<|"|><tool_call|>'})]


def test_without_markers_everything_is_content() -> None:
    text = f"<|channel>thought\na<channel|>{PARIS}"
    assert _parts(text, ReplyFormat()) == [_content("thought\nacall:weather{city:Paris,days:2}")]
    raw = ReplyParser(VOCABULARY, skip_special_tokens=False)
    assert _read(raw, _ids(text)) == [_content(text)]
    unpaired = Markers.of({name: token_id for name, token_id in VOCABULARY.ids.items() if name != "<channel|>"})
    assert _parts("<|channel>thought\nab", ReplyFormat(unpaired)) == [_content("thought\nab")]


@pytest.mark.parametrize(
    ("prompt", "tail"),
    [
        ("<|turn>model\n", None),
        ("<|turn>model\n<|channel>thought\n<channel|>", None),
        ("<|turn>user\n<|channel><turn|>\n<|turn>model\n", None),
        ("<|turn>model\n<|channel>", ""),
        ("<|turn>model\n<|channel>thought\n", "thought\n"),
    ],
)
def test_a_thought_that_the_prompt_opened(prompt: str, tail: str | None) -> None:
    found = MARKERS.tail_of_open_thought(_ids(prompt))
    assert found == (None if tail is None else _ids(tail))
    label = "thought\n" if tail == "" else ""
    first = _reasoning("a") if tail is not None else _content("a")
    assert _parts(f"{label}a<channel|>b", ReplyFormat(MARKERS, prompt_tail=found))[0] == (
        first if tail is not None else _content("ab")
    )


def test_one_call_ends_the_answer() -> None:
    parser = ReplyParser(VOCABULARY, ReplyFormat(MARKERS, tool_calls=True, one_call=True))
    broken = "<|tool_call>call:weather{<tool_call|>"
    assert _read(parser, _ids(broken + PARIS + PARIS)) == [_content("call:weather{"), PARIS_CALL]
    assert parser.ended
    assert parser.stop_string is None


@pytest.mark.parametrize(
    ("text", "stop", "parts"),
    [
        ("<|channel>thought\na STOP b<channel|>c", "STOP", [_reasoning("a ")]),
        ("<|channel>thought\na\n<channel|>c\nd", "\n", [_reasoning("a")]),  # the label has no part in the search
        ("<|channel>thought\nST<channel|>OP", "STOP", [_reasoning("ST"), _content("OP")]),
        ("a ST" + PARIS, "STOP", [_content("a ST"), PARIS_CALL]),
        (PARIS + "and Paris", "Paris", [PARIS_CALL, _content("and ")]),  # nor have the calls
        ("<|tool_call>call:weather{city:Paris}<tool_call|>!", "Paris", [_content("call:weather{city:")]),
    ],
)
def test_stop_strings(text: str, stop: str, parts: list[Part]) -> None:
    parser = ReplyParser(VOCABULARY, CALLS, stop=[stop])
    assert _read(parser, _ids(text)) == parts


def test_stop_strings_wait_for_min_tokens() -> None:
    parser = ReplyParser(VOCABULARY, stop=["x"], min_tokens=4)
    assert (_read(parser, _ids("xx-xx")), parser.stop_string) == ([_content("xx-")], "x")


def test_a_tail_of_malformed_bytes_may_complete_a_stop_string() -> None:
    parser = ReplyParser(VOCABULARY, stop=["a\ufffd"])
    assert [parser.push(FIRST_BYTE_ID + byte) for byte in b"ba\xe6"] == [[_content("b")], [], []]
    assert (parser.finish(), parser.stop_string) == ([], "a\ufffd")


PIECES = st.sampled_from(
    [
        "<|channel>", "<|channel>thought\n", "thought\n", "tho", "<channel|>", "<|tool_call>", "<tool_call|>", PARIS,
        '<|"|>', "call:f{a:1}", "<|tool_call>call:f{", "}", "<|tool_response>", "<turn|>", "say", "é👩‍🚀", " ", "END",
    ]
)  # fmt: skip
TOKENS = st.lists(PIECES.map(_ids) | st.binary(min_size=1, max_size=2).map(lambda b: [FIRST_BYTE_ID + x for x in b]))


def _reference(token_ids: Sequence[int]) -> str:
    """All the text there is: every byte of every token that is no special token."""
    data = b"".join(b"" if i in VOCABULARY.special_ids else VOCABULARY.bytes_of(i) for i in token_ids)
    return data.decode(errors="replace")


@given(TOKENS, st.booleans(), st.lists(st.sampled_from(["END", "say", "\n"]), max_size=2))
def test_pushing_on_and_starting_anew_agree(pieces: list[list[int]], tools: bool, stop: list[str]) -> None:
    """What was emitted before any token is a beginning of what the answer cut there says: nothing is taken back."""
    token_ids = [token_id for piece in pieces for token_id in piece]
    reply_format = ReplyFormat(MARKERS, tool_calls=tools)
    parser = ReplyParser(VOCABULARY, reply_format, stop=stop)
    emitted: list[Part] = []
    for position, token_id in enumerate(token_ids, start=1):
        emitted += parser.push(token_id)
        whole = _pieces(ReplyParser(VOCABULARY, reply_format, stop=stop), token_ids[:position])
        assert _is_beginning(join_parts(emitted), whole)
        if parser.ended:
            assert join_parts(emitted) == whole
            return
    assert join_parts([*emitted, *parser.finish()]) == _pieces(
        ReplyParser(VOCABULARY, reply_format, stop=stop), token_ids
    )


@given(TOKENS)
def test_the_pieces_of_a_call_are_its_arguments_and_those_of_no_call_are_no_json(pieces: list[list[int]]) -> None:
    token_ids = [token_id for piece in pieces for token_id in piece]
    parts = _pieces(ReplyParser(VOCABULARY, CALLS), token_ids)
    for before, part, after in zip([None, *parts], parts, [*parts[1:], None], strict=False):
        if isinstance(part, CallArguments):
            assert isinstance(before, CallBegun)
            if isinstance(after, ToolCall):
                assert (before.name, part.json) == (after.name, after.arguments_json())
            else:
                with pytest.raises(ValueError, match=r"Expecting|Unterminated"):
                    json.loads(part.json)
        else:
            assert not isinstance(before, CallBegun)


def test_arguments_come_with_the_tokens_that_say_them() -> None:
    parser = ReplyParser(VOCABULARY, CALLS)
    pieces = [part for token_id in _ids(PARIS) for part in parser.push(token_id)]
    assert pieces == [
        CallBegun("weather"), CallArguments('{"city": "'), *map(CallArguments, "Paris"), CallArguments('"'),
        CallArguments(', "days": 2'), CallArguments("}"), PARIS_CALL,
    ]  # fmt: skip


@pytest.mark.parametrize("length", range(len(_ids(f"<|channel>thought\nhm<channel|>So: {PARIS}{PARIS}"))))
def test_a_cut_at_every_token(length: int) -> None:
    token_ids = _ids(f"<|channel>thought\nhm<channel|>So: {PARIS}{PARIS}")[:length]
    parts = _read(ReplyParser(VOCABULARY, CALLS), token_ids)
    said = "".join(part.text for part in parts if isinstance(part, Text))
    assert "hmSo: ".startswith(said)
    assert [part for part in parts if isinstance(part, ToolCall)] == [PARIS_CALL] * token_ids.count(49)


def _is_beginning(parts: list[Part], whole: list[Part]) -> bool:
    if not parts or parts == whole[: len(parts)]:
        return True
    *complete, last = parts
    following = whole[len(complete)] if len(complete) < len(whole) else None
    if complete != whole[: len(complete)]:
        return False
    if isinstance(last, CallArguments) and isinstance(following, CallArguments):
        return following.json.startswith(last.json)
    if not isinstance(last, Text) or not isinstance(following, Text):
        return False
    return last.channel == following.channel and following.text.startswith(last.text)


@given(TOKENS, st.booleans())
def test_no_marker_leaks_and_nothing_is_lost(pieces: list[list[int]], tools: bool) -> None:
    token_ids = [token_id for piece in pieces for token_id in piece]
    parts = _read(ReplyParser(VOCABULARY, ReplyFormat(MARKERS, tool_calls=tools)), token_ids)
    said = "".join(part.text for part in parts if isinstance(part, Text))
    assert not any(name in said for name in SPECIAL_TOKENS.values())
    calls = [part for part in parts if isinstance(part, ToolCall)]
    cut = 100 in token_ids or (tools and 48 in token_ids)  # perhaps a label or a call that the end cuts
    if not calls and not cut and "\ufffd" not in said:
        assert said == _reference(token_ids)
