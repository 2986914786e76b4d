"""The small checkpoint's template follows Gemma 4's chat format; broken templates and files say what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from modelserve.errors import InvalidInput
from modelserve_worker.text.chat_template import ChatTemplate, ChatTemplateError
from modelserve_worker.text.checkpoint_text import SamplingDefaults, load_checkpoint_text
from modelserve_worker.tiny.__main__ import chat_template
from modelserve_worker.tiny.tokenizer_files import write_tokenizer

CALL = {"name": "now", "arguments": {"zone": "CET", "n": 1}}
USER = {"role": "user", "content": " Hi "}
TOOL = {
    "type": "function",
    "function": {
        "name": "now",
        "description": "The time",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"type": "string"}, "exact": {"type": "boolean"}},
            "required": ["zone"],
        },
    },
}


def _render(messages: list[dict[str, Any]], *, variant: str = "e4b", prompt: bool = True, **variables: Any) -> str:
    template = ChatTemplate(chat_template(variant), special_tokens={"bos_token": "<bos>"})
    return template.render(messages, add_generation_prompt=prompt, variables=variables)


def test_a_user_turn_and_the_generation_prompt() -> None:
    assert _render([USER]) == "<bos><|turn>user\nHi<turn|>\n<|turn>model\n"
    assert _render([USER], prompt=False) == "<bos><|turn>user\nHi<turn|>\n"


def test_larger_variants_close_an_empty_thought_unless_thinking_is_on() -> None:
    assert _render([USER], variant="31b").endswith("<|turn>model\n<|channel>thought\n<channel|>")
    assert _render([USER], variant="31b", enable_thinking=True) == (
        "<bos><|turn>system\n<|think|>\n<turn|>\n<|turn>user\nHi<turn|>\n<|turn>model\n"
    )


def test_system_parts_and_old_thoughts() -> None:
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind"}]},
        USER,
        {"role": "assistant", "content": "<|channel>thought\nhm<channel|>Hello"},
        {"role": "user", "content": "Bye"},
    ]
    assert _render(messages) == (
        "<bos><|turn>system\nBe kind<turn|>\n<|turn>user\nHi<turn|>\n<|turn>model\nHello<turn|>\n"
        "<|turn>user\nBye<turn|>\n<|turn>model\n"
    )


def test_tool_declarations_calls_and_responses_share_the_model_turn() -> None:
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [{"function": CALL}]},
        {"role": "tool", "name": "now", "content": "12:00"},
    ]
    assert _render(messages, tools=[TOOL]) == (
        '<bos><|turn>system\n<|tool>declaration:now{description:<|"|>The time<|"|>,parameters:{properties:'
        '{exact:{type:<|"|>BOOLEAN<|"|>},zone:{type:<|"|>STRING<|"|>}},required:[<|"|>zone<|"|>],type:<|"|>OBJECT<|"|>}}'
        '<tool|><turn|>\n<|turn>user\nHi<turn|>\n<|turn>model\n<|tool_call>call:now{n:1,zone:<|"|>CET<|"|>}<tool_call|>'
        '<|tool_response>response:now{value:<|"|>12:00<|"|>}<tool_response|>'
    )


def test_messages_the_template_refuses() -> None:
    with pytest.raises(ChatTemplateError, match="must be the first message"):
        _render([USER, {"role": "system", "content": "late"}])
    with pytest.raises(ChatTemplateError, match="UndefinedError"):
        ChatTemplate("{{ messages[0].content.missing.again }}", special_tokens={}).render([USER])


def test_the_sandbox_hides_the_interpreter() -> None:
    template = ChatTemplate("{{ messages.__class__.__mro__ }}", special_tokens={})
    with pytest.raises(ChatTemplateError, match="SecurityError"):
        template.render([USER])


def test_callers_cannot_replace_special_tokens() -> None:
    template = ChatTemplate("{{ bos_token }}", special_tokens={"bos_token": "<bos>"})
    assert template.render([USER], variables={"bos_token": "x"}) == "<bos>"
    assert template.reserved_names == {"messages", "tools", "add_generation_prompt", "bos_token"}


def test_a_broken_template_names_its_line() -> None:
    with pytest.raises(InvalidInput, match="line 2"):
        ChatTemplate("ok\n{% if %}", special_tokens={})


def test_a_checkpoint_without_template_or_defaults(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, chat_template="")
    (tmp_path / "chat_template.jinja").unlink()
    text = load_checkpoint_text(tmp_path)
    assert (text.chat_template, text.defaults) == (None, SamplingDefaults())
    assert text.encode("A", add_special_tokens=True) == (2, 238 + 65)
    assert text.encode("<|turn>", add_special_tokens=False) == (105,)


def test_defaults_and_template_of_the_configuration_files(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, chat_template="from the file")
    settings = {"chat_template": [{"name": "default", "template": "{{ bos_token }}"}], "bos_token": {"content": "<b>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"top_k": 64, "top_p": 0.95, "temperature": None, "eos_token_id": [1, 106]})
    )
    (tmp_path / "chat_template.jinja").unlink()
    text = load_checkpoint_text(tmp_path)
    assert text.chat_template is not None
    assert text.chat_template.render([USER]) == "<b>"
    assert (text.defaults, text.eos_token_ids) == (SamplingDefaults(top_k=64, top_p=0.95), (1, 106))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{}", "tokenizer.json"),
        ("tokenizer_config.json", "[1]", "must hold a JSON object"),
        ("generation_config.json", "{", "generation_config.json"),
        ("generation_config.json", '{"top_k": "64"}', "top_k must be a number"),
        ("generation_config.json", '{"eos_token_id": ["1"]}', "eos_token_id must be a token id"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    write_tokenizer(tmp_path, chat_template="x")
    (tmp_path / name).write_text(content)
    with pytest.raises(InvalidInput, match=message):
        load_checkpoint_text(tmp_path)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"tokenizer.json is missing"):
        load_checkpoint_text(tmp_path)
