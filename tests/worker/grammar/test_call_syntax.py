"""The grammar of Gemma 4's calls: random walks through it are calls that parse and validate; the rest is refused."""

from __future__ import annotations

import calendar
import random

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from schemas import random_object
from trained_answers import MODEL

from modelserve.errors import InvalidInput
from modelserve_worker.grammar.answer import AnswerGrammar, CalledTool, Thought
from modelserve_worker.grammar.check import check_grammar
from modelserve_worker.text.checkpoint_text import load_checkpoint_text
from modelserve_worker.text.markers import Markers
from modelserve_worker.text.reply import ReplyFormat, ReplyParser, Text
from modelserve_worker.text.tool_calls import ToolCall

TEXT = load_checkpoint_text(MODEL)
VOCABULARY = TEXT.vocabulary
MARKERS = Markers.of(VOCABULARY.ids)
EOS = 1


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer(str(MODEL / "tokenizer.json"), eos_token=EOS)


def _source(schema: dict | None, *, strict: bool = True, **fields) -> str:
    tool = CalledTool("f", schema, strict, "tools.0.function.parameters")
    source = AnswerGrammar(tools=[tool], **fields).source(MARKERS, Thought.NONE)
    check_grammar(source, field="tools")
    return source


def _walk(source: str, tokenizer: LLTokenizer, rng: random.Random, *, longest: int = 400) -> list[int]:
    """Tokens drawn at random from those allowed, the shorter ones rather, until the grammar is at its end."""
    matcher = LLMatcher(tokenizer, source, log_level=0)
    tokens: list[int] = []
    while not matcher.is_stopped():
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        allowed = np.flatnonzero(mask).tolist()
        structural = [t for t in allowed if t in VOCABULARY.special_ids or VOCABULARY.bytes_of(t) == b"}"]
        token = rng.choice(structural if structural and rng.random() < 0.3 else allowed)
        assert matcher.consume_token(token), matcher.get_error()
        tokens.append(token)
        assert len(tokens) < longest, "the walk does not end"
    return tokens


def _calls(tokens: list[int]) -> list[ToolCall]:
    parser = ReplyParser(VOCABULARY, ReplyFormat(MARKERS, tool_calls=True))
    parts = [part for token in tokens for part in parser.push(token)] + parser.finish()
    assert not any(isinstance(part, Text) for part in parts), parts
    return [part for part in parts if isinstance(part, ToolCall)]


def test_every_walk_is_one_call_that_validates(tokenizer) -> None:
    rng = random.Random(4)
    for _ in range(60):
        schema = random_object(rng, 2)
        (call,) = _calls(_walk(_source(schema), tokenizer, rng))
        jsonschema.validate(call.arguments, schema)


def test_keys_come_sorted_as_the_model_writes_them_and_each_once(tokenizer) -> None:
    schema = {"type": "object", "properties": {name: {"type": "boolean"} for name in "cab"}, "required": ["b"]}
    rng, seen = random.Random(5), set()
    for _ in range(40):
        (call,) = _calls(_walk(_source(schema), tokenizer, rng))
        assert "b" in call.arguments
        assert list(call.arguments) == sorted(call.arguments)
        seen.add(tuple(call.arguments))
    assert seen == {("b",), ("a", "b"), ("b", "c"), ("a", "b", "c")}


def test_a_recursive_schema_is_followed(tokenizer) -> None:
    tree = {"type": "object", "properties": {"leaf": {"type": "boolean"}, "next": {"$ref": "#/$defs/tree"}}}
    schema = {"$ref": "#/$defs/tree", "$defs": {"tree": tree}}
    rng = random.Random(6)
    calls = [_calls(_walk(_source(schema), tokenizer, rng))[0] for _ in range(30)]
    assert any("next" in call.arguments.get("next", {}) for call in calls)
    for call in calls:
        jsonschema.validate(call.arguments, schema)


@pytest.mark.parametrize("schema", [None, {}, {"type": "object"}, {"type": "object", "properties": {}}])
def test_who_names_no_arguments_gets_none(tokenizer, schema) -> None:
    (call,) = _calls(_walk(_source(schema), tokenizer, random.Random(1)))
    assert call.arguments == {}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "uniqueItems"),
        ({"properties": {"a": {"allOf": [{"type": "string"}, {"minLength": 1}]}}}, "allOf"),
        ({"properties": {"a": {"type": "string", "format": "uri"}}}, "format 'uri' cannot be followed"),
        ({"properties": {"a": {"$ref": "http://example.com/x"}}}, "leads out of the schema"),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, "leads to no schema"),
        ({"properties": {"a": {"type": "word"}}}, "names none of"),
        ({"properties": {"a": {"enum": []}}}, "at least one value"),
        ({"properties": {"a": {"type": "array", "minItems": 3, "maxItems": 2}}}, "minItems 3 exceeds maxItems 2"),
        ({"properties": {"a": {"type": "string", "pattern": "(?=a)"}}}, "look-around"),
        ({"properties": {"a": {"type": "integer"}}, "required": ["b"]}, "not among the properties"),
        ({"type": "array"}, "are an object"),
    ],
)
def test_what_cannot_be_followed_is_named(schema, words) -> None:
    with pytest.raises(InvalidInput, match=words):
        _source(schema)


