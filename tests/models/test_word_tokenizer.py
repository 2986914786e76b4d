"""The word tokenizer has a token for every word of every exercise, and gives any text back."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from format_words import FIELD_WORDS, LEADING_WORDS, PHRASE_WORDS
from hypothesis import given
from hypothesis import strategies as st
from lessons import lesson, primer
from word_tokenizer import NEWLINE_ID, SPACE, VOCAB_SIZE, build_word_tokenizer, write_word_tokenizer

from modelserve_tools.evaluation import facts, words
from modelserve_tools.evaluation.exercise import Exercise
from modelserve_tools.evaluation.long_skills import ITEM_TOKENS, LONG_SKILLS
from modelserve_tools.evaluation.short_skills import SHORT_SKILLS
from modelserve_tools.evaluation.skills import exercise
from modelserve_tools.tiny.__main__ import chat_template
from modelserve_tools.tiny.tokenizer_files import FIRST_BYTE_ID, SPECIAL_TOKENS
from modelserve_worker.text.chat_template import ChatTemplate
from modelserve_worker.text.checkpoint_text import load_checkpoint_text
from modelserve_worker.text.vocabulary import Vocabulary

TOKENIZER = build_word_tokenizer()
VOCABULARY = Vocabulary.from_tokenizer(TOKENIZER)
TEMPLATE = ChatTemplate(chat_template("31b"), special_tokens={"bos_token": "<bos>"})
BYTES = range(FIRST_BYTE_ID, FIRST_BYTE_ID + 256)
NO_WORDS = {*BYTES, *(i for piece, i in TOKENIZER.get_vocab().items() if piece == "<unk>" or "<unused" in piece)}


def _ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


def _for_template(message: dict[str, Any]) -> dict[str, Any]:
    """With the calls' arguments as objects, as the server hands them to a template."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message


def _rendered(item: Exercise) -> str:
    answer: dict[str, Any] = {"role": "assistant", "content": item.answer.content}
    if item.answer.tool_calls:
        calls = [{"name": call.name, "arguments": dict(call.arguments)} for call in item.answer.tool_calls]
        answer["tool_calls"] = [{"id": "call_1", "type": "function", "function": call} for call in calls]
    messages = [_for_template(dict(message)) for message in item.messages]
    variables = {"tools": list(item.tools), "enable_thinking": item.thinking}
    prompt = TEMPLATE.render(messages, variables=variables)
    spoken = TEMPLATE.render([*messages, answer], variables=variables, add_generation_prompt=False)
    return f"{prompt}<|channel>thought\n{item.answer.reasoning}<channel|>{item.answer.content}{spoken}"


def _check_in_vocabulary(text: str) -> None:
    ids = _ids(text)
    assert [TOKENIZER.id_to_token(i) for i in ids if i in NO_WORDS] == []
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("skill", SHORT_SKILLS)
def test_short_exercises_are_whole_words(skill: str) -> None:
    for index in range(300):
        _check_in_vocabulary(_rendered(exercise(skill, seed=1, index=index)))


@pytest.mark.parametrize("skill", LONG_SKILLS)
def test_long_exercises_are_whole_words(skill: str) -> None:
    for index in range(10):
        _check_in_vocabulary(_rendered(exercise(skill, seed=1, index=index, distance=2000)))


def test_lessons_and_primers_are_whole_words() -> None:
    for index in range(10):
        _check_in_vocabulary(_rendered(lesson(random.Random(index), words=4000)))
        _check_in_vocabulary(_rendered(primer(random.Random(index), words=400, items=30)))


def test_every_word_of_the_lists_has_a_token_of_its_own() -> None:
    """Samples may miss a rare word; the lists may not."""
    lists = [value for name, value in vars(words).items() if name.isupper()]
    spaced = {word for one in (*lists, PHRASE_WORDS) for word in one}
    bare = {*words.ADJECTIVES, *words.VALUES, *words.NAMES, *LEADING_WORDS, *FIELD_WORDS, *facts.CITIES}
    units = {word for small, large, _ in facts.UNITS for word in (small, *large.split())}
    texts = [f" {word}" for word in spaced | units | {*facts.COUNTRIES, *facts.CITIES}] + sorted(bare)
    assert [text for text in texts if len(_ids(text)) != 1] == []


def test_special_tokens_bytes_and_newline_have_the_published_ids() -> None:
    assert TOKENIZER.get_vocab_size() == VOCAB_SIZE == 2048
    assert {i: TOKENIZER.id_to_token(i) for i in SPECIAL_TOKENS} == SPECIAL_TOKENS
    assert _ids("<|turn>user\n") == [105, TOKENIZER.token_to_id("user"), NEWLINE_ID]
    assert [VOCABULARY.bytes_of(i) for i in BYTES] == [bytes([byte]) for byte in range(256)]
    assert set(SPECIAL_TOKENS) <= VOCABULARY.special_ids
    assert VOCABULARY.special_ids.isdisjoint(BYTES)


def test_numbers_are_one_token_a_digit() -> None:
    assert TOKENIZER.encode("47 + 138", add_special_tokens=False).tokens == ["4", "7", "▁+", "▁", "1", "3", "8"]


def test_keys_have_the_same_tokens_in_an_item_and_in_a_question_but_for_the_answers_first_word() -> None:
    item, question, answer = _ids(" amber fox river."), _ids("Complete: amber fox"), _ids("amber fox river")
    assert len(item) == ITEM_TOKENS
    assert question[2:] == item[:2]
    assert (len(answer), answer[1:]) == (3, item[1:3])


def test_a_text_may_spell_a_byte_token() -> None:
    text = "<0x41><0x0A> is not A"
    assert TOKENIZER.decode(_ids(text), skip_special_tokens=False) == text


@given(st.text().filter(lambda text: SPACE not in text and not any(name in text for name in SPECIAL_TOKENS.values())))
def test_any_text_comes_back_byte_for_byte(text: str) -> None:
    ids = _ids(text)
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text
    assert b"".join(VOCABULARY.bytes_of(i) for i in ids) == text.encode()


def test_written_files_are_read_as_a_checkpoints_text(tmp_path: Path) -> None:
    write_word_tokenizer(tmp_path, chat_template=chat_template("e4b"))
    assert {path.name for path in tmp_path.iterdir()} == {
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    text = load_checkpoint_text(tmp_path)
    assert text.tokenizer.encode("Complete: amber fox").ids == [2, *_ids("Complete: amber fox")]
