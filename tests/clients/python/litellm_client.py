"""litellm: the prefix of its argument, "openai" or "hosted_vllm"."""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm
from features import (
    ANSWER,
    AS_JSON,
    BASE_URL,
    CITY,
    DEGREES,
    HELLO,
    KEY,
    MODEL,
    SAID,
    THOUGHT,
    TOOL,
    WEATHER,
    run,
    same,
)

ASK: dict[str, Any] = {"model": f"{sys.argv[1]}/{MODEL}", "api_base": BASE_URL, "api_key": KEY, "num_retries": 0}


def _messages(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def chat() -> None:
    first = litellm.completion(**ASK, messages=_messages(HELLO)).choices[0].message
    same(first.content, SAID)
    history = [*_messages(HELLO), first.model_dump(), *_messages(HELLO)]  # as applications keep it
    same(litellm.completion(**ASK, messages=history).choices[0].message.content, SAID)


def stream() -> None:
    chunks = litellm.completion(**ASK, messages=_messages(HELLO), stream=True)
    same("".join(chunk.choices[0].delta.content or "" for chunk in chunks), SAID)


def _second_turn(message: Any) -> None:
    (call,) = message.tool_calls
    same(json.loads(call.function.arguments), {"city": CITY})
    result = {"role": "tool", "tool_call_id": call.id, "name": "get_weather", "content": "21"}
    history = [*_messages(WEATHER), message.model_dump(), result]
    same(litellm.completion(**ASK, messages=history, tools=[TOOL]).choices[0].message.content, ANSWER)


def tools() -> None:
    _second_turn(litellm.completion(**ASK, messages=_messages(WEATHER), tools=[TOOL]).choices[0].message)


def tools_stream() -> None:
    chunks = list(litellm.completion(**ASK, messages=_messages(WEATHER), tools=[TOOL], stream=True))
    _second_turn(litellm.stream_chunk_builder(chunks).choices[0].message)


def structured() -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "degrees": {"type": "integer"}},
        "required": ["city", "degrees"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema, "strict": True}}
    answer = litellm.completion(**ASK, messages=_messages(AS_JSON), response_format=wanted)
    same(json.loads(answer.choices[0].message.content), {"city": CITY, "degrees": DEGREES})


def reasoning() -> None:
    thinks = {"chat_template_kwargs": {"enable_thinking": True}}
    message = litellm.completion(**ASK, messages=_messages(HELLO), extra_body=thinks).choices[0].message
    same((message.reasoning_content, message.content), (THOUGHT, SAID))
    history = [*_messages(HELLO), message.model_dump(), *_messages(HELLO)]
    same(litellm.completion(**ASK, messages=history).choices[0].message.content, SAID)


def overflow() -> None:
    """Fallbacks for long prompts start by themselves: by the prompt's length, and by what is asked for on top of it."""
    for text, asked in (("x " * 40_000, {}), ("x", {"max_tokens": 40_000})):
        try:
            litellm.completion(**ASK, messages=_messages(text), **asked)
        except litellm.ContextWindowExceededError:
            pass
        else:
            raise AssertionError("no ContextWindowExceededError")
        router = litellm.Router(
            model_list=[
                {"model_name": "short", "litellm_params": dict(ASK)},
                {"model_name": "long", "litellm_params": {**ASK, "mock_response": "from the long one"}},
            ],
            context_window_fallbacks=[{"short": ["long"]}],
            num_retries=0,
        )
        answer = router.completion(model="short", messages=_messages(text), **asked)
        same(answer.choices[0].message.content, "from the long one")


run(chat, stream, tools, tools_stream, structured, reasoning, overflow)
