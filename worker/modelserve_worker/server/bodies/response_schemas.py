"""JSON schemas of the answers, for /openapi.json. The tests hold real answers to them."""

from __future__ import annotations

from typing import Any

_TEXT: dict[str, Any] = {"type": "string"}
_COUNT: dict[str, Any] = {"type": "integer", "minimum": 0}
_ANY: dict[str, Any] = {}
_NULL: dict[str, Any] = {"type": "null"}


def _object(optional: dict[str, Any] | None = None, /, **properties: Any) -> dict[str, Any]:
    """An object that has exactly `properties`, and perhaps `optional` ones."""
    return {
        "type": "object",
        "properties": properties | (optional or {}),
        "required": list(properties),
        "additionalProperties": False,
    }


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, _NULL]}


def _one_of(*values: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(values)}


_CARD = _object(
    {"parent": _TEXT},  # of an adapter: the model
    id=_TEXT, object=_one_of("model"), created=_COUNT, owned_by=_TEXT, root=_TEXT, max_model_len=_COUNT,
    input_modalities=_list(_one_of("text", "image", "audio")),
)  # fmt: skip
_STOP_REASON = {"type": ["string", "integer", "null"]}
_FINISH = _one_of("stop", "length", "tool_calls")
_USAGE = _object(
    {
        "prompt_tokens_details": _object({"image_tokens": _COUNT, "audio_tokens": _COUNT}, cached_tokens=_COUNT),
        "completion_tokens_details": _object(
            {"reasoning_tokens": _COUNT, "accepted_prediction_tokens": _COUNT, "rejected_prediction_tokens": _COUNT}
        ),
    },
    prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT,
)  # fmt: skip
_CALL = _object(id=_TEXT, type=_one_of("function"), function=_object(name=_TEXT, arguments=_TEXT))
_CHAT_MESSAGE = _object(
    {"reasoning_content": _TEXT, "reasoning": _TEXT, "tool_calls": _list(_CALL)},
    role=_one_of("assistant"), content=_or_null(_TEXT),
)  # fmt: skip
_LOGPROBS = _or_null({"type": "object"})
_PROMPT_LOGPROBS = {"prompt_logprobs": _or_null(_list(_or_null({"type": "object"})))}  # where they were asked for
_MESSAGE_BLOCK = {
    "oneOf": [
        _object(type=_one_of("text"), text=_TEXT),
        _object(type=_one_of("thinking"), thinking=_TEXT, signature=_TEXT),
        _object(type=_one_of("tool_use"), id=_TEXT, name=_TEXT, input={"type": "object"}),
    ]
}
_STATUS = _one_of("completed", "incomplete", "in_progress")
_OUTPUT_TEXT = _object(type=_one_of("output_text"), text=_TEXT, annotations=_list(_ANY), logprobs=_list(_ANY))
_OUTPUT_ITEM = {
    "oneOf": [
        _object(
            type=_one_of("message"), id=_TEXT, role=_one_of("assistant"), status=_STATUS, content=_list(_OUTPUT_TEXT)
        ),
        _object(
            type=_one_of("reasoning"), id=_TEXT, status=_STATUS, summary=_list(_ANY),
            content=_list(_object(type=_one_of("reasoning_text"), text=_TEXT)),
        ),
        _object(
            type=_one_of("function_call"), id=_TEXT, call_id=_TEXT, name=_TEXT, arguments=_TEXT, status=_STATUS
        ),
    ]
}  # fmt: skip
_RESPONSE_USAGE = _object(
    input_tokens=_COUNT,
    input_tokens_details=_object(
        {"image_tokens": _COUNT, "audio_tokens": _COUNT}, cached_tokens=_COUNT, cache_write_tokens=_COUNT
    ),
    output_tokens=_COUNT,
    output_tokens_details=_object(reasoning_tokens=_COUNT),
    total_tokens=_COUNT,
)

_TRANSCRIPTION_USAGE = _object(
    type=_one_of("tokens"), input_tokens=_COUNT, output_tokens=_COUNT, total_tokens=_COUNT,
    input_token_details=_object(text_tokens=_COUNT, audio_tokens=_COUNT),
)  # fmt: skip

SCHEMAS: dict[str, Any] = {
    "Transcription": _object(text=_TEXT, usage=_TRANSCRIPTION_USAGE),
    "ModelCard": _CARD,
    "Adapters": _object(
        limits=_object(max=_COUNT, rank=_COUNT, slots=_COUNT, targets=_list(_TEXT)), versionNames={"type": "boolean"},
        adapters=_list({"type": "object"}),
    ),
    "Told": _TEXT,
    "ModelList": _object(object=_one_of("list"), data=_list(_CARD)),
    "Completion": _object(
        id=_TEXT, object=_one_of("text_completion"), created=_COUNT, model=_TEXT, usage=_USAGE,
        choices=_list(
            _object(
                _PROMPT_LOGPROBS, index=_COUNT, text=_TEXT, logprobs=_LOGPROBS, finish_reason=_FINISH,
                stop_reason=_STOP_REASON,
            )
        ),
    ),
    "ChatCompletion": _object(
        _PROMPT_LOGPROBS, id=_TEXT, object=_one_of("chat.completion"), created=_COUNT, model=_TEXT, usage=_USAGE,
        choices=_list(
            _object(
                index=_COUNT, message=_CHAT_MESSAGE, logprobs=_LOGPROBS, finish_reason=_FINISH,
                stop_reason=_STOP_REASON,
            )
        ),
    ),
    "Response": {
        "type": "object",
        "properties": {
            "id": _TEXT, "object": _one_of("response"), "created_at": _COUNT, "model": _TEXT,
            "status": _one_of("completed", "incomplete"), "output": _list(_OUTPUT_ITEM), "usage": _RESPONSE_USAGE,
            "store": {"const": False}, "incomplete_details": _or_null(_object(reason=_TEXT)), "error": _NULL,
        },
        "required": ["id", "object", "created_at", "model", "status", "output", "usage", "store"],
    },
    "AnthropicMessage": _object(
        id=_TEXT, type=_one_of("message"), role=_one_of("assistant"), model=_TEXT, content=_list(_MESSAGE_BLOCK),
        stop_reason=_one_of("end_turn", "max_tokens", "stop_sequence", "tool_use"), stop_sequence=_or_null(_TEXT),
        usage=_object(
            input_tokens=_COUNT, cache_creation_input_tokens=_COUNT, cache_read_input_tokens=_COUNT,
            output_tokens=_COUNT,
        ),
    ),
    "InputTokens": _object(input_tokens=_COUNT),
    "Tokens": _object(
        count=_COUNT, max_model_len=_COUNT, tokens=_list(_COUNT), token_strs=_or_null(_list(_or_null(_TEXT)))
    ),
    "Text": _object(prompt=_TEXT),
    "Settings": {"type": "object"},
    "Health": _object(status=_one_of("loading", "ready", "draining", "failed"), detail=_TEXT),
    "Load": _object(server_load=_COUNT),
    "Version": _object(version=_TEXT),
    "Metrics": _TEXT,
    "Error": _object(error=_object(message=_TEXT, type=_TEXT, param=_or_null(_TEXT), code=_or_null(_TEXT))),
    "AnthropicError": _object(type=_one_of("error"), error=_object(type=_TEXT, message=_TEXT)),
}  # fmt: skip
