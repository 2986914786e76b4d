"""The small checkpoint's template follows Gemma 4's chat format; broken templates and files say what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from modelserve.errors import InvalidInput
from modelserve_tools.tiny.__main__ import chat_template
from modelserve_tools.tiny.tokenizer_files import write_tokenizer
from modelserve_worker.text.chat_template import ChatTemplate, ChatTemplateError
from modelserve_worker.text.checkpoint_text import SamplingDefaults, load_checkpoint_text

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
    messages: list[dict[str, Any]] = [
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
    messages: list[dict[str, Any]] = [
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


def _assistant(*calls: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "tool_calls": [{"id": f"c{i}", "function": call} for i, call in enumerate(calls)],
        **fields,
    }


def test_parallel_calls_and_their_responses_keep_their_order_and_find_their_names() -> None:
    other = {"name": "sum", "arguments": {}}
    conversation = [
        USER,
        _assistant(CALL, other, content="A moment."),
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "tool", "tool_call_id": "c0", "content": [{"type": "text", "text": "12:00"}]},
    ]
    turn = (
        '<|turn>model\nA moment.<|tool_call>call:now{n:1,zone:<|"|>CET<|"|>}<tool_call|>'
        "<|tool_call>call:sum{}<tool_call|>"
        '<|tool_response>response:sum{value:<|"|>3<|"|>}<tool_response|>'
        '<|tool_response>response:now{value:<|"|>12:00<|"|>}<tool_response|>'
    )
    assert _render(conversation, variant="31b").endswith(turn)
    said = [*conversation, {"role": "assistant", "content": "Noon."}, USER]
    assert f"{turn}Noon.<turn|>\n<|turn>user\nHi<turn|>\n<|turn>model\n" in _render(said)
    unanswered = [USER, _assistant(CALL), USER]
    assert "<tool_call|><turn|>\n<|turn>user\n" in _render(unanswered)


def test_thoughts_stay_with_the_calls_of_the_present_turn_only() -> None:
    thought = "<|channel>thought\nhm\nhm<channel|>"
    calling = _assistant(CALL, reasoning_content="hm\nhm")
    answer = {"role": "tool", "tool_call_id": "c0", "content": "12:00"}
    assert f"<|turn>model\n{thought}<|tool_call>" in _render([USER, calling, answer])
    assert f"<|turn>model\n{thought}<|tool_call>" in _render([USER, _assistant(CALL, reasoning="hm\nhm"), answer])
    again = _render([USER, calling, answer, _assistant(CALL, reasoning_content="hm\nhm"), answer], enable_thinking=True)
    assert f"<tool_response|>{thought}<|tool_call>" in again
    assert thought not in _render([USER, calling, answer, {"role": "assistant", "content": "Noon."}, USER])
    assert thought not in _render([USER, {"role": "assistant", "content": "Hi", "reasoning_content": "hm\nhm"}])


def test_schemas_have_their_types_in_upper_case_everywhere() -> None:
    schema = {
        "type": "object",
        "properties": {
            "type": {"type": ["string", "null"]},
            "when": {"anyOf": [{"type": "integer"}, {"enum": ["now", None]}]},
            "odd key": {"type": "array", "items": {"type": "number"}},
        },
        "additionalProperties": False,
    }
    text = _render([USER], tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}])
    quoted = text.replace('<|"|>', "'")
    assert quoted.startswith(
        "<bos><|turn>system\n<|tool>declaration:f{description:'',parameters:{additionalProperties:false,properties:{"
        "'odd key':{items:{type:'NUMBER'},type:'ARRAY'},type:{type:['STRING','NULL']},"
        "when:{anyOf:[{type:'INTEGER'},{enum:['now',null]}]}},type:'OBJECT'}}<tool|><turn|>\n"
    )


def test_messages_the_template_refuses() -> None:
    with pytest.raises(ChatTemplateError, match="arguments of a tool call must be an object"):
        _render([USER, _assistant({"name": "f", "arguments": "{}"})])
    with pytest.raises(ChatTemplateError, match="a tool message must follow"):
        _render([USER, {"role": "tool", "content": "12:00"}])
    with pytest.raises(ChatTemplateError, match="must be the first message"):
        _render([USER, {"role": "system", "content": "late"}])
    with pytest.raises(ChatTemplateError, match="UndefinedError"):
        ChatTemplate("{{ messages[0].content.missing.again }}", special_tokens={}).render([USER])


def test_a_template_that_never_ends_is_refused() -> None:
    with pytest.raises(ChatTemplateError, match="RecursionError"):
        ChatTemplate("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", special_tokens={}).render([USER])


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
    assert text.encoder.encode("A", add_special_tokens=True, most_tokens=9) == (2, 238 + 65)
    assert text.encoder.encode("<|turn>", add_special_tokens=False, most_tokens=9) == (105,)


def test_defaults_and_template_of_the_configuration_files(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, chat_template="from the file")
    settings = {"chat_template": [{"name": "default", "template": "{{ bos_token }}"}], "bos_token": {"content": "<b>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_k": 64, "top_p": 0.95, "temperature": None}))
    (tmp_path / "chat_template.jinja").unlink()
    text = load_checkpoint_text(tmp_path)
    assert text.chat_template is not None
    assert text.chat_template.render([USER]) == "<b>"
    assert text.defaults == SamplingDefaults(top_k=64, top_p=0.95)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{}", "tokenizer.json"),
        ("tokenizer_config.json", "[1]", "must hold a JSON object"),
        ("generation_config.json", "{", "generation_config.json"),
        ("generation_config.json", '{"top_k": "64"}', "top_k must be a number"),
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