def test_arguments_that_are_not_strict_are_held_to_what_can_be_followed(tokenizer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}}}
    rng = random.Random(2)
    for _ in range(20):
        (call,) = _calls(_walk(_source(schema, strict=False), tokenizer, rng))
        assert set(call.arguments.get("a", [])) <= {1, 2}


def test_a_model_without_the_tokens_of_calls_is_told() -> None:
    with pytest.raises(InvalidInput, match="no tokens for calls"):
        AnswerGrammar(tools=[CalledTool("f", None, True, "tools")]).source(Markers.of({}), Thought.NONE)


def _spells(source: str, tokenizer: LLTokenizer, arguments: str) -> bool:
    """Whether the grammar lets the model write the call f{ARGUMENTS}, in which " stands for the quote token."""
    arguments = arguments.replace('"', '<|"|>')
    text = f"<|tool_call>call:f{{{arguments}}}<tool_call|>"
    matcher = LLMatcher(tokenizer, source, log_level=0)
    return all(
        matcher.consume_token(token) for token in TEXT.encoder.encode(text, add_special_tokens=False, most_tokens=200)
    )


def test_every_day_of_the_calendar_can_be_said_and_no_other(tokenizer) -> None:
    dates = _source({"properties": {"a": {"type": "string", "format": "date"}}, "required": ["a"]})
    moments = _source({"properties": {"a": {"type": "string", "format": "date-time"}}, "required": ["a"]})
    for year in (1900, 2000, 2023, 2024):
        for month in range(1, 13):
            for day in (1, 9, 10, 19, 20, 28, 29, 30, 31):
                is_day = day <= calendar.monthrange(year, month)[1]
                said = f"{year}-{month:02}-{day:02}"
                assert _spells(dates, tokenizer, f'a:"{said}"') == is_day, said
                if day > 28:
                    assert _spells(moments, tokenizer, f'a:"{said}T23:59:59Z"') == is_day, said


@pytest.mark.parametrize("schema", [{"type": "integer"}, {"type": "number"}, {}])
def test_a_long_id_is_not_cut(tokenizer, schema) -> None:
    source = _source({"properties": {"a": schema}, "required": ["a"]})
    assert _spells(source, tokenizer, "a:1234567890123456789012")


def test_an_id_keeps_its_capital_letters(tokenizer) -> None:
    source = _source({"properties": {"a": {"type": "string", "format": "uuid"}}, "required": ["a"]})
    assert _spells(source, tokenizer, 'a:"F81D4FAE-7DEC-11D0-A765-00A0C91E6BF6"')


@pytest.mark.parametrize("key", ["Content-Type", "2024", '"New York"', '"Köln"', "$id"])
def test_keys_that_no_schema_names_are_any_text(tokenizer, key) -> None:
    source = _source({"properties": {"a": {"type": "object"}}, "required": ["a"]})
    assert _spells(source, tokenizer, f'a:{{{key}:1,x:"y"}}')


def _types_twice(depth: int) -> dict:
    schema: dict = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": ["object", "object", "object"], "properties": {"a": schema}}
    return {"type": "object", "properties": {"a": schema}}


def _references(length: int) -> dict:
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)} | {f"d{length}": {"type": "integer"}}
    return {"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": chain}


@pytest.mark.parametrize("strict", [True, False])
def test_types_that_are_named_twice_cost_nothing(strict) -> None:
    assert len(_source(_types_twice(14), strict=strict)) < 10_000


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "back to itself"),
        ({"properties": {"a": {}}, "required": [{}]}, "required is a list of names"),
        ({"properties": {"a": {}}, "required": [1, "a"]}, "required is a list of names"),
        ({"properties": {"a": {"$ref": {}}}}, "leads out of the schema"),
        ({"properties": {"a": {"type": [{}]}}}, "names none of"),
        ({"properties": {"a": {"type": {}}}}, "names none of"),
        ({"properties": {"a": {"type": "string", "minLength": {}}}}, "minLength must be a number"),
        ({"properties": {"a": {"type": "array", "minItems": None, "maxItems": 3}}}, "minItems must be a number"),
        (_references(1_500), "lead to each other"),
    ],
)
def test_a_schema_that_is_none_is_named_whether_or_not_it_is_strict(schema, words, strict) -> None:
    with pytest.raises(InvalidInput, match=words):
        _source(schema, strict=strict)


@pytest.mark.parametrize("broken", [{"format": {}}, {"pattern": "(?=a)b"}, {"pattern": "(?<!a)b", "minLength": 1}])
def test_a_promise_that_nobody_made_does_not_refuse_a_call(tokenizer, broken) -> None:
    source = _source({"properties": {"a": {"type": "string", **broken}}, "required": ["a"]}, strict=False)
    assert _spells(source, tokenizer, 'a:"anything"')
    with pytest.raises(InvalidInput, match="tools"):
        _source({"properties": {"a": {"type": "string", **broken}}})
